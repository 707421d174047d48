"""The scripted runtime: it says its script, notices a caller's faults, and refuses bad scripts by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeqwen.core.step import Batch, Chunk, Runtime
from edgeqwen.errors import ConfigInvalid, RuntimeFailed
from edgeqwen.runtime.fake import FakeRuntime, FakeScript, load_fake, parse_fake


def fake(sleep: Any = lambda _: None, **script: Any) -> FakeRuntime:
    return FakeRuntime(FakeScript(**script), vocab_size=100, num_slots=4, capacity=64, sleep=sleep)


def step(runtime: Runtime, *chunks: Chunk) -> list[int]:
    """The likeliest token of each chunk."""
    return [int(rows[-1].argmax()) for rows in runtime.step(Batch(chunks)).logits]


def generate(runtime: FakeRuntime, prompt: tuple[int, ...], num: int, *, slot: int = 0) -> list[int]:
    tokens = step(runtime, Chunk(slot, 0, prompt))
    for i in range(num - 1):
        tokens += step(runtime, Chunk(slot, len(prompt) + i, (tokens[-1],)))
    return tokens


def test_a_script_is_said_token_by_token_and_each_sequence_takes_the_next() -> None:
    runtime = fake(scripts=((7, 8), (9, 10)), eos=3)
    assert generate(runtime, (1, 2), 4) == [7, 8, 3, 3]
    assert generate(runtime, (1, 2), 3, slot=1) == [9, 10, 3]
    assert generate(runtime, (1, 2), 2, slot=2) == [7, 8]


def test_a_loop_starts_over_and_a_finished_script_goes_on_by_history() -> None:
    assert generate(fake(tokens=(7, 8), loop=True), (1,), 5) == [7, 8, 7, 8, 7]
    onward = generate(fake(tokens=(7,)), (1,), 3)
    assert onward[0] == 7
    assert onward == generate(fake(tokens=(7,)), (1,), 3)


def test_without_a_script_the_whole_history_decides() -> None:
    first = generate(fake(), (1, 2, 3), 6)
    assert first == generate(fake(), (1, 2, 3), 6)
    assert first != generate(fake(), (2, 1, 3), 6)
    assert len(set(first)) > 1


def test_chunks_and_neighbours_change_nothing() -> None:
    whole = step(fake(), Chunk(0, 0, (1, 2, 3, 4, 5)))
    runtime = fake()
    runtime.step(Batch((Chunk(0, 0, (1, 2), num_logits=0), Chunk(1, 0, (9, 9, 9)))))
    assert step(runtime, Chunk(0, 2, (3, 4, 5)), Chunk(2, 0, (4,)))[0] == whole[0]


def test_logits_are_given_for_the_rows_asked_for() -> None:
    runtime = fake()
    rows = runtime.step(Batch((Chunk(0, 0, (1, 2, 3), num_logits=2), Chunk(1, 0, (4, 5), num_logits=0)))).logits
    assert [r.shape for r in rows] == [(2, 100), (0, 100)]
    assert rows[0].dtype == np.float32
    assert int(rows[0][0].argmax()) == step(fake(), Chunk(0, 0, (1, 2)))[0]


def test_a_sequence_can_be_cut_back() -> None:
    runtime = fake(tokens=(7, 8, 9))
    assert generate(runtime, (1, 2), 3) == [7, 8, 9]
    assert step(runtime, Chunk(0, 3, (8,))) == [9]
    straight = fake()
    generate(straight, (1, 2), 3)
    again = step(straight, Chunk(0, 1, (5, 6)))
    assert again == step(fake(), Chunk(0, 0, (1, 5, 6)))


@pytest.mark.parametrize(
    "chunks",
    [
        (Chunk(0, 1, (5,)),),
        (Chunk(0, 0, ()),),
        (Chunk(4, 0, (1,)),),
        (Chunk(0, 0, (1,) * 65),),
        (Chunk(0, 0, (100,)),),
        (Chunk(1, 0, (1,)), Chunk(0, 0, (1,))),
        (Chunk(1, 0, (1,)), Chunk(1, 0, (1,))),
    ],
    ids=["gap", "empty", "no such slot", "beyond the capacity", "no such token", "unordered", "slot twice"],
)
def test_a_callers_fault_shows(chunks: tuple[Chunk, ...]) -> None:
    with pytest.raises(AssertionError):
        fake().step(Batch(chunks))


def test_steps_take_the_time_that_the_script_says() -> None:
    slept: list[float] = []
    runtime = fake(slept.append, step_s=0.5, prefill_token_s=0.125, hang_at_step=3, hang_s=7.0)
    runtime.step(Batch((Chunk(0, 0, (1, 2, 3, 4)),)))
    runtime.step(Batch((Chunk(0, 4, (5,)),)))
    runtime.step(Batch((Chunk(0, 5, (6,)),)))
    assert slept == [1.0, 0.5, 7.5]


def test_a_failing_step_empties_its_slots_and_no_other() -> None:
    runtime = fake(fail_at_step=2)
    runtime.step(Batch((Chunk(0, 0, (1,)), Chunk(1, 0, (2,)))))
    with pytest.raises(RuntimeFailed, match="step 2"):
        runtime.step(Batch((Chunk(1, 1, (3,)),)))
    assert runtime.held_slots == (0,)
    assert len(step(runtime, Chunk(0, 1, (3,)))) == 1


def test_nan_comes_at_the_steps_listed() -> None:
    runtime = fake(nan_at_step=(1, 3))
    found = [bool(np.isnan(runtime.step(Batch((Chunk(0, i, (1,)),))).logits[0]).all()) for i in range(3)]
    assert found == [True, False, True]


def test_caches_are_copied_moved_and_released() -> None:
    runtime = fake()
    step(runtime, Chunk(0, 0, (1, 2, 3)))
    data = runtime.read_kv(0, 0, 2)
    runtime.write_kv(1, 0, data)
    assert step(runtime, Chunk(1, 2, (3,))) == step(fake(), Chunk(0, 0, (1, 2, 3)))
    runtime.move(1, 3)
    assert list(runtime.held_slots) == [0, 3]
    with pytest.raises(AssertionError):
        runtime.move(0, 3)
    runtime.release(0)
    runtime.release(3)
    assert not runtime.held_slots
    runtime.close()
    with pytest.raises(AssertionError, match="after close"):
        step(runtime, Chunk(0, 0, (1,)))


def test_loading_tells_its_progress_and_takes_its_time() -> None:
    progress: list[float] = []
    slept: list[float] = []
    runtime = load_fake(FakeScript(load_s=2.0, capacity=77), progress.append, sleep=slept.append)
    assert progress[0] == 0.0
    assert progress[-1] == 1.0
    assert progress == sorted(progress)
    assert sum(slept) == pytest.approx(2.0)
    assert runtime.spec.capacity == 77
    with pytest.raises(RuntimeFailed, match="no luck"):
        load_fake(FakeScript(fail_load="no luck"), progress.append)


def test_scripts_are_read_from_text_files_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text('{"tokens": [5], "loop": true}')
    assert parse_fake(f"fake:{file}") == parse_fake('{"tokens": [5], "loop": true}') == FakeScript((5,), loop=True)
    assert parse_fake("fake:5, 6,7").tokens == (5, 6, 7)
    assert parse_fake("fake:") == parse_fake("") == FakeScript()
    assert parse_fake('{"fail_at_step": [2, 4]}').fail_at_step == (2, 4)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"tokns": [1]}', "tokns"),
        ('{"tokens": [-1]}', r"\$\.tokens"),
        ('{"tokens": ["a"]}', r"\$\.tokens"),
        ('{"step_s": -0.5}', r"\$\.step_s"),
        ('{"fail_at_step": 0}', r"\$\.fail_at_step"),
        ('{"loop": 1}', r"\$\.loop"),
        ('{"tokens": [1], "scripts": [[1]]}', "`tokens` and `scripts`"),
        ('{"vocab_size": 5, "num_tokens": 6}', "`num_tokens`"),
        ('{"tokens": [1]', "script"),
        ('{"tokens": ' + "[" * 100_000, "script"),
        ('{"tokns": ' + "[" * 100_000, "script"),
        ("no/such/file.json", "no/such/file.json"),
        ("1,x", "1,x"),
    ],
)
def test_a_bad_script_is_refused_and_its_key_named(text: str, named: str) -> None:
    with pytest.raises(ConfigInvalid, match=named):
        parse_fake(text)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="`vocab_size` 100"):
        fake(tokens=(1, 100))

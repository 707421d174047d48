"""What `core.step.Runtime` promises, of every kind of runtime alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeqwen.core.step import Batch, Chunk, Runtime
from edgeqwen.errors import RuntimeFailed
from tests.models import Array, all_logits
from tests.runtimes import CAPACITY, KINDS, SLOTS, Kind, runtime_of

LENGTH = 60


class Rig:
    """A runtime, and the logits of some sequences computed by themselves in one chunk."""

    def __init__(self, kind: Kind, runtime: Runtime) -> None:
        self.kind, self.runtime = kind, runtime
        draw = np.random.default_rng(11)
        self.ids = [[int(token) for token in draw.integers(0, runtime.spec.num_tokens, CAPACITY)] for _ in range(SLOTS)]
        self.alone = [all_logits(runtime, ids[:LENGTH], chunk=LENGTH) for ids in self.ids]

    def chunk(self, slot: int, start: int, stop: int, num_logits: int | None = None, *, of: int | None = None) -> Chunk:
        """Tokens of the sequence `of` (by default that of the slot's number), logits for all or the last ones."""
        ids = tuple(self.ids[slot if of is None else of][start:stop])
        return Chunk(slot, start, ids, len(ids) if num_logits is None else num_logits)

    def step(self, *chunks: Chunk) -> list[Array]:
        return [rows.copy() for rows in self.runtime.step(Batch(chunks)).logits]

    def same(self, got: Array, expected: Array) -> bool:
        """Whether they are the same, as nearly as this kind promises."""
        if got.shape != expected.shape:
            return False
        if not self.kind.tolerance:
            return np.array_equal(got, expected)
        return float(np.abs(got - expected).max()) <= self.kind.tolerance * float(self.alone[0].std())

    def release(self, slots: Sequence[int] = range(SLOTS)) -> None:
        for slot in slots:
            self.runtime.release(slot)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def shared(request: pytest.FixtureRequest) -> Iterator[Rig]:
    kind: Kind = request.param
    with runtime_of(kind) as runtime:
        yield Rig(kind, runtime)


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    yield shared
    shared.release()


def test_the_sequences_differ(rig: Rig) -> None:
    assert not rig.same(rig.alone[0], rig.alone[1])
    assert not rig.same(rig.alone[0][1:], rig.alone[0][:-1])


def test_the_spec_says_what_there_is(rig: Rig) -> None:
    spec = rig.runtime.spec
    assert (spec.num_slots, spec.capacity) == (SLOTS, CAPACITY)
    assert 0 < spec.num_tokens <= spec.vocab_size
    assert spec.max_chunk > 0
    assert spec.kv_bytes_per_token > 0
    assert rig.runtime.spec == spec


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_row_is_the_same_in_any_chunking_and_in_any_company(rig: Rig, data: st.DataObject) -> None:
    """Random steps: each moves a random subset of the sequences on by a random number of tokens."""
    done = [0] * SLOTS
    while min(done) < LENGTH:
        counts = data.draw(st.lists(st.sampled_from([0, 1, 1, 3, 30]), min_size=SLOTS, max_size=SLOTS))
        chunks = [
            rig.chunk(slot, done[slot], min(LENGTH, done[slot] + count))
            for slot, count in enumerate(counts)
            if count and done[slot] < LENGTH
        ]
        if not chunks:
            slot = done.index(min(done))
            chunks = [rig.chunk(slot, done[slot], done[slot] + 1)]
        for chunk, logits in zip(chunks, rig.step(*chunks), strict=True):
            assert rig.same(logits, rig.alone[chunk.slot][chunk.start : chunk.stop]), chunk
            done[chunk.slot] = chunk.stop
    rig.release()


def test_logits_come_for_the_last_rows_asked_for_in_float32(rig: Rig) -> None:
    one, none, some = rig.step(rig.chunk(0, 0, 20, 1), rig.chunk(1, 0, 20, 0), rig.chunk(3, 0, 20, 7))
    vocab = rig.runtime.spec.vocab_size
    assert [rows.shape for rows in (one, none, some)] == [(1, vocab), (0, vocab), (7, vocab)]
    assert one.dtype == some.dtype == np.float32
    assert rig.same(one, rig.alone[0][19:20])
    assert rig.same(some, rig.alone[3][13:20])


def test_a_step_may_want_no_logits_at_all(rig: Rig) -> None:
    (none,) = rig.step(rig.chunk(0, 0, 20, 0))
    assert none.shape == (0, rig.runtime.spec.vocab_size)
    (next_row,) = rig.step(rig.chunk(0, 20, 21))
    assert rig.same(next_row, rig.alone[0][20:21])


def test_hidden_states_come_beside_logits_and_are_the_same_in_any_chunking(rig: Rig) -> None:
    size = rig.runtime.spec.hidden_size
    if not size:
        pytest.skip(f"{rig.kind} gives no hidden states")
    ids = tuple(rig.ids[0][:12])
    whole = rig.runtime.step(Batch((Chunk(0, 0, ids, 1, 12), Chunk(1, 0, ids, 1, 0)))).hidden
    assert [rows.shape for rows in whole] == [(12, size), (0, size)]
    kept = whole[0].copy()
    rig.release()
    rig.runtime.step(Batch((Chunk(2, 0, ids[:5], 0),)))
    (rest,) = rig.runtime.step(Batch((Chunk(2, 5, ids[5:], 0, 7),))).hidden
    assert np.abs(rest - kept[5:]).max() <= max(rig.kind.tolerance, 1e-6) * kept.std() * 2


def test_a_sequence_that_is_cut_back_goes_on_as_if_it_had_never_been_longer(rig: Rig) -> None:
    rig.step(rig.chunk(0, 0, 20, 0))
    rig.step(Chunk(0, 20, tuple(rig.ids[1][:30]), 0))
    (rows,) = rig.step(rig.chunk(0, 20, 50))
    assert rig.same(rows, rig.alone[0][20:50])


def test_a_slot_between_two_others_keeps_its_cache(rig: Rig) -> None:
    rig.step(*(rig.chunk(slot, 0, 33, 0) for slot in range(3)))
    rig.step(rig.chunk(0, 33, 34), rig.chunk(2, 33, 34))
    (rows,) = rig.step(rig.chunk(1, 33, 34))
    assert rig.same(rows, rig.alone[1][33:34])


def test_keys_and_values_carry_a_sequence_to_another_slot(rig: Rig) -> None:
    rig.step(rig.chunk(0, 0, 40, 0))
    data = rig.runtime.read_kv(0, 0, 40)
    rig.runtime.release(0)
    rig.runtime.write_kv(2, 0, data)
    (rows,) = rig.step(rig.chunk(2, 40, 45, of=0))
    assert rig.same(rows, rig.alone[0][40:45])


def test_keys_and_values_are_bytes_of_the_size_stated_and_may_come_in_blocks(rig: Rig) -> None:
    rig.step(rig.chunk(0, 0, 48, 0))
    parts = [rig.runtime.read_kv(0, start, start + 16) for start in (0, 16, 32)]
    kept = [bytes(memoryview(part).cast("B")) for part in parts]
    assert [len(part) for part in kept] == [16 * rig.runtime.spec.kv_bytes_per_token] * 3
    rig.runtime.expect_kv(1, 0, 48)
    for start, part in zip((0, 16, 32), kept, strict=True):
        rig.runtime.write_kv(1, start, memoryview(part))
    (rows,) = rig.step(rig.chunk(1, 48, 52, of=0))
    assert rig.same(rows, rig.alone[0][48:52])


def test_what_was_read_does_not_change_with_the_slot(rig: Rig) -> None:
    rig.step(rig.chunk(0, 0, 20, 0))
    data = rig.runtime.read_kv(0, 0, 20)
    before = bytes(memoryview(data).cast("B"))
    rig.runtime.release(0)
    rig.step(rig.chunk(0, 0, 30, 0, of=1))
    assert bytes(memoryview(data).cast("B")) == before


def test_a_sequence_moves_and_leaves_its_slot_free(rig: Rig) -> None:
    rig.step(rig.chunk(0, 0, 40, 0))
    rig.runtime.move(0, 3)
    moved, anew = rig.step(rig.chunk(0, 0, 10, of=1), rig.chunk(3, 40, 44, of=0))[::-1]
    assert rig.same(moved, rig.alone[0][40:44])
    assert rig.same(anew, rig.alone[1][:10])


def test_every_position_of_a_slot_can_be_used(rig: Rig) -> None:
    rig.step(rig.chunk(0, 0, CAPACITY - 1, 0))
    (last,) = rig.step(rig.chunk(0, CAPACITY - 1, CAPACITY))
    rig.release()
    (whole,) = rig.step(rig.chunk(1, 0, CAPACITY, 1, of=0))
    assert rig.same(last, whole)


def test_a_token_outside_of_the_vocabulary_fails_the_step_and_no_other_slot(rig: Rig) -> None:
    rig.step(rig.chunk(0, 0, 30, 0), rig.chunk(1, 0, 10, 0))
    refusal = AssertionError if rig.kind.name == "fake" else RuntimeFailed  # the scripted one shows its caller's faults
    with pytest.raises(refusal, match="vocabulary"):
        rig.runtime.step(Batch((Chunk(1, 10, (rig.runtime.spec.vocab_size,)),)))
    with pytest.raises(refusal, match="vocabulary"):
        rig.runtime.step(Batch((Chunk(2, 0, (-1,)),)))
    rig.release((1, 2))
    other, anew = rig.step(rig.chunk(0, 30, 34), rig.chunk(1, 0, 20))
    assert rig.same(other, rig.alone[0][30:34])
    assert rig.same(anew, rig.alone[1][:20])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "fake"], ids=str)
def test_keys_and_values_of_one_load_mean_the_same_to_the_next(kind: Kind) -> None:
    with runtime_of(kind) as first:
        rig = Rig(kind, first)
        rig.step(rig.chunk(0, 0, 40, 0))
        data, fingerprint = bytes(memoryview(first.read_kv(0, 0, 40)).cast("B")), first.spec.kv_fingerprint
    with runtime_of(kind) as second:
        assert second.spec.kv_fingerprint == fingerprint != ""
        second.write_kv(0, 0, data)
        (rows,) = second.step(Batch((rig.chunk(0, 40, 44),))).logits
        assert rig.same(rows.copy(), rig.alone[0][40:44])


def test_kinds_whose_keys_and_values_differ_say_so() -> None:
    fingerprints = {}
    for kind in KINDS:
        if kind.name in {"onnx-fp32", "onnx-int8", "torch-fp32", "torch-bf16", "torch-int8", "torch-fp32-bf16-cache"}:
            with runtime_of(kind) as runtime:
                fingerprints[kind.name] = runtime.spec.kv_fingerprint
    assert len(set(fingerprints.values())) == len(fingerprints)

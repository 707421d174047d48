"""What is measured of a machine: where the graphs change, what is kept, and that rubbish is measured anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeqwen.core.model import Stage
from edgeqwen.core.step import Chunk
from edgeqwen.runtime.profile import NEVER, ROWS, MachineProfile, measure, out_of_order, read_profile, write_profile


def profile_of(decode: dict[int, float], prefill: dict[int, float]) -> MachineProfile:
    return MachineProfile(tuple(decode.items()), tuple(prefill.items()))


def test_the_prefill_graph_is_taken_from_the_rows_on_where_it_stays_the_faster_one() -> None:
    profile = profile_of({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, {1: 3.0, 2: 1.9, 4: 5.0, 8: 6.0})
    assert profile.prefill_rows == 8
    assert profile.row_costs == ((1, 1.0), (2, 2.0), (4, 4.0), (8, 6.0))


def test_a_prefill_graph_that_is_never_faster_is_never_taken() -> None:
    profile = profile_of({1: 1.0, 8: 2.0}, {1: 3.0, 8: 3.0})
    assert profile.prefill_rows == NEVER
    assert profile.row_costs == ((1, 1.0), (8, 2.0))


def test_steps_are_timed_once_for_each_number_of_rows_and_graph_after_a_context() -> None:
    seen: list[tuple[Stage, int, int]] = []

    def time_step(stage: Stage, chunk: Chunk) -> float:
        seen.append((stage, chunk.start, len(chunk.ids)))
        return len(chunk.ids) * (1.0 if stage == "decode" else 0.5)

    profile = measure(time_step, has_prefill=True, capacity=4096)
    assert profile.prefill_rows == 1
    assert [rows for rows, _ in profile.decode_s] == list(ROWS)
    assert seen[0] == ("prefill", 0, 64)
    assert {start for _, start, _ in seen[1:]} == {64}


def test_what_was_timed_while_the_machine_was_busy_is_timed_again() -> None:
    num_timed: dict[int, int] = {}

    def time_step(_: Stage, chunk: Chunk) -> float:
        rows = len(chunk.ids)
        num_timed[rows] = num_timed.get(rows, 0) + 1
        return 1.0 + rows / 100 + (5.0 if rows in {2, 8} and num_timed[rows] <= 3 else 0.0)

    profile = measure(time_step, has_prefill=False, capacity=4096)
    assert profile.decode_s == tuple((rows, 1.0 + rows / 100) for rows in ROWS)
    assert num_timed[1] == 3  # nothing takes less


def test_what_takes_longer_however_often_it_is_timed_costs_what_more_rows_do() -> None:
    num_steps = 0

    def time_step(_: Stage, chunk: Chunk) -> float:
        nonlocal num_steps
        num_steps += 1
        return {1: 1.0, 2: 4.0, 4: 2.0}.get(len(chunk.ids), 5.0)

    profile = measure(time_step, has_prefill=False, capacity=4096)
    assert profile.decode_s == ((1, 1.0), (2, 2.0), (4, 2.0), *((rows, 5.0) for rows in ROWS[3:]))
    assert num_steps == 1 + 3 * (len(ROWS) + 2 * 2)


def test_a_small_fall_is_no_reason_to_time_again() -> None:
    assert out_of_order({1: 1.0, 2: 0.8, 4: 0.9}) == ()
    assert out_of_order({1: 1.0, 2: 0.9, 4: 0.7}) == (1, 4)


def test_a_small_slot_is_timed_within_its_capacity() -> None:
    stops: list[int] = []

    def time_step(_: Stage, chunk: Chunk) -> float:
        stops.append(chunk.stop)
        return 1.0

    profile = measure(time_step, has_prefill=False, capacity=9)
    assert max(stops) <= 9
    assert profile.prefill_s == ()


def test_a_profile_is_kept_and_found(tmp_path: Path) -> None:
    profile = profile_of({1: 0.01, 4: 0.02}, {1: 0.02, 4: 0.01})
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"decode_s":[]}', b'{"decode_s":[[0,1.0]]}', b'{"decode_s":[[1,1.0]],"version":9}']
)
def test_a_file_that_is_no_profile_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.json").write_bytes(content)
    assert read_profile(tmp_path / "p.json") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    write_profile(tmp_path / "missing" / "p.json", profile_of({1: 0.01}, {}))
    assert read_profile(tmp_path / "missing" / "p.json") is None

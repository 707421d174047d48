"""The accounting of slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.kvcache import SlotTable


def acquire(table: SlotTable) -> int | None:
    slot = table.choose()
    if slot is not None:
        table.acquire(slot)
    return slot


def test_slots_are_handed_out_from_the_first_on() -> None:
    table = SlotTable(3, 16)
    assert [acquire(table) for _ in range(4)] == [0, 1, 2, None]
    assert table.num_free == 0
    assert table.taken() == (0, 1, 2)


def test_a_hole_between_taken_slots_is_filled_before_the_span_grows() -> None:
    table = SlotTable(6, 16)
    for _ in range(4):
        acquire(table)
    table.release(0)
    table.release(2)
    assert acquire(table) == 2
    assert acquire(table) == 0


def test_the_nearest_slot_is_taken_when_there_is_no_hole() -> None:
    table = SlotTable(8, 16)
    for _ in range(6):
        acquire(table)
    for slot in (0, 1, 2, 3, 5):
        table.release(slot)
    assert acquire(table) == 3, "next to slot 4, and lower than 5"
    assert acquire(table) == 2


def test_of_slots_that_are_as_near_the_one_worth_most_is_taken() -> None:
    table = SlotTable(4, 16)
    assert table.choose(lambda slot: (slot % 3,)) == 2
    table.acquire(1)
    assert table.choose(lambda slot: (slot,)) == 2, "3 lies farther away"


def test_lengths_belong_to_taken_slots_and_end_at_the_capacity() -> None:
    table = SlotTable(2, 16)
    slot = acquire(table)
    assert slot == 0
    table.set_length(slot, 16)
    assert table.length(slot) == table.num_held_tokens == 16
    with pytest.raises(AssertionError, match="17 tokens in a capacity of 16"):
        table.set_length(slot, 17)
    with pytest.raises(AssertionError, match="not taken"):
        table.set_length(1, 3)
    table.release(slot)
    assert table.num_held_tokens == 0
    with pytest.raises(AssertionError, match="not taken"):
        table.release(slot)


def test_check_finds_a_slot_that_is_free_and_taken_at_once() -> None:
    table = SlotTable(2, 16)
    acquire(table)
    table._free.add(0)
    with pytest.raises(AssertionError, match="free and taken"):
        table.check()


@given(
    st.integers(1, 6), st.lists(st.tuples(st.sampled_from("arl"), st.integers(0, 5), st.integers(0, 16)), max_size=60)
)
def test_any_run_of_operations_keeps_the_accounts(num_slots: int, operations: list[tuple[str, int, int]]) -> None:
    table = SlotTable(num_slots, 16)
    model: dict[int, int] = {}
    for kind, place, length in operations:
        chosen = sorted(model)[place % len(model)] if model else None
        if kind == "a":
            slot = acquire(table)
            assert (slot is None) == (len(model) == num_slots)
            assert slot not in model
            if slot is not None:
                model[slot] = 0
        elif chosen is not None and kind == "r":
            table.release(chosen)
            del model[chosen]
        elif chosen is not None:
            table.set_length(chosen, length)
            model[chosen] = length
        table.check()
        assert table.taken() == tuple(sorted(model))
        assert {slot: table.length(slot) for slot in model} == model
        assert table.num_free == num_slots - len(model)
        assert table.num_held_tokens == sum(model.values())
        assert repr(table) == f"<SlotTable [{len(model)}/{num_slots} taken, {sum(model.values())} tokens]>"

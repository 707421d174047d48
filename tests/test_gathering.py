"""Texts that are computed together: which, and that nothing else is the worse for it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.core.step import Chunk
from edgeqwen.scheduler.gathering import fits, num_rows
from tests.scheduling import CHUNK, Desk, alone, text


def embed(desk: Desk, rid: str, lengths: Sequence[int], *, owner: str = "a") -> None:
    texts = tuple(text(seed, length) for seed, length in enumerate(lengths))
    request = Request(rid, owner, (), SamplingParams(), 0, n=len(texts), may_cache=False, pooling="mean", texts=texts)
    desk.scheduler.submit(request, now=desk.now)


def test_rows_are_those_of_all_slots_between_the_first_and_the_last() -> None:
    chunks = [Chunk(2, 0, (1,) * 8), Chunk(5, 0, (1,) * 3)]
    assert num_rows(chunks) == 32
    assert num_rows([]) == 0
    assert fits(chunks, Chunk(3, 0, (1,) * 8), 32)
    assert not fits(chunks, Chunk(6, 0, (1,)), 32)


def test_rows_of_no_use_are_no_more_than_a_step_costs() -> None:
    chunks = [Chunk(0, 0, (1,) * 8), Chunk(1, 0, (1,) * 8)]
    assert fits(chunks, Chunk(2, 0, (1,) * 13), 1000), "10 more than with the others alone"
    assert not fits(chunks, Chunk(2, 0, (1,) * 17), 1000), "18 more"
    assert fits([Chunk(0, 0, (1,) * 17)], Chunk(1, 0, (1,)), 1000)
    assert not fits([Chunk(0, 0, (1,) * 18)], Chunk(1, 0, (1,)), 1000)


def prefill_widths(desk: Desk) -> list[list[int]]:
    """Lengths of the chunks of each prefill step."""
    return [[len(chunk.ids) for chunk in plan.batch.chunks] for plan in desk.plans if plan.is_prefill]


def test_short_prompts_that_came_together_are_one_step() -> None:
    desk = Desk()
    prompts = {f"r{number}": text(number, 15 + number) for number in range(3)}
    for rid, prompt in prompts.items():
        desk.submit(rid, prompt, 5)
    desk.finish()
    assert prefill_widths(desk) == [[15, 16, 17]]
    assert all(desk.drawn[rid] == alone(prompt, 5) for rid, prompt in prompts.items())


def test_a_prompt_of_several_chunks_goes_by_itself() -> None:
    desk = Desk()
    for seed, length in enumerate((20, 70, 20)):
        desk.submit(f"r{seed}", text(seed, length), 1)
    desk.finish()
    assert sorted(prefill_widths(desk)) == [[6], [20, 20], [64]]


def test_what_the_first_computes_is_not_computed_for_the_second_too() -> None:
    desk = Desk()
    shared = text(1, 36)
    for rid in "ab":
        desk.submit(rid, (*shared, ord(rid)), 3)
    desk.finish()
    assert sum(map(sum, prefill_widths(desk))) < 2 * 37
    assert desk.drawn["b"] == alone((*shared, ord("b")), 3)


def test_strangers_with_the_same_prompt_are_computed_together() -> None:
    desk = Desk()
    for owner in "ab":
        desk.submit(owner, text(1, 30), 3, owner=owner)
    desk.finish()
    assert prefill_widths(desk) == [[30, 30]]


def test_choices_of_a_request_copy_what_the_first_has_computed() -> None:
    desk = Desk()
    desk.submit("a", text(1, 10), 3, n=3)
    desk.finish()
    assert [10] in prefill_widths(desk)
    assert sum(map(sum, prefill_widths(desk))) == 12


def test_prompts_and_texts_are_not_mixed() -> None:
    desk = Desk()
    desk.submit("g", text(7, 15), 1)
    embed(desk, "e", [15, 15])
    desk.finish()
    assert sorted(prefill_widths(desk)) == [[15], [15, 15]]


def test_texts_are_gathered_up_to_the_size_of_a_chunk() -> None:
    desk = Desk(num_slots=8)
    embed(desk, "e", [15] * 10)
    desk.finish()
    assert [len(plan.batch.chunks) for plan in desk.plans if plan.batch.chunks] == [4, 4, 2]
    assert all(desk.ends["e", choice] == "stop" for choice in range(10))


def test_one_that_sits_too_far_off_has_a_step_of_its_own() -> None:
    desk = Desk(num_slots=6)
    for number in range(5):
        desk.submit(f"g{number}", text(100 + number, 5), 40)
    desk.until(lambda: len(desk.drawn) == 5)
    for number in (0, 1):
        desk.cancel(f"g{number}")
    embed(desk, "e", [20, 20, 20])
    desk.finish()
    widths = [num_rows(plan.batch.chunks) for plan in desk.plans if plan.is_prefill]
    assert max(widths) <= CHUNK
    assert all(desk.ends["e", choice] == "stop" for choice in range(3))


def test_the_texts_of_two_owners_take_turns() -> None:
    desk = Desk(num_slots=1)
    embed(desk, "a", [50] * 4, owner="a")
    embed(desk, "b", [50] * 4, owner="b")
    desk.finish()
    order = [plan.sequences[0][0] for plan in desk.plans if plan.batch.chunks]
    assert all(abs(order[:stop].count("a") - order[:stop].count("b")) <= 1 for stop in range(len(order) + 1)), order


@settings(max_examples=60, deadline=None)
@given(
    num_slots=st.integers(1, 5),
    budget=st.integers(150, 1500),
    requests=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(1, 100), min_size=1, max_size=6), st.sampled_from("ab")),
        min_size=1,
        max_size=6,
    ),
    cancelled=st.sets(st.integers(0, 5)),
    gap=st.integers(0, 6),
)
def test_whatever_runs_together_ends_and_answers_are_what_they_are_alone(
    num_slots: int,
    budget: int,
    requests: list[tuple[bool, list[int], str]],
    cancelled: set[int],
    gap: int,
) -> None:
    desk = Desk(num_slots=num_slots, budget=budget)
    for number, (is_embedding, lengths, owner) in enumerate(requests):
        if is_embedding:
            embed(desk, f"r{number}", lengths, owner=owner)
        else:
            desk.submit(f"r{number}", text(50 + number, lengths[0]), 5, owner=owner)
        for _ in range(gap):
            desk.step()
        if number in cancelled:
            desk.cancel(f"r{number}")
    desk.finish()
    for number, (is_embedding, lengths, _) in enumerate(requests):
        rid = f"r{number}"
        for choice in range(len(lengths) if is_embedding else 1):
            assert (rid, choice) in desk.ends
        if not is_embedding and number not in cancelled:
            assert desk.drawn[rid] == alone(text(50 + number, lengths[0]), 5)
        if is_embedding and number not in cancelled:
            assert desk.computed[rid] == sum(lengths)
    assert all(num_rows(plan.batch.chunks) <= CHUNK for plan in desk.plans if plan.is_prefill)

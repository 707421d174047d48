"""What is known of a prompt is not computed, to the token, whoever knows it: counted in steps, plans and tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edgeqwen.errors import RuntimeFailed
from edgeqwen.kvcache import SHARED
from edgeqwen.runtime.fake import FakeScript
from edgeqwen.scheduler import StepPlan, pieces, transfers
from tests.scheduling import CHUNK, TOKEN_BYTES, Desk, alone, text

PROMPT = text(1, 200)


def test_of_a_prompt_that_is_known_one_token_is_computed() -> None:
    desk = Desk()
    assert desk.run("first", PROMPT) == 200
    assert desk.run("again", PROMPT) == 1
    assert (desk.cached["first"], desk.cached["again"]) == (0, 199)
    assert desk.drawn["again"] == desk.drawn["first"] == alone(PROMPT, 4)


@pytest.mark.parametrize("common", [1, 5, 63, 64, 65, 100, 128, 199])
def test_prompts_that_part_within_a_block_share_all_before(common: int) -> None:
    desk = Desk()
    desk.run("first", PROMPT)
    other = PROMPT[:common] + text(PROMPT[common] + 1, 60)
    assert desk.run("other", other, 9) == 60
    assert desk.cached["other"] == common
    assert desk.drawn["other"] == alone(other, 9)


def test_a_shorter_prompt_is_known_but_for_its_last_token() -> None:
    desk = Desk()
    desk.run("first", PROMPT)
    assert desk.run("shorter", PROMPT[:77]) == 1
    assert desk.drawn["shorter"] == alone(PROMPT[:77], 4)


def test_the_answer_is_known_too_when_the_conversation_goes_on() -> None:
    """All tokens but the last of the answer, which was drawn and never computed."""
    desk = Desk()
    desk.run("one", PROMPT, 150)
    turn = (*desk.conversation("one", PROMPT), 7, 8)
    assert desk.run("two", turn, 5) == 3
    assert desk.cached["two"] == 200 + 150 - 1
    assert desk.drawn["two"] == alone(turn, 5)


def test_an_edited_turn_and_a_dropped_one_share_what_comes_before() -> None:
    desk = Desk()
    system, question = text(2, 50), text(3, 30)
    desk.run("one", system + question, 20)
    one = desk.conversation("one", system + question)
    two = one + text(4, 25)
    desk.run("two", two, 20)
    edited = one + text(5, 25)
    assert desk.run("edited", edited, 6) == 25
    assert desk.drawn["edited"] == alone(edited, 6)
    assert desk.run("dropped", one, 6) == 1
    other_system = (*system[:10], system[10] ^ 1, *system[11:], *question)
    assert desk.run("other system", other_system, 6) == 80 - 10
    assert desk.drawn["other system"] == alone(other_system, 6)


def test_another_owner_computes_all() -> None:
    desk = Desk()
    desk.run("mine", PROMPT)
    assert desk.run("theirs", PROMPT, owner="b") == 200
    assert desk.cached["theirs"] == 0
    assert desk.run("theirs again", PROMPT, owner="b") == 1


def test_what_is_shared_is_computed_once_and_by_none_of_the_owners() -> None:
    desk = Desk()
    system = text(6, 150)
    desk.scheduler.keep_for_good(SHARED, system)
    desk.want("system", system, owner=SHARED)
    desk.finish()
    assert desk.computed[""] == 150
    for owner in "abc":
        assert desk.run(owner, system + text(7, 10), owner=owner) == 10
        assert desk.cached[owner] == 150
    assert desk.run("again", system + text(7, 10), owner="c") == 1, "what comes behind is the owner's own"
    assert desk.computed[""] == 150


def test_what_is_kept_for_good_outlasts_whatever_comes() -> None:
    desk = Desk(budget=800)
    system = text(6, 130)
    desk.scheduler.keep_for_good(SHARED, system)
    desk.want("system", system, owner=SHARED)
    desk.finish()
    for number in range(10):
        desk.run(f"other {number}", text(20 + number, 300))
    assert desk.store.stats().num_evicted > 20
    assert desk.run("a", system + text(7, 10)) == 10


def test_what_need_not_be_kept_any_longer_goes_like_anything_else() -> None:
    desk = Desk(budget=800)
    system = text(6, 130)
    desk.scheduler.keep_for_good(SHARED, system)
    desk.want("system", system, owner=SHARED)
    desk.finish()
    desk.run("first", system + text(7, 10))
    desk.scheduler.keep_no_longer(SHARED, system)
    for number in range(10):
        desk.run(f"other {number}", text(20 + number, 300))
    assert desk.run("a", system + text(8, 10)) == 140


def test_requests_that_begin_alike_and_come_together_compute_that_once() -> None:
    desk = Desk()
    common = text(1, 600)
    prompts = {rid: common + text(number, 10) for number, rid in enumerate("abcd", 2)}
    for rid, prompt in prompts.items():
        desk.submit(rid, prompt, owner="same")
    desk.finish()
    assert desk.computed == {"a": 610, "b": 10, "c": 10, "d": 10}
    assert desk.cached == {"a": 0, "b": 600, "c": 600, "d": 600}
    for rid, prompt in prompts.items():
        assert desk.drawn[rid] == alone(prompt, 4)
    assert sum(save.stop - save.start for plan in desk.plans for save in plan.saves) < 2 * 700, "it is read once"


def test_a_prompt_that_begins_like_a_sequence_that_decodes_has_its_answer_too() -> None:
    desk = Desk()
    desk.submit("long", PROMPT, 300)
    desk.until(lambda: len(desk.drawn["long"]) == 50)
    prompt = (*PROMPT, *desk.drawn["long"][:40], 3, 4)
    desk.submit("branch", prompt, 5)
    desk.finish()
    assert desk.computed["branch"] == 2
    assert desk.drawn["branch"] == alone(prompt, 5)
    assert desk.drawn["long"] == alone(PROMPT, 300), "and nothing of it was disturbed"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """A step moves three blocks at most; the tokens of that."""
    for module in (pieces, transfers):
        monkeypatch.setattr(module, "MAX_BYTES", 3 * 64 * TOKEN_BYTES)
    return 3 * 64


def test_a_long_beginning_is_put_out_in_pieces_and_waited_for_to_its_end(small_pieces: int) -> None:
    desk = Desk()
    common = text(1, 600)
    desk.submit("a", common + text(2, 10), 100)
    desk.until(lambda: len(desk.drawn["a"]) == 2)
    desk.submit("b", common + text(3, 10))
    num_plans = len(desk.plans)
    desk.until(lambda: bool(desk.drawn["b"]))
    assert desk.computed["b"] == 10
    saved = [num_saved(plan) for plan in desk.plans if plan.saves]
    assert (max(saved), sum(saved)) == (small_pieces, 600)
    loaded = [num_loaded(plan) for plan in desk.plans if plan.loads]
    assert (max(loaded), sum(loaded)) == (small_pieces, 600)
    steps = [dict(plan.sequences) for plan in desk.plans[num_plans:]]
    assert all("a" in one or "a" in next_one for one, next_one in pairwise(steps)), "a goes on meanwhile"
    desk.finish()
    assert desk.drawn["b"] == alone(common + text(3, 10), 4)


def num_saved(plan: StepPlan) -> int:
    return sum(save.stop - save.start for save in plan.saves)


def num_loaded(plan: StepPlan) -> int:
    return sum(load.stop - load.start for load in plan.loads)


def test_nobody_waits_for_a_few_tokens() -> None:
    desk = Desk()
    desk.submit("a", PROMPT, 100)
    desk.until(lambda: len(desk.drawn["a"]) == 5)
    desk.submit("b", PROMPT[:20] + text(9, 50))
    num_plans = len(desk.plans)
    desk.until(lambda: bool(desk.drawn["b"]))
    assert not any(plan.saves for plan in desk.plans[num_plans:])
    desk.finish()


def test_without_the_cache_nothing_is_used_and_nothing_left() -> None:
    desk = Desk()
    desk.run("known", PROMPT)
    num_bytes = desk.store.memory_bytes
    assert desk.run("a", PROMPT, may_cache=False) == 200
    assert desk.run("b", text(8, 100), may_cache=False) == 100
    assert (desk.cached["a"], desk.store.memory_bytes) == (0, num_bytes)
    assert desk.run("c", text(8, 100)) == 100
    desk.submit("running", text(9, 100), 50, may_cache=False)
    desk.until(lambda: bool(desk.drawn["running"]))
    desk.submit("d", text(9, 100))
    desk.finish()
    assert desk.computed["d"] == 100, "not while it runs either"


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_a_cancelled_prompt_is_gone_on_with_where_it_was(num_chunks: int) -> None:
    desk = Desk()
    prompt = text(1, 300)
    desk.submit("first", prompt)
    desk.until(lambda: desk.computed["first"] == num_chunks * CHUNK)
    desk.cancel("first")
    assert desk.run("second", prompt) == 300 - num_chunks * CHUNK
    assert desk.drawn["second"] == alone(prompt, 4)


def test_a_prompt_cancelled_within_a_chunk_keeps_the_chunk() -> None:
    desk = Desk()
    prompt = text(1, 300)
    desk.submit("first", prompt)
    plan = desk.begin()
    desk.cancel("first")
    assert plan is not None
    desk.land(plan)
    assert desk.run("second", prompt) == 300 - CHUNK


@pytest.mark.usefixtures("small_pieces")
def test_a_prompt_in_progress_is_waited_for_when_its_request_ends() -> None:
    """It has left its slot, and some blocks are not there yet."""
    desk = Desk()
    prompt = text(1, 600)
    desk.submit("first", prompt)
    desk.until(lambda: desk.computed["first"] == 512)
    desk.cancel("first")
    desk.submit("second", prompt)
    desk.finish()
    assert desk.computed["second"] == 600 - 512


@pytest.mark.parametrize("fails", [FakeScript(fail_at_step=3), FakeScript(fail_at_step=5)], ids=["prompt", "answer"])
def test_a_step_that_fails_leaves_nothing(fails: FakeScript) -> None:
    script = FakeScript(fail_at_step=fails.fail_at_step, kv_bytes_per_token=TOKEN_BYTES, max_chunk=CHUNK)
    desk = Desk(script=script)
    desk.submit("a", PROMPT)
    with pytest.raises(RuntimeFailed) as caught:
        desk.finish()
    desk.take(desk.scheduler.fail(desk.plans[-1], caught.value, now=desk.now))
    desk.finish()
    assert desk.failed == {"a"}
    assert desk.store.memory_bytes == 0
    assert desk.run("b", PROMPT) == 200
    assert desk.drawn["b"] == alone(PROMPT, 4)


def test_a_row_that_is_not_a_number_leaves_nothing() -> None:
    desk = Desk()
    desk.submit("a", PROMPT)
    desk.until(lambda: len(desk.drawn["a"]) == 2)
    plan = desk.begin()
    assert plan is not None
    desk.runtime.step(plan.batch)
    for events in desk.scheduler.commit(plan, [[RuntimeFailed("nan")]], duration_s=0.01, now=desk.now):
        desk.take(events)
    desk.finish()
    assert desk.failed == {"a"}
    assert desk.store.memory_bytes == 0
    assert desk.run("b", PROMPT) == 200


def test_the_choices_of_a_request_share_what_is_known_and_what_they_compute() -> None:
    desk = Desk()
    desk.run("first", PROMPT)
    prompt = PROMPT[:150] + text(9, 40)
    assert desk.run("many", prompt, n=3) == 40 + 1 + 1
    assert desk.cached["many"] == 150
    assert desk.drawn["many"] == alone(prompt, 4)


@pytest.mark.parametrize("budget", [710, 800, 1000, 1500, 1700])
def test_a_beginning_that_has_no_room_in_the_budget_is_shared_as_far_as_it_has(budget: int) -> None:
    """What is read is kept: the second block is not made room for by dropping the first."""
    desk = Desk(budget=budget)
    common = text(1, 600)
    for rid, last in (("a", 2), ("b", 3)):
        desk.submit(rid, common + text(last, 10), 90)
    desk.finish()
    assert sum(num_saved(plan) for plan in desk.plans) <= 3 * 700
    for rid, last in (("a", 2), ("b", 3)):
        assert desk.drawn[rid] == alone(common + text(last, 10), 90)


# Blocks that are on disk alone.


def on_disk(prompt: tuple[int, ...], *, budget: int = 2000, answers: bool = False) -> Desk:
    """All of the prompt is on disk, and nothing of it in memory."""
    desk = Desk(budget=budget, disk=10_000, answers_fetches=answers)
    desk.want("k", prompt)
    desk.finish()
    desk.now += 10.0
    assert desk.write() == -(-len(prompt) // 64)
    assert desk.store.reserve(budget * TOKEN_BYTES)
    desk.store.unreserve(budget * TOKEN_BYTES)
    assert desk.store.memory_bytes == 0
    return desk


def test_blocks_on_disk_are_read_and_not_computed() -> None:
    desk = on_disk(PROMPT, answers=True)
    desk.submit("a", (*PROMPT, 5))
    desk.step()
    desk.finish()
    assert (desk.computed["a"], desk.cached["a"]) == (1, 200)
    assert desk.drawn["a"] == alone((*PROMPT, 5), 4)
    assert desk.run("b", (*PROMPT, 6)) == 1, "now they are in memory"


def test_others_go_on_while_the_disk_is_read() -> None:
    desk = on_disk(PROMPT)
    desk.submit("a", (*PROMPT, 5))
    assert desk.step() is None
    assert len(desk.fetches) == 1
    desk.submit("b", text(3, 100))
    desk.until(lambda: ("b", 0) in desk.ends)
    assert not desk.drawn["a"]
    desk.read()
    desk.finish()
    assert (desk.computed["a"], desk.computed["b"]) == (1, 100)


def test_what_is_damaged_is_computed_and_nobody_asks_for_it_again() -> None:
    desk = on_disk(PROMPT)
    desk.submit("a", (*PROMPT, 5))
    desk.step()
    desk.read(is_damaged=True)
    desk.finish()
    assert (desk.computed["a"], desk.cached["a"]) == (201, 0)
    assert desk.drawn["a"] == alone((*PROMPT, 5), 4)
    assert not desk.files
    assert desk.store.disk_bytes == 0


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_request_that_ends_while_the_disk_is_read_leaves_no_trace(is_damaged: bool) -> None:
    desk = on_disk(PROMPT)
    desk.submit("a", (*PROMPT, 5))
    desk.step()
    desk.cancel("a")
    assert desk.scheduler.is_idle
    desk.read(is_damaged=is_damaged)
    desk.finish()
    budget = desk.store.budget_bytes
    assert desk.store.reserve(budget), "nothing is pinned any more"
    desk.store.unreserve(budget)
    desk.answers_fetches = True
    desk.submit("b", (*PROMPT, 5))
    desk.step()
    desk.finish()
    assert desk.computed["b"] == (201 if is_damaged else 1)


def test_a_request_waits_in_the_budget_for_what_it_reads() -> None:
    """Another has taken all the room meanwhile: it reads again, and both end."""
    desk = on_disk(PROMPT, budget=600)
    desk.submit("a", (*PROMPT, 5), 100)
    desk.step()
    assert desk.fetches
    desk.submit("b", text(3, 300), 90)
    desk.until(lambda: bool(desk.drawn["b"]))
    desk.read()
    desk.answers_fetches = True
    desk.until(lambda: ("b", 0) in desk.ends)
    for _ in range(300):  # where the disk is read nothing is planned
        desk.step()
    desk.finish()
    assert desk.drawn["a"] == alone((*PROMPT, 5), 100)
    assert desk.drawn["b"] == alone(text(3, 300), 90)


def test_the_background_is_given_up_while_the_disk_is_read() -> None:
    desk = on_disk(PROMPT)
    desk.want("l", PROMPT + text(4, 50))
    desk.step()
    assert desk.fetches, "it needs what comes before"
    desk.submit("a", text(3, 100))
    desk.until(lambda: ("a", 0) in desk.ends)
    desk.read()
    desk.answers_fetches = True
    desk.step()
    desk.finish()
    assert desk.computed[""] == 200 + 50

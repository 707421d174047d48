"""What is to be done when nothing has been to do for a while: once, when it is wanted, and never beside work."""

from __future__ import annotations

import threading
import weakref

import pytest

from edgeqwen.runtime.pauses import Pauses

GUARD_S = 30.0
AT_ONCE_S = 0.001
NEVER_S = 3600.0


class Calls:
    """Counts calls that are over; `came` is set by the first, and none ends unless it `may_end`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.came = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def note(self) -> None:
        self.came.set()
        self.may_end.wait(GUARD_S)
        self.num_calls += 1


@pytest.fixture
def calls() -> Calls:
    return Calls()


def timers() -> set[threading.Timer]:
    """Those of other tests may still run."""
    return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}


def wait_for_timers() -> None:
    while waiting := timers():
        for timer in waiting:
            timer.join(GUARD_S)


def test_a_pause_that_is_expected_is_noticed_once(calls: Calls) -> None:
    pauses = Pauses(calls.note, after_s=AT_ONCE_S)
    with pauses.work():
        for _ in range(3):
            pauses.expect()
    assert calls.came.wait(GUARD_S)
    wait_for_timers()
    assert calls.num_calls == 1


def test_each_pause_that_is_expected_is_noticed(calls: Calls) -> None:
    pauses = Pauses(calls.note, after_s=AT_ONCE_S)
    for number in range(1, 4):
        with pauses.work():
            pauses.expect()
        wait_for_timers()
        assert calls.num_calls == number


def test_a_pause_that_nobody_expects_passes_without_a_thread(calls: Calls) -> None:
    before = timers()
    with Pauses(calls.note, after_s=AT_ONCE_S).work():
        pass
    assert timers() <= before


def test_work_is_never_interrupted_however_long_it_takes(calls: Calls) -> None:
    pauses = Pauses(calls.note, after_s=AT_ONCE_S)
    with pauses.work():
        pauses.expect()
        assert not calls.came.wait(20 * AT_ONCE_S)
    assert calls.came.wait(GUARD_S)


def test_work_waits_for_the_call_and_counts_when_it_fails(calls: Calls) -> None:
    calls.may_end.clear()
    pauses = Pauses(calls.note, after_s=AT_ONCE_S)
    with pytest.raises(ValueError, match="step"), pauses.work():
        pauses.expect()
        raise ValueError("step")
    assert calls.came.wait(GUARD_S)
    threading.Timer(AT_ONCE_S, calls.may_end.set).start()
    with pauses.work():
        assert calls.num_calls == 1


def test_whoever_waits_for_a_pause_may_go_before_it_comes() -> None:
    calls = Calls()
    pauses, gone = Pauses(calls.note, after_s=AT_ONCE_S), weakref.ref(calls)
    with pauses.work():
        pauses.expect()
        del calls
        assert gone() is None
    wait_for_timers()


def test_no_call_comes_after_the_end(calls: Calls) -> None:
    before = timers()
    pauses = Pauses(calls.note, after_s=NEVER_S)
    with pauses.work():
        pauses.expect()
    assert timers() - before
    pauses.close()
    wait_for_timers()
    assert not calls.num_calls


def test_a_timer_that_is_already_waiting_for_work_to_end_does_nothing_after_the_end(calls: Calls) -> None:
    pauses = Pauses(calls.note, after_s=AT_ONCE_S)
    pauses.close()
    for _ in range(20):
        with pauses.work():
            pauses.expect()
        pauses.close()
        count = calls.num_calls
        wait_for_timers()
        assert calls.num_calls == count

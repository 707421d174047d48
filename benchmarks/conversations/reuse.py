"""What is computed again, and what it costs to have it back."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.conversations.setup import Setup
from benchmarks.conversations.talk import Talk

BLOCK: Final = 64
HISTORY: Final = 1500
QUESTION: Final = 30
NUM_SESSIONS: Final = 10
SESSION_TOKENS: Final = 1000
ROOM_TOKENS: Final = 1200
"""Of one session in the round-robin, with the turns that it has there."""

ROUNDS: Final = 3
SYSTEM: Final = 600
OTHER_UID: Final = 12_345


def second_turn(setup: Setup) -> None:
    """Tokens computed for a turn after 1,500 tokens of history, before and after it has been settled."""
    for settles in (False, True):
        with setup.state() as state, setup.daemon(state, settles=settles) as talk:
            last = talk.grow("@one", HISTORY)
            if settles:
                talk.settle("@one")
            history = talk.history("@one")
            turn = talk.turn(session="@one", prompt=talk.text(QUESTION, "second"), max_tokens=8)
        new = turn.prompt - history
        again = last.completion if setup.rerenders and not settles else 0
        setup.report(
            "second turn",
            settled=settles,
            history=history,
            new=new,
            last_answer=last.completion,
            computed=turn.computed,
            most=again + new + BLOCK,
            holds=turn.computed <= again + new + BLOCK,
        )


def resume(setup: Setup) -> None:
    """Extra time to the first token of a turn that has its history in a slot, in memory, or on disk after a restart."""
    names = [f"@{number}" for number in range(setup.samples)]
    with setup.state() as state:
        with setup.daemon(state) as talk:
            for name in names:
                talk.grow(name, HISTORY)
                talk.settle(name)
            _time_turns(setup, talk, names, "the slot that it left")
            for name in names:
                talk.settle(name)
            _others_turns(talk)
            _time_turns(setup, talk, names, "memory")
            for name in names:
                talk.settle(name)
            talk.wait_until_written()
        for place in ("disk, in the page cache", "disk, dropped from the page cache"):
            with setup.daemon(state) as talk:
                prepare = (lambda: drop_pages(state)) if "dropped" in place else (lambda: None)
                _time_turns(setup, talk, names, place, prepare=prepare)
                for name in names:
                    talk.settle(name)
                talk.wait_until_written()


def _others_turns(talk: Talk) -> None:
    """Enough of them that every slot has been another's."""
    for number in range(NUM_SESSIONS):
        talk.turn("generate", prompt=talk.text(200, f"other {number}"), max_tokens=8)


def _time_turns(
    setup: Setup, talk: Talk, names: list[str], place: str, *, prepare: Callable[[], None] = lambda: None
) -> None:
    """A turn of each session; after it as many tokens as it computed without any history, and the whole transcript
    computed anew.
    """
    extra, turns, plain, anew, computed = [], [], [], [], []
    for name in names:
        question = talk.text(QUESTION, f"{place} {name}")
        messages = [*talk.ask("session.get", session=name, messages=True)["messages"]]
        prepare()
        turn = talk.turn(session=name, prompt=question, max_tokens=8)
        ids = talk.tokens(talk.text(turn.computed, f"plain {place} {name}"))
        base = talk.turn("generate", tokens=ids, max_tokens=8, cache=False)
        messages.append({"role": "user", "content": question})
        whole = talk.turn(messages=messages, max_tokens=8, cache=False)
        extra.append(1e3 * (turn.first_s - base.first_s))
        turns.append(1e3 * turn.first_s)
        plain.append(1e3 * base.first_s)
        anew.append(1e3 * whole.first_s)
        computed.append(turn.computed)
    ratios = [whole / turn for whole, turn in zip(anew, turns, strict=True)]
    setup.report(
        "time to first token of a turn",
        history_in=place,
        history=HISTORY,
        computed=max(computed),
        extra_ms=_median(extra),
        most_extra_ms=round(max(extra), 1),
        ms=_median(turns),
        without_history_ms=_median(plain),
        computed_anew_ms=_median(anew),
        times_as_fast_as_anew=round(statistics.median(ratios), 1),
    )


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


def drop_pages(folder: Path) -> None:
    """Have what the daemon keeps below `folder` read from the disk itself next time."""
    os.sync()  # pages that are not written yet stay
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def round_robin(setup: Setup) -> None:
    """Ten sessions in turns, memory for three of them."""
    memory_mb = -(-3 * ROOM_TOKENS * setup.token_bytes // (1 << 20))
    names = [f"@{number}" for number in range(NUM_SESSIONS)]
    beyond: list[int] = []
    first_ms: list[float] = []
    with setup.state() as state, setup.daemon(state, memory_mb=memory_mb) as talk:
        for name in names:
            talk.grow(name, SESSION_TOKENS)
            talk.settle(name)
        for number in range(ROUNDS):
            for name in names:
                history = talk.history(name)
                turn = talk.turn(session=name, prompt=talk.text(16, f"{number}{name}"), max_tokens=16)
                beyond.append(turn.computed - (turn.prompt - history))
                first_ms.append(1e3 * turn.first_s)
                talk.settle(name)
        stats = talk.ask("stats")["kv"]
    setup.report(
        "round-robin",
        sessions=NUM_SESSIONS,
        tokens=SESSION_TOKENS,
        memory_for=3,
        turns=len(beyond),
        most_computed_beyond_own=max(beyond),
        holds=max(beyond) <= 0,
        first_token_ms=_median(first_ms),
        **{name: stats[name] for name in ("evicted", "lost", "preempted")},
    )


def shared_system(setup: Setup) -> None:
    """Two clients with the same system prompt, and a client of another user."""
    with setup.state() as state, setup.daemon(state) as talk:
        system = talk.text(SYSTEM, "system")
        turns: dict[str, Any] = {}
        for who, client in (("first", talk.other()), ("second", talk.other()), ("other user", _as_other_user(talk))):
            if client is None:
                turns[who] = None
                continue
            messages = [{"role": "system", "content": system}, {"role": "user", "content": talk.text(20, who)}]
            turns[who] = client.turn(messages=messages, max_tokens=8)
            client.close()
    first, second, other = turns["first"], turns["second"], turns["other user"]
    setup.report(
        "shared system prompt",
        system=SYSTEM,
        prompt=first.prompt,
        computed={who: turn and turn.computed for who, turn in turns.items()},
        first_token_ms={who: turn and round(1e3 * turn.first_s, 1) for who, turn in turns.items()},
        holds=second.cached >= SYSTEM and (other is None or not other.cached),
        **({} if other else {"skipped": "another user's client needs root"}),
    )


def _as_other_user(talk: Talk) -> Talk | None:
    """A connection of another uid; None if this process may not change its own."""
    if os.geteuid() != 0:
        return None
    path = talk.socket_path
    os.chmod(path, 0o666)
    os.chmod(path.parent, 0o711)
    os.seteuid(OTHER_UID)  # what the daemon is told of a peer is its effective uid when it connects (unix(7))
    try:
        return talk.other()
    finally:
        os.seteuid(0)

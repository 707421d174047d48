"""A daemon killed again and again while sessions talk: it comes back clean, and goes on as if nothing had been.

    scripts/soak kill9 [--rounds 200] [--package PACKAGE]

In each round a daemon starts over the state that the ones before it left, clients go on with their sessions, and at a
random moment (while the model loads, too) it is killed. At the next start every turn whose last frame had come must be
in its session, at most the one in flight beside it; the next answer of each session must be that of a daemon that keeps
no cache and is told all of the conversation; and no files may be left that nobody knows.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.soak.command import run_with_models
from tests.soak.line import Ended, Line
from tests.soak.reference import GREEDY, Messages, Reference, assistant, user
from tests.soak.service import Model, Service
from tests.soak.words import some_words

LOADING_SHARE: Final = 0.25
"""Of the rounds, those in which the daemon may be killed before it serves."""

KNOWN_FILES: Final = frozenset({".session", ".kv", ".json", ".lock", ""})
MOST_UNFINISHED: Final = 2
"""Files that a kill may leave half-written, and that the next daemon removes or overwrites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`most_s` is the longest time that a daemon serves; `num_checked` sessions are compared in each round."""

    num_rounds: int = 200
    num_clients: int = 4
    num_checked: int = 2
    num_words: int = 60
    num_turns: int = 8
    max_tokens: int = 16
    most_s: float = 3.0
    seed: int = 1


@dataclass(eq=False)
class Talker:
    """A client with a session. `messages` is what is known to be in it; `in_flight` a question without an answer."""

    number: int
    rng: random.Random
    size: Size
    num_sessions: int = 0
    messages: Messages = field(default_factory=list)
    in_flight: str = ""
    num_kept: int = 0
    num_found: int = 0

    @property
    def session(self) -> str:
        return f"@{self.number}-{self.num_sessions}"

    def talk(self, service: Service) -> None:
        """Turn after turn until the daemon dies."""
        try:
            with service.line() as line:
                while True:
                    self.turn(line)
        except Ended:
            return

    def turn(self, line: Line) -> dict[str, Any]:
        """One turn, and its last frame; a session that has grown long gives way to a new one."""
        if len(self.messages) >= 2 * self.size.num_turns:
            self._begin_anew(line)
        self.in_flight = f"{self.number} {some_words(self.rng, self.rng.randint(2, self.size.num_words))}"
        options = {"max_tokens": self.size.max_tokens, "if_rev": len(self.messages) // 2, **GREEDY}
        final = line.must("chat", session=self.session, prompt=self.in_flight, **options)
        assert "saved" not in final
        self._keep(final["text"])
        self.num_kept += 1
        return final

    def _begin_anew(self, line: Line) -> None:
        name, self.num_sessions, self.messages = self.session, self.num_sessions + 1, []
        frame = line.ask("session.delete", session=name)
        assert "error" not in frame or frame["error"]["code"] == "not_found", frame

    def _keep(self, answer: str) -> None:
        self.messages += [user(self.in_flight), assistant(answer)]
        self.in_flight = ""

    def check(self, line: Line) -> None:
        """What the daemon has is what was said; a turn in flight may be there, whole."""
        frame = line.ask("session.get", session=self.session, messages=True)
        found = [{name: each[name] for name in ("role", "content")} for each in frame.get("messages", [])]
        assert "error" not in frame or frame["error"]["code"] == "not_found", frame
        assert found[: len(self.messages)] == self.messages, f"{self.session}: {found}, not {self.messages}"
        extra = found[len(self.messages) :]
        if extra:
            assert [each["role"] for each in extra] == ["user", "assistant"], extra
            assert extra[0]["content"] == self.in_flight, extra
            self._keep(extra[1]["content"])
            self.num_found += 1
        self.in_flight = ""


def run(folder: Path, model: Model, size: Size) -> dict[str, Any]:
    """Raises AssertionError if anything is wrong; else what there was to see."""
    rng = random.Random(size.seed)
    talkers = [Talker(number, random.Random(rng.random()), size) for number in range(size.num_clients)]
    settings = {"kv_memory_mb": model.memory_mb(6000), "kv_disk_mb": model.memory_mb(30_000)}
    service = Service(folder / "killed", model, kv_daily_writes_mb=1 << 20, **settings)
    compared = cached = 0
    most_files: dict[str, int] = {}
    with Reference(folder / "alone", model) as reference, contextlib.ExitStack() as at_end:
        at_end.callback(service.kill)
        for _ in range(size.num_rounds):
            service.start()
            if rng.random() < LOADING_SHARE:
                _kill_after(service, rng.uniform(0.0, 1.0), talkers=[])
                service.start()
            service.wait_until_ready()
            _check_start(service)
            with service.line() as line:
                for talker in talkers:
                    talker.check(line)
                for talker in rng.sample(talkers, size.num_checked):
                    cached += _compare(talker, line, reference)
                    compared += 1
            _kill_after(service, rng.uniform(0.0, size.most_s), talkers)
            for suffix, num in service.files().items():
                most_files[suffix] = max(num, most_files.get(suffix, 0))
        service.start()
        service.wait_until_ready()
        _check_start(service)
        with service.line() as line:
            for talker in talkers:
                talker.check(line)
                _compare(talker, line, reference)
        service.wait_until_idle()
        service.stop()
    kept, found = sum(each.num_kept for each in talkers), sum(each.num_found for each in talkers)
    return {
        "model": model.name,
        "rounds": size.num_rounds,
        "turns": kept,
        "turns_whose_last_frame_was_lost": found,
        "compared": compared,
        "cached_when_compared": cached,
        "files": most_files,
    }


def _kill_after(service: Service, delay_s: float, talkers: list[Talker]) -> None:
    """Kill the daemon while they talk."""
    failures: list[BaseException] = []

    def talk(talker: Talker) -> None:
        try:
            talker.talk(service)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(each,)) for each in talkers]
    for thread in threads:
        thread.start()
    time.sleep(delay_s)
    service.kill()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _check_start(service: Service) -> None:
    """It has come back as if it had been stopped in peace."""
    assert "Traceback" not in service.log, service.log
    sessions = service.stats()["session_files"]
    assert sessions["on_disk"], sessions
    assert (sessions["damaged"], sessions["unsaved"], sessions["later_version"]) == (0, 0, 0), sessions
    files = service.files()
    unknown = {suffix: num for suffix, num in files.items() if suffix not in KNOWN_FILES}
    assert sum(unknown.values()) <= MOST_UNFINISHED, files


def _compare(talker: Talker, line: Line, reference: Reference) -> int:
    """A turn over what the daemon has found, and over nothing; returns the tokens that it had found."""
    final = talker.turn(line)
    alone = reference.answer(talker.messages[:-1], max_tokens=talker.size.max_tokens)
    assert final["text"] == alone, f"{talker.session}: {final['text']!r}, alone {alone!r}"
    return int(final["usage"]["cached"])


if __name__ == "__main__":
    run_with_models("kill9", __doc__, Size(), run)

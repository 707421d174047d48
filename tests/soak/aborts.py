"""Clients of which a third hang up at random points: those that stay get exactly what they would have got alone.

    scripts/soak aborts [--clients 16] [--minutes 5] [--package PACKAGE]

Each client has a marker word and prompts with it, from a few tokens to many, and asks one after another; half of the
requests neither use nor leave anything in the cache. What each prompt is answered alone is asked for before.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.soak.command import run_with_models
from tests.soak.reference import GREEDY, Reference, user
from tests.soak.service import Model, Service, Watch
from tests.soak.words import some_words

KILLED_SHARE: Final = 1 / 3
UNCACHED_SHARE: Final = 1 / 2
LONGEST_DELAY_S: Final = 1.5
ROOM_FOR: Final = 3
"""Of the longest prompts, those that fit the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`num_tokens` of the longest prompt; the shortest has 20."""

    num_clients: int = 16
    num_prompts: int = 4
    num_tokens: int = 1500
    max_tokens: int = 32
    minutes: float = 5.0
    seed: int = 1


@dataclass(eq=False)
class Client:
    """One with a marker: `prompts` and what each is answered."""

    number: int
    service: Service
    size: Size
    rng: random.Random
    prompts: list[str]
    answers: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            which = self.rng.randrange(len(self.prompts))
            if self.rng.random() < KILLED_SHARE:
                self.give_up(which)
                self.counts["killed"] += 1
            else:
                self.wait_for(which)
                self.counts["answered"] += 1

    def members(self, which: int) -> dict[str, Any]:
        cache = {"cache": False} if self.rng.random() < UNCACHED_SHARE else {}
        return {"prompt": self.prompts[which], "max_tokens": self.size.max_tokens, **GREEDY, **cache}

    def wait_for(self, which: int) -> None:
        """All of an answer, and nothing after it."""
        pieces: list[str] = []
        with self.service.line() as line:
            request_id = line.send("chat", stream=True, **self.members(which))
            final = line.final(request_id, lambda frame: pieces.append(frame.get("delta", "")))
            assert "error" not in final, final
            line.check_silence()
        said, alone = "".join(pieces), self.answers[which]
        assert said == alone, f"client {self.number}, prompt {which}: {said!r}, alone {alone!r}"

    def give_up(self, which: int) -> None:
        """Hang up after some time, or after some frames."""
        with self.service.line() as line:
            line.send("chat", stream=True, **self.members(which))
            if self.rng.random() < 0.5:
                time.sleep(self.rng.uniform(0.0, LONGEST_DELAY_S))
                return
            for _ in range(self.rng.randint(1, self.size.max_tokens)):
                if line.read()["done"]:
                    return


def run(folder: Path, model: Model, size: Size) -> dict[str, Any]:
    """Raises AssertionError if anything is wrong; else what there was to see."""
    rng = random.Random(size.seed)
    budget = ROOM_FOR * int(1.5 * size.num_tokens + size.max_tokens)
    service = Service(folder / "aborts", model, kv_memory_mb=model.memory_mb(budget))
    clients = [
        Client(number, service, size, random.Random(rng.random()), _prompts(number, model, size, rng))
        for number in range(size.num_clients)
    ]
    with Reference(folder / "alone", model) as reference:
        for client in clients:
            client.answers = [reference.answer([user(prompt)], max_tokens=size.max_tokens) for prompt in client.prompts]
    with service, Watch(service) as watch, ThreadPoolExecutor(len(clients)) as pool:
        until = time.monotonic() + 60 * size.minutes
        for result in [pool.submit(client.run, until) for client in clients]:
            result.result()
        stats = service.wait_until_idle()
        assert stats["totals"]["errors"] == 0
    counts = sum((client.counts for client in clients), Counter[str]())
    assert min(counts["killed"], counts["answered"]) > 0
    seen = {name: stats["kv"][name] for name in ("cached", "computed", "evicted", "preempted")}
    return {"model": model.name, **counts, "budget_mb": model.memory_mb(budget), **watch.most, **seen}


def _prompts(number: int, model: Model, size: Size, rng: random.Random) -> list[str]:
    """Of some length between the bounds, equally often of each order of magnitude; the marker again and again."""
    found = []
    for _ in range(size.num_prompts):
        num_tokens = 20 * (size.num_tokens / 20) ** rng.random()
        words = some_words(rng, max(2, int(num_tokens / model.word_tokens))).split()
        words[:: max(2, len(words) // 8)] = [f"marker{number}"] * len(words[:: max(2, len(words) // 8)])
        found.append(" ".join(words))
    return found


if __name__ == "__main__":
    run_with_models("aborts", __doc__, Size(), run)

"""Many clients at once, each in a session of its own: no failure, no mix-up, never more cache than there is budget.

    scripts/soak crowd [--clients 50] [--turns 3] [--package PACKAGE]

The clients begin with one of a few system prompts. The budget of the cache is a small part of what all of them take
together, so they wait for one another, and what they said goes to disk and comes back. Afterwards each conversation is
had once more, alone and without a cache, and must read the same.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.soak.command import run_with_models
from tests.soak.line import Line
from tests.soak.reference import GREEDY, Messages, Reference, assistant, user
from tests.soak.service import Model, Service, Watch
from tests.soak.words import some_words

NUM_SYSTEMS: Final = 5
ROOM_FOR: Final = 8
"""Conversations that fit the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`num_words` of the longest question; `max_tokens` of an answer."""

    num_clients: int = 50
    num_turns: int = 3
    num_words: int = 120
    max_tokens: int = 24
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Client:
    """What one of them is going to say."""

    name: str
    system: str
    questions: tuple[str, ...]

    def talk(self, line: Line, size: Size) -> list[str]:
        """All turns; the answers. Half of them streamed."""
        answers = []
        for number, question in enumerate(self.questions):
            messages = [{"role": "system", "content": self.system}, user(question)]
            frames: list[dict[str, Any]] = []
            is_stream = (number + len(question)) % 2 == 0
            request_id = line.send(
                "chat", session=self.name, messages=messages, stream=is_stream, max_tokens=size.max_tokens, **GREEDY
            )
            final = line.final(request_id, frames.append)
            assert "error" not in final, final
            assert final["rev"] == number + 1
            assert "saved" not in final
            answers.append("".join(frame.get("delta", "") for frame in frames) if is_stream else final["text"])
            line.check_silence()
        return answers


def clients(size: Size) -> list[Client]:
    """They differ in what they ask from the first word."""
    rng = random.Random(size.seed)
    systems = [some_words(rng, size.num_words // 2) for _ in range(NUM_SYSTEMS)]
    return [
        Client(
            f"@client{number}",
            systems[number % NUM_SYSTEMS],
            tuple(f"{number} {some_words(rng, rng.randint(3, size.num_words))}" for _ in range(size.num_turns)),
        )
        for number in range(size.num_clients)
    ]


def budget_tokens(model: Model, size: Size) -> int:
    """Room for a few of the longest conversations."""
    words = size.num_words // 2 + size.num_turns * (size.num_words + 10)
    longest = int(words * model.word_tokens) + size.num_turns * size.max_tokens
    return ROOM_FOR * longest // 2


def run(folder: Path, model: Model, size: Size) -> dict[str, Any]:
    """Raises AssertionError if anything is wrong; else what there was to see."""
    crowd = clients(size)
    memory_mb = model.memory_mb(budget_tokens(model, size))
    with Service(folder / "crowd", model, kv_memory_mb=memory_mb) as service:
        gate = threading.Barrier(len(crowd))

        def talk(client: Client) -> list[str]:
            with service.line() as line:
                gate.wait()
                return client.talk(line, size)

        with Watch(service) as watch, ThreadPoolExecutor(len(crowd)) as pool:
            answers = list(pool.map(talk, crowd))
        stats = service.wait_until_idle()
    with Reference(folder / "alone", model) as reference:
        for client, said in zip(crowd, answers, strict=True):
            _compare(client, said, reference, size)
    assert stats["totals"]["errors"] == 0
    seen = {name: stats["kv"][name] for name in ("cached", "computed", "evicted", "lost", "preempted", "settled")}
    return {"model": model.name, "clients": len(crowd), "budget_mb": memory_mb, **watch.most, **seen}


def _compare(client: Client, said: list[str], reference: Reference, size: Size) -> None:
    messages: Messages = [{"role": "system", "content": client.system}]
    for number, (question, answer) in enumerate(zip(client.questions, said, strict=True)):
        messages.append(user(question))
        alone = reference.answer(messages, max_tokens=size.max_tokens)
        assert answer == alone, f"{client.name}, turn {number + 1}: {answer!r}, alone {alone!r}"
        messages.append(assistant(answer))


if __name__ == "__main__":
    run_with_models("crowd", __doc__, Size(), run)

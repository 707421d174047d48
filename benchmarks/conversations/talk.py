"""A client that talks to a daemon under measurement, one request at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._processes import Daemon
from benchmarks.conversations.packages import english
from edgeqwen.client import Client

GUARD_S: Final = 300.0
POLL_S: Final = 0.05
WRITTEN_AFTER_S: Final = 8.0
"""Blocks are written five seconds after they came; nothing new for so long means that all are."""

TURN_TOKENS: Final = 260
ANSWER_TOKENS: Final = 40


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: tokens of its prompt, those of them that were known, and those of the answer. `first_s` is from
    sending the request to the first text.
    """

    prompt: int
    cached: int
    completion: int
    first_s: float

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


class Talk:
    """Requests to one daemon, which keeps `token_bytes` of every token; `options` go with every generation."""

    def __init__(self, daemon: Daemon, options: Mapping[str, Any], token_bytes: int) -> None:
        self._daemon = daemon
        self._options = dict(options)
        self._token_bytes = token_bytes
        self._client = daemon.client()

    def ask(self, op: str, **members: Any) -> dict[str, Any]:
        return self._client.request(op, **members)

    def turn(self, op: str = "chat", *, on_text: Callable[[float], None] = lambda _: None, **members: Any) -> Turn:
        """A streamed generation; `on_text` is told when a piece of text came."""
        options = {name: value for name, value in self._options.items() if op == "chat" or name != "think"}
        return stream(self._client, op, on_text=on_text, **(options | members))

    def other(self) -> Talk:
        """The same over a connection of its own."""
        return Talk(self._daemon, self._options, self._token_bytes)

    @property
    def socket_path(self) -> Path:
        return self._daemon.socket_path

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.ask("tokenize", text=text)["tokens"]
        return tokens

    def text(self, num_tokens: int, seed: str) -> str:
        """Words in no order, `num_tokens` tokens of them; the same for the same seed, and unlike for any two."""
        words = random.Random(seed).choices(english(), k=num_tokens)
        return str(self.ask("detokenize", tokens=self.tokens(" ".join(words))[:num_tokens])["text"])

    def history(self, session: str) -> int:
        """Tokens that the next prompt of the session begins with."""
        return int(self.ask("session.get", session=session)["tokens"])

    def grow(self, session: str, num_tokens: int) -> Turn:
        """Talk in a session until its history has `num_tokens`; returns the last turn."""
        number, length = 0, 0
        while True:
            width = max(16, min(TURN_TOKENS, num_tokens - length - ANSWER_TOKENS))
            text = self.text(width, f"{session} {number}")
            turn = self.turn(session=session, prompt=text, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            number, length = number + 1, self.history(session)
            if length >= num_tokens:
                return turn

    def settle(self, session: str) -> None:
        """Wait until all of the history is known."""
        give_up_at = time.monotonic() + GUARD_S
        while True:
            shown = self.ask("session.get", session=session)
            if shown["kv_bytes"] >= shown["tokens"] * self._token_bytes:
                return
            assert time.monotonic() < give_up_at, shown
            time.sleep(POLL_S)

    def wait_until_written(self) -> None:
        """Wait until nothing more goes to disk."""
        size, since = -1, time.monotonic()
        while time.monotonic() < since + WRITTEN_AFTER_S:
            found = self.ask("stats")["kv"]["disk_bytes"]
            if found != size:
                size, since = found, time.monotonic()
            time.sleep(POLL_S)


def stream(client: Client, op: str, *, on_text: Callable[[float], None] = lambda _: None, **members: Any) -> Turn:
    """One streamed generation on a connection."""
    began, first = time.perf_counter(), 0.0
    for frame in client.stream(op, stream=True, **members):
        if frame.get("delta"):
            now = time.perf_counter()
            first = first or now
            on_text(now)
    usage = frame["usage"]
    assert first, "the answer has no text"
    return Turn(usage["prompt"], usage["cached"], usage["completion"], first - began)

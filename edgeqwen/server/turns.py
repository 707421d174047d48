"""Order of the requests of one connection that have no id: answered one after another, as they came.

A request's `Turn` stands in the queue until its final frame was sent. Work starts when its turn has come; what answers
at once (and an error) runs at once, and only its frame waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Turn:
    """`start` is called when the turn comes, None if there is nothing to start; `frames` wait until then."""

    start: Callable[[], None] | None = None
    frames: list[bytes] = field(default_factory=list)
    is_finished: bool = False


class Turns:
    """The queue. `send(turn, frame, done)` writes at once if it is the turn of `turn`."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._queue: deque[Turn] = deque()
        self._is_advancing = False

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, turn: Turn) -> None:
        self._queue.append(turn)
        self.advance()

    def send(self, turn: Turn, frame: bytes, *, done: bool) -> None:
        turn.frames.append(frame)
        turn.is_finished = done
        self.advance()

    def advance(self) -> None:
        """Start and write whatever may now be. A start that finishes at once comes back here, hence the flag."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._queue and self._step(self._queue[0]):
                self._queue.popleft()
        finally:
            self._is_advancing = False

    def _step(self, head: Turn) -> bool:
        """Move the first turn on; whether it is over."""
        start, head.start = head.start, None
        if start is not None:
            start()
        for frame in head.frames:
            self._write(frame)
        head.frames.clear()
        return head.is_finished

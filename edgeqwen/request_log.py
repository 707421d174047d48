"""A line in the log for each request: who, what came of it, how long it took, how many tokens; nothing that was said.

What is refused is a line too, up to a number of them a minute: somebody who asks a thousand times a second for what is
not to be had must not fill the disk. How many were left out is told with the next one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edgeqwen.engine.outcomes import Outcome, Outcomes, Refusal
from edgeqwen.logs import Event

WINDOW_S: Final = 60.0
MOST_REFUSALS: Final = 10
MOST_OWNERS: Final = 256
OWNER_LENGTH: Final = 16
"""A user id is shorter; of the digest of an API key this tells keys apart."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    began_at: float
    num_told: int = 0
    num_left_out: int = 0


class RequestLog:
    """Listens to the outcomes of requests."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def listen_to(self, outcomes: Outcomes) -> None:
        outcomes.subscribe(self.note_outcome, self.note_refusal)

    def note_outcome(self, outcome: Outcome) -> None:
        """A request is over."""
        first_s = outcome.first_token_s
        log.info(
            Event(
                "request",
                rid=outcome.rid,
                uid=outcome.owner[:OWNER_LENGTH],
                op=outcome.kind,
                code=outcome.outcome,
                queue_us=_us(outcome.queue_s),
                ttft_us=None if first_s is None else _us(first_s),
                total_us=_us(outcome.total_s),
                prompt=outcome.num_prompt,
                cached=outcome.num_cached,
                tokens=outcome.num_generated,
            )
        )

    def note_refusal(self, refusal: Refusal) -> None:
        """A request was not accepted."""
        window = self._window_of(refusal.owner)
        if window.num_told >= MOST_REFUSALS:
            window.num_left_out += 1
            return
        window.num_told += 1
        left_out, window.num_left_out = window.num_left_out, 0
        owner = refusal.owner[:OWNER_LENGTH]
        log.info(Event("refused", uid=owner, op=refusal.kind, code=refusal.code, left_out=left_out or None))

    def _window_of(self, owner: str) -> _Window:
        """The owner's minute. One that is over leaves the next what it has not told."""
        now = self._clock()
        window = self._windows.get(owner) or _Window(now)
        if now - window.began_at >= WINDOW_S:
            window = _Window(now, num_left_out=window.num_left_out)
        self._windows[owner] = window
        self._windows.move_to_end(owner)
        if len(self._windows) > MOST_OWNERS:
            self._windows.popitem(last=False)
        return window


def _us(seconds: float) -> int:
    return round(1e6 * seconds)

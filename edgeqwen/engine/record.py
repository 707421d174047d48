"""A request while it lives: its samplers, its text, its events, its end. And the table of those that live.

The table turns the scheduler's events into the client's. Every record leaves it through `_retire`, with the one
terminal event that its request gets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from edgeqwen.core.request import (
    Delta,
    Done,
    Failed,
    FinishReason,
    Request,
    Started,
    TokenLogprob,
    ToolCall,
    Usage,
)
from edgeqwen.core.step import Hidden
from edgeqwen.engine.generation import Sink
from edgeqwen.engine.live import LiveRequest
from edgeqwen.engine.meters import Meters
from edgeqwen.engine.outcomes import harshest
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.engine.tallies import Tallies
from edgeqwen.errors import EdgeqwenError
from edgeqwen.metrics import Histogram
from edgeqwen.sampling import Sampled, Sampler
from edgeqwen.scheduler import RequestFailed, Scheduler, SchedulerEvent, SequenceEnded, TokenDrawn
from edgeqwen.text import TextDelta, TextStream, Tokenizer
from edgeqwen.text.tool_calls import Call, CallFinder, Piece


class _Choice:
    """One answer of a request. The engine thread uses `sampler`, the event loop the rest."""

    def __init__(self, request: Request, index: int, *, files: ModelFiles, num_tokens: int) -> None:
        self.sampler = Sampler(request, choice=index, num_tokens=num_tokens, eos_token_ids=files.eos_token_ids)
        self.stream = TextStream(
            files.tokenizer,
            stop=request.stop,
            splits_reasoning=request.splits_reasoning,
            starts_in_reasoning=request.starts_in_reasoning,
            min_tokens=request.min_tokens,
        )
        self.calls = CallFinder() if request.finds_calls else None
        self.num_calls = 0
        self.is_complete = False
        self.finish: FinishReason | None = None
        self.last_at: float | None = None  # when its latest token came


class Record(LiveRequest):
    """An accepted generation. The seconds between its tokens are counted in `token_gap_s`."""

    def __init__(
        self, request: Request, sink: Sink, *, files: ModelFiles, num_tokens: int, token_gap_s: Histogram
    ) -> None:
        super().__init__(request, sink)
        self._tokenizer: Tokenizer = files.tokenizer
        self._choices = [_Choice(request, i, files=files, num_tokens=num_tokens) for i in range(request.n)]
        self._num_reasoning = 0
        self._token_gap_s = token_gap_s

    def sampler(self, choice: int) -> Sampler:
        """The sampler of a choice, for the engine thread."""
        return self._choices[choice].sampler

    def push_hidden(self, choice: int, rows: Hidden) -> None:
        raise AssertionError("hidden states of a generation")

    def take(self, event: TokenDrawn, sampled: Sampled, now: float) -> bool:
        """Take in a token and emit the text that it completes; True if nothing may follow, since it completes a stop
        string, the form that the answer must have, or the only call that it may hold.
        """
        if self._first_at is None:
            self._first_at = now
        self._num_generated += 1
        choice = self._choices[event.choice]
        if choice.last_at is not None:
            self._token_gap_s.observe(now - choice.last_at)
        choice.last_at = now
        logprob = self._logprob(sampled)
        if event.is_end:
            is_reasoning = choice.stream.is_reasoning
            self._num_reasoning += is_reasoning
            if logprob is not None:
                self.emit(Delta(event.choice, "reasoning" if is_reasoning else "content", "", (logprob,)))
            return False
        step = choice.stream.push(event.token, logprob)
        self._num_reasoning += step.is_reasoning
        self._emit_text(event.choice, step.deltas)
        choice.is_complete = sampled.is_last or self._has_single_call(choice)
        return step.is_stopped or choice.is_complete

    def _has_single_call(self, choice: _Choice) -> bool:
        return self.request.is_single_call and choice.num_calls > 0

    def end(self, index: int, reason: FinishReason) -> None:
        """A choice has ended: emit what was held back. That it is complete wins over the budget's end."""
        choice = self._choices[index]
        assert choice.finish is None, f"choice {index} of {self.request.rid} ended twice"
        self._emit_text(index, choice.stream.finish())
        if choice.calls is not None:
            self._emit_pieces(index, choice.calls.finish())
        if (choice.stream.is_stopped or choice.is_complete) and reason == "length":
            reason = "stop"
        choice.finish = "tool_calls" if choice.num_calls and reason == "stop" else reason

    @property
    def is_over(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    def done(self, now: float) -> Done:
        """The terminal event of a request whose choices have all ended."""
        usage = Usage(
            prompt=len(self.request.prompt_ids),
            cached=self._num_cached,
            completion=self._num_generated,
            reasoning=self._num_reasoning,
        )
        finishes = tuple(choice.finish for choice in self._choices if choice.finish is not None)
        stops = tuple(choice.stream.stop for choice in self._choices)
        return Done(self.request.rid, finishes, usage, self.timings(now), stops)

    def _emit_text(self, choice: int, deltas: Iterable[TextDelta]) -> None:
        calls = self._choices[choice].calls
        for channel, text, logprobs in deltas:
            if calls is None or channel == "reasoning":
                self.emit(Delta(choice, channel, text, logprobs))
                continue
            if logprobs:  # they are of tokens, which are told from calls as little as from text
                self.emit(Delta(choice, channel, "", logprobs))
            self._emit_pieces(choice, calls.push(text))

    def _emit_pieces(self, choice: int, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Call):
                number = self._choices[choice].num_calls
                self._choices[choice].num_calls += 1
                call_id = f"call_{self.request.rid}_{choice}_{number}"
                self.emit(ToolCall(choice, number, call_id, piece.name, piece.arguments))
            else:
                self.emit(Delta(choice, "content", piece))

    def _logprob(self, sampled: Sampled) -> TokenLogprob | None:
        if sampled.logprob is None:
            return None
        text = self._tokenizer.token_bytes(sampled.token).decode("utf-8", "replace")
        return TokenLogprob(sampled.token, text, sampled.logprob, sampled.top)


class Records:
    """The requests that live, by rid. `on_retired` is called after each that leaves; `meters` are told of its end."""

    def __init__(
        self, scheduler: Scheduler, *, tallies: Tallies, meters: Meters, on_retired: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._on_retired = on_retired
        self._records: dict[str, LiveRequest] = {}
        self._queue: deque[SchedulerEvent] = deque()
        self._is_delivering = False
        self.tallies = tallies
        self._outcomes = meters.outcomes

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, rid: str) -> bool:
        return rid in self._records

    def __getitem__(self, rid: str) -> LiveRequest:
        return self._records[rid]

    def get(self, rid: str) -> LiveRequest | None:
        """The record, if the request lives."""
        return self._records.get(rid)

    def facts(self, now: float, *, owner: str | None, most: int) -> list[dict[str, Any]]:
        """What may be shown of the requests of `owner` (None: of all, with whose they are), oldest first."""
        live = (record for record in self._records.values() if owner in {None, record.request.owner})
        return [
            record.facts(now) | ({"owner": record.request.owner} if owner is None else {})
            for record in islice(live, most)
        ]

    def rids(self) -> tuple[str, ...]:
        """Requests that live, oldest first."""
        return tuple(self._records)

    def add(self, record: LiveRequest, *, num_before: int) -> None:
        """Accept a request that the scheduler has taken, and say so to its front."""
        request = record.request
        self._records[request.rid] = record
        self.tallies.add_request(request.owner)
        record.emit(Started(request.rid, num_before, request.num_prompt_tokens))

    def note_begun(self, rid: str, num_cached: int, now: float) -> None:
        """A request has its slot; so many tokens of its prompt are known."""
        record = self._records[rid]
        record.note_begun(num_cached, now)
        self.tallies.add_cached(record.request.owner, num_cached)

    def num_running(self, owner: str) -> int:
        """Requests of `owner` that have a slot, or had one."""
        return sum(record.has_begun and record.request.owner == owner for record in self._records.values())

    def deliver(self, events: Iterable[SchedulerEvent], now: float, sampled: Sequence[Sampled | None] = ()) -> None:
        """Turn the scheduler's events into the fronts'; `sampled` holds, by chunk, what was drawn in this round.

        A sink may cancel requests: what comes of that is delivered after what is being delivered.
        """
        self._queue.extend(events)
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._queue:
                self._deliver(self._queue.popleft(), now, sampled)
        finally:
            self._is_delivering = False

    def _deliver(self, event: SchedulerEvent, now: float, sampled: Sequence[Sampled | None]) -> None:
        record = self._records[event.rid]
        match event:
            case TokenDrawn():
                draw = sampled[event.chunk]
                assert draw is not None
                self.tallies.add_token(record.request.owner)
                if record.take(event, draw, now):
                    self._queue.extend(self._scheduler.stop(event.rid, event.choice, now=now))
            case SequenceEnded():
                record.end(event.choice, event.reason)
                if record.is_over:
                    self._retire(record, record.done(now), now)
            case RequestFailed():
                self._retire(record, Failed(event.rid, event.error), now)
        if record.is_broken:
            self._queue.extend(self._scheduler.cancel(event.rid, now=now))

    def fail_all(self, error: EdgeqwenError, now: float) -> None:
        """End every request with `error`, whatever the scheduler thinks of it."""
        for record in tuple(self._records.values()):
            self._retire(record, Failed(record.request.rid, error), now)

    def _retire(self, record: LiveRequest, last: Done | Failed, now: float) -> None:
        """The one way out: the record is forgotten, its timer stopped, its terminal event emitted, its end told."""
        del self._records[record.request.rid]
        if record.timer is not None:
            record.timer.cancel()
        if isinstance(last, Failed):
            self.tallies.add_failure(record.request.owner)
        record.emit(last)
        name = last.error.code if isinstance(last, Failed) else harshest(last.finishes)
        self._outcomes.tell(record.outcome(name, now))
        self._on_retired()

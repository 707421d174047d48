"""From the events of one generation to what a client is sent, without I/O.

`Backlog` is where events wait for a client that reads slowly: deltas of a choice are joined, so that what waits grows
with the text and not with the number of tokens. `Answer` makes frames of `eqp/1` out of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from edgeqwen.core.request import Channel, Delta, Done, Event, Failed, Started, TokenLogprob, ToolCall
from edgeqwen.protocol.replies import (
    ENVELOPE_BYTES,
    call_frames,
    call_members,
    cut_text,
    delta_frames,
    encoded_len,
    error_members,
    logprob_members,
    timing_members,
    usage_members,
)

Emit: TypeAlias = Callable[[dict[str, Any], bool], None]
"""Takes the members of a frame and whether it is the last one."""

FINAL_BYTES: Final = 1024
"""What the final frame holds besides the text and what `verbose` adds: id, rid, usage, times, names."""

ID_BYTES: Final = 8  # of a token id in JSON, the comma included, at most
IDS_PER_FRAME: Final = 1024


@dataclass(slots=True)
class _Joined:
    """Deltas of one choice and channel that followed each other, joined when they are taken."""

    choice: int
    channel: Channel
    texts: list[str]
    logprobs: list[TokenLogprob]

    def to_delta(self) -> Delta:
        return Delta(self.choice, self.channel, "".join(self.texts), tuple(self.logprobs))


class Backlog:
    """Events, those of one choice in order; deltas of a choice that follow each other in one channel become one."""

    def __init__(self) -> None:
        self._events: deque[Started | ToolCall | Done | Failed | _Joined] = deque()
        self._last: dict[int, _Joined] = {}  # of each choice, what waits and can still grow

    def __bool__(self) -> bool:
        return bool(self._events)

    def push(self, event: Event) -> None:
        if not isinstance(event, Delta):
            self._events.append(event)
            if isinstance(event, ToolCall):  # what the choice says later comes later
                self._last.pop(event.choice, None)
            return
        last = self._last.get(event.choice)
        if last is not None and last.channel == event.channel:
            last.texts.append(event.text)
            last.logprobs.extend(event.logprobs)
        else:
            last = self._last[event.choice] = _Joined(event.choice, event.channel, [event.text], list(event.logprobs))
            self._events.append(last)

    def pop(self) -> Event:
        event = self._events.popleft()
        if not isinstance(event, _Joined):
            return event
        if self._last.get(event.choice) is event:
            del self._last[event.choice]
        return event.to_delta()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How an answer is wanted. Sizes in encoded bytes."""

    is_stream: bool = False
    is_verbose: bool = False
    num_choices: int = 1
    frame_bytes: int = 32 << 10
    reply_bytes: int = 256 << 10


class _Choice:
    """What one choice has said so far, for an answer in one piece."""

    def __init__(self) -> None:
        self.texts: dict[Channel, list[str]] = {"content": [], "reasoning": []}
        self.logprobs: list[TokenLogprob] = []
        self.calls: list[ToolCall] = []
        self.is_cut = False

    def members(self, *, with_logprobs: bool) -> dict[str, Any]:
        members: dict[str, Any] = {"text": "".join(self.texts["content"])}
        if reasoning := "".join(self.texts["reasoning"]):
            members["reasoning"] = reasoning
        if with_logprobs:
            members["logprobs"] = [logprob_members(logprob) for logprob in self.logprobs]
        return members

    def call_members(self) -> dict[str, Any]:
        return {"tool_calls": [call_members(call) for call in self.calls]} if self.calls else {}


class Answer:
    """The frames of one generation. `push` takes its events, `pump` emits what waits while `is_writable` says so.

    Streamed: a start frame, deltas, the final frame. In one piece: the final frame holds the text; once that would be
    longer than `reply_bytes` it is cut, `stop` is called and the reason becomes `length`. Exactly one frame is final.
    """

    def __init__(
        self, form: AnswerForm, *, emit: Emit, is_writable: Callable[[], bool], stop: Callable[[], None]
    ) -> None:
        self._form = form
        self._emit = emit
        self._is_writable = is_writable
        self._stop = stop
        self._backlog = Backlog()
        self._choices = [_Choice() for _ in range(form.num_choices)]
        self._num_bytes = 0
        self._reserved_bytes = FINAL_BYTES
        self._params: Mapping[str, Any] = {}
        self._prompt_ids: Sequence[int] = ()
        self.is_final = False

    def set_resolved(self, params: Mapping[str, Any], prompt_ids: Sequence[int]) -> None:
        """Effective parameters and prompt of the generation, known once it was accepted."""
        self._params = params
        self._prompt_ids = prompt_ids
        if self._form.is_verbose:
            self._reserved_bytes += len(msgspec.json.encode(params)) + ID_BYTES * len(prompt_ids)

    def push(self, event: Event) -> None:
        assert not self.is_final, "an event after the terminal one"
        self._backlog.push(event)
        self.pump()

    def pump(self) -> None:
        while self._backlog and self._is_writable():
            event = self._backlog.pop()
            match event:
                case Started():
                    self._start(event)
                case Delta():
                    self._delta(event)
                case ToolCall():
                    self._call(event)
                case Done():
                    self._finish(self._final_members(event))
                case Failed():
                    self._finish({"rid": event.rid, **error_members(event.error)})

    def _start(self, event: Started) -> None:
        if self._form.is_stream:
            members = {"event": "start", "rid": event.rid, "queue": event.queue, "prompt_tokens": event.prompt_tokens}
            self._emit(members, False)

    def _delta(self, event: Delta) -> None:
        if self._form.is_stream:
            with_choice = self._form.num_choices > 1
            for members in delta_frames(event, frame_bytes=self._form.frame_bytes, with_choice=with_choice):
                self._emit(members, False)
        elif not (choice := self._choices[event.choice]).is_cut:
            self._collect(choice, event)

    def _call(self, event: ToolCall) -> None:
        """Calls are told in the last frame. Of a streamed answer what does not fit there goes before it."""
        choice = self._choices[event.choice]
        if choice.is_cut:
            return
        num_bytes = len(msgspec.json.encode(call_members(event))) + 1
        if not self._form.is_stream:
            self._num_bytes += num_bytes
            if self._room() < 0:
                self._cut_all()
                return
        elif self._num_bytes + num_bytes > self._form.frame_bytes - self._reserved_bytes - ENVELOPE_BYTES:
            with_choice = self._form.num_choices > 1
            for members in call_frames(event, frame_bytes=self._form.frame_bytes, with_choice=with_choice):
                self._emit(members, False)
            return
        else:
            self._num_bytes += num_bytes
        choice.calls.append(event)

    def _cut_all(self) -> None:
        for each in self._choices:
            each.is_cut = True
        self._stop()

    def _collect(self, choice: _Choice, event: Delta) -> None:
        logprob_bytes = sum(len(msgspec.json.encode(logprob_members(logprob))) + 1 for logprob in event.logprobs)
        text = cut_text(event.text, max(0, self._room() - logprob_bytes))
        self._num_bytes += encoded_len(text) + logprob_bytes
        if self._room() >= 0:
            choice.texts[event.channel].append(text)
            choice.logprobs.extend(event.logprobs)
        if len(text) < len(event.text) or self._room() < 0:
            self._cut_all()

    def _room(self) -> int:
        """Encoded bytes that the text may still take."""
        return self._form.reply_bytes - self._reserved_bytes - self._num_bytes

    def _finish(self, members: dict[str, Any]) -> None:
        self.is_final = True
        self._prompt_ids = ()  # whoever emits may know us and live on
        self._emit(members, True)

    def _final_members(self, event: Done) -> dict[str, Any]:
        finishes = tuple(
            "length" if choice.is_cut and finish == "cancelled" else finish
            for choice, finish in zip(self._choices, event.finishes, strict=True)
        )
        members: dict[str, Any] = self._text_members(finishes)
        if event.rid:
            members["rid"] = event.rid
        members |= {"usage": usage_members(event.usage), "ms": timing_members(event.ms)}
        if (seed := self._params.get("seed")) is not None:
            members["seed"] = seed
        if self._form.is_verbose:
            members |= {"params": dict(self._params), "prompt_ids": self._last_prompt_ids()}
        return members

    def _last_prompt_ids(self) -> list[int]:
        """The prompt; of a streamed answer what fits the final frame, after frames with what comes before."""
        ids = list(self._prompt_ids)
        while self._form.is_stream and len(ids) > IDS_PER_FRAME:
            self._emit({"prompt_ids": ids[:IDS_PER_FRAME]}, False)
            del ids[:IDS_PER_FRAME]
        return ids

    def _text_members(self, finishes: Sequence[str]) -> dict[str, Any]:
        with_logprobs = any(choice.logprobs for choice in self._choices)
        own = [
            {**({} if self._form.is_stream else choice.members(with_logprobs=with_logprobs)), **choice.call_members()}
            for choice in self._choices
        ]
        if len(own) == 1:
            return {**own[0], "finish": finishes[0]}
        choices = [
            {"choice": index, **members, "finish": finish}
            for index, (members, finish) in enumerate(zip(own, finishes, strict=True))
        ]
        return {"choices": choices, "finish": finishes[0]}

"""From generated token ids to text deltas: bytes, characters, channel, stop strings, in this order.

A *segment* is the stretch between two think markers. Each stage is made anew for each segment, so nothing (half a
character, the beginning of a stop string) leaks from one channel to the other, and at a marker all that is held
back comes out in the channel it belongs to.

Stop strings end the answer, not the thought: a thought quotes the question and would be cut off with no answer at
all (what hosted services do; servers that matched both got it reported as a fault). Where nothing is split all text
is content. A stop string does not reach across a marker and does not see the newlines that are dropped after the
thought.

Log-probabilities leave with the token that they belong to, on a delta with empty text if the text is held back or
there is none (end markers, padding ids, the stop string itself): each exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgeqwen.core.request import Channel, TokenLogprob
from edgeqwen.text.detokenizer import IncrementalDetokenizer
from edgeqwen.text.reasoning import find_think_tokens, trimmer_for
from edgeqwen.text.stops import StopMatcher
from edgeqwen.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """A piece of text of one channel: whole code points, empty only where it carries `logprobs`."""

    channel: Channel
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextStep:
    """What one token gave. `is_reasoning` counts the token as thought (the markers too)."""

    deltas: tuple[TextDelta, ...]
    is_stopped: bool
    is_reasoning: bool


class _Segment:
    """The stages of one stretch of one channel."""

    def __init__(self, channel: Channel, *, stops: Sequence[str], follows_thought: bool) -> None:
        self.channel = channel
        self._detokenizer = IncrementalDetokenizer()
        self._trimmer = trimmer_for(channel, follows_thought=follows_thought)
        self._matcher = StopMatcher(stops if channel == "content" else ())

    @property
    def stop(self) -> str | None:
        return self._matcher.stop

    @property
    def is_stopped(self) -> bool:
        return self._matcher.is_stopped

    def push(self, data: bytes, *, is_armed: bool) -> str:
        text = self._trimmer.push(self._detokenizer.push(data))
        return self._matcher.push(text, is_armed=is_armed)

    def finish(self) -> str:
        text = self._trimmer.push(self._detokenizer.finish())
        return self._matcher.push(text) + self._matcher.flush()


class TextStream:
    """The text of one choice, token by token.

    `stop` holds no empty string. A stop string that is complete before the token number `min_tokens` is text. What is
    generated continues a prompt: a sentencepiece token's leading space stays, also on the first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        splits_reasoning: bool = False,
        starts_in_reasoning: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._think = find_think_tokens(tokenizer) if splits_reasoning else None
        self._num_free = min_tokens
        self._segment = self._open("reasoning" if self._think and starts_in_reasoning else "content")

    @property
    def is_stopped(self) -> bool:
        """A stop string was completed; nothing comes any more."""
        return self._segment.is_stopped

    @property
    def stop(self) -> str | None:
        """The stop string that was said."""
        return self._segment.stop

    @property
    def is_reasoning(self) -> bool:
        """The next token stands in the thought, unless it is a marker."""
        return self._segment.channel == "reasoning"

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> TextStep:
        """Take the next generated token, end tokens included; after a stop it gives nothing."""
        if self.is_stopped:
            return TextStep((), is_stopped=True, is_reasoning=self.is_reasoning)
        logprobs = () if logprob is None else (logprob,)
        self._num_free = max(0, self._num_free - 1)
        if self._think and token_id in (self._think.open, self._think.close):
            return self._switch("reasoning" if token_id == self._think.open else "content", logprobs)
        data = self._tokenizer.token_bytes(token_id)
        text = self._segment.push(data, is_armed=not self._num_free)
        deltas = _deltas(self._segment.channel, text, logprobs)
        return TextStep(deltas, is_stopped=self.is_stopped, is_reasoning=self.is_reasoning)

    def finish(self) -> tuple[TextDelta, ...]:
        """The generation ended: give out what is held back. Nothing after a stop, and nothing the second time."""
        return () if self.is_stopped else _deltas(self._segment.channel, self._segment.finish(), ())

    def _open(self, channel: Channel, *, follows_thought: bool = False) -> _Segment:
        return _Segment(channel, stops=self._stop, follows_thought=follows_thought)

    def _switch(self, channel: Channel, logprobs: tuple[TokenLogprob, ...]) -> TextStep:
        was_reasoning = self.is_reasoning
        if channel == self._segment.channel:
            deltas = _deltas(channel, "", logprobs)
            return TextStep(deltas, is_stopped=False, is_reasoning=was_reasoning)
        deltas = _deltas(self._segment.channel, self._segment.finish(), ())
        if not self.is_stopped:
            self._segment = self._open(channel, follows_thought=was_reasoning)
        return TextStep(deltas + _deltas("reasoning", "", logprobs), is_stopped=self.is_stopped, is_reasoning=True)


def _deltas(channel: Channel, text: str, logprobs: tuple[TokenLogprob, ...]) -> tuple[TextDelta, ...]:
    return (TextDelta(channel, text, logprobs),) if text or logprobs else ()

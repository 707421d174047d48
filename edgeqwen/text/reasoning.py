"""The thought told from the answer, by token id alone.

`<think>` and `</think>` switch the channel when they come as their own token; spelt out of ordinary tokens they are
text. The markers themselves appear in no channel. A model is trained to set newlines around the block, so:

* reasoning loses its leading and trailing newlines (trailing ones are held back until more thought follows);
* content loses the newlines directly after `</think>`, nothing else and no other white space.

An empty block therefore leaves no trace. A block that never ends stays reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeqwen.core.request import Channel, Thinking
from edgeqwen.text.tokenizer import Tokenizer

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """The ids of the two markers."""

    open: int
    close: int


def find_think_tokens(tokenizer: Tokenizer) -> ThinkTokens | None:
    """The tokenizer's think markers, None unless it has both as added tokens."""
    opening, closing = tokenizer.added_token_id(THINK_OPEN), tokenizer.added_token_id(THINK_CLOSE)
    return None if opening is None or closing is None else ThinkTokens(opening, closing)


def find_thinking(tokenizer: Tokenizer) -> Thinking | None:
    """How a model with think markers thinks, without a budget; None if it has none. A thought ends as models are
    trained to end it: the marker stands on a line of its own, with an empty line behind it.
    """
    tokens = find_think_tokens(tokenizer)
    if tokens is None:
        return None
    closing = tokenizer.encode_parts(["\n", tokens.close, "\n\n"])
    return Thinking(opening=tokens.open, closing_marker=tokens.close, closing=tuple(closing))


class NewlineTrimmer:
    """Drops newlines at the start (until the first other character) and, if `trims_end`, at the end."""

    def __init__(self, *, trims_start: bool, trims_end: bool) -> None:
        self._trims_start = trims_start
        self._trims_end = trims_end
        self._held = ""

    def push(self, text: str) -> str:
        """The text without what is to be dropped or may turn out to be the end."""
        if self._trims_start:
            text = text.lstrip("\n")
            self._trims_start = not text
        if not self._trims_end:
            return text
        text = self._held + text
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        return kept


def trimmer_for(channel: Channel, *, follows_thought: bool) -> NewlineTrimmer:
    """The trimmer of a stretch of `channel`; `follows_thought` says that a think block ends right before it."""
    is_thought = channel == "reasoning"
    return NewlineTrimmer(trims_start=is_thought or follows_thought, trims_end=is_thought)

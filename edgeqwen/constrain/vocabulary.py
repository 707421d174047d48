"""The model's vocabulary as llguidance needs it: the bytes of each token, and which tokens end an answer.

Every added token is a marker here: it may come where a grammar names it, and nowhere else, though its text might stand
in a string. From our own `Tokenizer`, so that a vocabulary rebuilt from a GGUF file and one of the tokenizers library
are read alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from edgeqwen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_END: Final = b"<end>"


class _Source:
    """What `LLTokenizer` reads of a tokenizer. The vocabulary has one token more than the model, which ends an answer
    where the model has no end token: it can never be drawn.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = {token.id: token.text.encode() for token in tokenizer.added_tokens}
        own = (added.get(i, b"") or tokenizer.token_bytes(i) for i in range(tokenizer.num_tokens))
        self.tokens: Sequence[bytes] = [*own, _END]
        self.eos_token_id = tokenizer.num_tokens
        self.special_token_ids = [*added, self.eos_token_id]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text in the middle of an answer, of exactly its bytes: they are all that may come where only one
        text can. As the model's own encoder cuts it, if that adds no space.
        """
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        ids = self._tokenizer.encode_parts(["", data.decode("utf-8", "replace")])
        return ids if b"".join(map(self._tokenizer.token_bytes, ids)) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again."""
        ids, place = [], 0
        while place < len(data):
            lengths = range(min(self._longest, len(data) - place), 0, -1)
            found = next((n for n in lengths if data[place : place + n] in self._ids), 0)
            if not found:  # a vocabulary that cannot write this byte
                break
            ids.append(self._ids[data[place : place + found]])
            place += found
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        added = {token.id for token in self._tokenizer.added_tokens}
        return {data: i for i, data in enumerate(self.tokens[:-1]) if data and i not in added}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


def make_vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """A fraction of a second for a large vocabulary; imports llguidance."""
    from llguidance import LLTokenizer

    ends = [token for token in eos_token_ids if token < tokenizer.num_tokens]
    source: Any = _Source(tokenizer)  # stands in for llguidance's own wrapper, by which the argument is typed
    return LLTokenizer(source, eos_token=ends or [tokenizer.num_tokens])

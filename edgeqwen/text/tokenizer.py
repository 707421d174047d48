"""Text to token ids and back, exactly: wraps the `tokenizers` library.

Two encoders share one vocabulary in memory (`encoders`). The *stock* one knows the added tokens (`<|im_start|>`,
`<think>`, ...): their strings become their ids. The *plain* one does not: every string is text. A prompt is encoded
piecewise, template markers as ids and what stands between them by the plain encoder, which gives the ids of the stock
encoder for harmless text and lets no client write a marker (`prompt`, `guard`).

Texts are encoded one a call, but by the library's call for several: the one for a single text holds Python's lock
until it is done, a second for a text of a megabyte, and the event loop with it. The threads that the library would
start for several texts are switched off; they would only stand by, and it warns of them after a fork.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer as RustTokenizer

from edgeqwen.errors import BadRequest
from edgeqwen.text.decoder import read_decoder
from edgeqwen.text.encoders import Encoders, KeptEncoders, digest_of, parse, read_file

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read by the library with every call

Part: TypeAlias = str | int
"""A stretch of text, or the id of an added token."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched as a whole string before the model sees the text."""

    id: int
    text: str
    is_special: bool
    strips_left: bool = False
    strips_right: bool = False
    is_single_word: bool = False


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads; never adds a begin-of-text token."""

    def __init__(self, rust: RustTokenizer, *, file: str = "tokenizer.json") -> None:
        self._encoders = KeptEncoders(Encoders.of(rust, file=file))
        self._decoder = read_decoder(rust, file=file)
        added = (
            AddedToken(token_id, token.content, token.special, token.lstrip, token.rstrip, token.single_word)
            for token_id, token in rust.get_added_tokens_decoder().items()
        )
        self._added_by_id = {token.id: token for token in added if token.text}
        self._added_by_text = {token.text: token for token in self._added_by_id.values()}
        self._markers = compile_alternatives(self._added_by_text)
        self.num_tokens = max(rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the file has put before and after a whole text (a begin-of-text token, an end token), by its
        post-processor. Prompts get none, since a template says what stands in them.
        """
        count = self._stock.num_special_tokens_to_add(is_pair=False)
        if not count:
            return (), ()
        probe = self._stock.encode("a", add_special_tokens=True)
        is_added = probe.special_tokens_mask
        body = [index for index, mark in enumerate(is_added) if not mark]
        if not body:
            return (), ()
        return tuple(probe.ids[: body[0]]), tuple(probe.ids[body[-1] + 1 :])

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        """Read a tokenizer.json; raises `ModelMissing` or `ModelInvalid` that name the file."""
        data = read_file(Path(path))
        tokenizer = cls.from_bytes(data, file=str(path))
        tokenizer._encoders = KeptEncoders(tokenizer._encoders.get(), path=Path(path), digest=digest_of(data))
        return tokenizer

    @classmethod
    def from_bytes(cls, data: bytes, *, file: str = "tokenizer.json") -> Tokenizer:
        """From the content of a tokenizer.json; `file` is what errors call it."""
        return cls(parse(data, file=file), file=file)

    @property
    def _stock(self) -> RustTokenizer:
        return self._encoders.get().stock

    def let_go(self) -> None:
        """Give most of the memory back until the next text; nothing happens to one that was not read from a file."""
        self._encoders.let_go()

    @property
    def added_tokens(self) -> tuple[AddedToken, ...]:
        """Every added token, special or not, by ascending id."""
        return tuple(self._added_by_id[token_id] for token_id in sorted(self._added_by_id))

    def token_id(self, text: str) -> int | None:
        """The id of the token named `text`, None if there is none."""
        token_id: int | None = self._stock.token_to_id(text)
        return token_id

    def added_token_id(self, text: str) -> int | None:
        """The id of the added token `text`, None if there is none or it is an ordinary token."""
        token = self._added_by_text.get(text)
        return token.id if token else None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`; added-token strings become their ids if `special`, else they stay text like any other."""
        encoders = self._encoders.get()
        return _ids(encoders.stock, text) if special else self._encode_plain(encoders.plain, text)

    def cut(self, text: str) -> list[Part]:
        """Split at the added-token strings as the stock encoder does; between two parts of text there is an id."""
        parts: list[Part] = []
        end = 0
        for start, stop, token in self._find_added(text):
            parts += [text[end:start], token.id] if start > end else [token.id]
            end = stop
        return [*parts, text[end:]] if end < len(text) else parts

    def encode_parts(self, parts: Iterable[Part]) -> list[int]:
        """Ids of a text that was `cut`: strings stay text whatever they spell."""
        ids: list[int] = []
        encoders = self._encoders.get()
        encoder = encoders.plain
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(encoder, part)
            encoder = encoders.inner
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; empty for special tokens and ids without a token (padding rows).

        Exact in the middle of a text: a leading space stays. `decode_bytes` says what holds at the start.
        """
        if token := self._added_by_id.get(token_id):
            return b"" if token.is_special else token.text.encode()
        if not 0 <= token_id < self.num_tokens:
            return b""
        name = self._stock.id_to_token(token_id)
        return b"" if name is None else self._decoder.token_bytes(name)

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """The bytes of a whole text. Nothing is tidied; the space a sentencepiece encoder puts first is taken off."""
        pieces = [self._any_bytes(i) if not skip_special else self.token_bytes(i) for i in ids]
        return self._decoder.strip_start(b"".join(pieces))

    def _any_bytes(self, token_id: int) -> bytes:
        token = self._added_by_id.get(token_id)
        return token.text.encode() if token else self.token_bytes(token_id)

    def _find_added(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        for match in self._markers.finditer(text):
            token = self._added_by_text[match[0]]
            start, stop = match.span()
            if token.is_single_word and (_is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])):
                continue
            while token.strips_left and start and text[start - 1].isspace():
                start -= 1
            while token.strips_right and stop < len(text) and text[stop].isspace():
                stop += 1
            yield start, stop, token

    def _encode_plain(self, encoder: RustTokenizer, text: str) -> list[int]:
        ids = _ids(encoder, text)
        if self._added_by_id.keys().isdisjoint(ids):
            return ids
        # Some vocabularies hold the added strings as ordinary words too. Breaking each behind its first character
        # leaves the model no such word; an id that comes nevertheless is the unknown token.
        starts = [match.start() + 1 for match in self._markers.finditer(text)]
        bounds = [0, *starts, len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
        inner = self._encoders.get().inner
        return [i for k, piece in enumerate(pieces) for i in _ids(inner if k else encoder, piece)]


def compile_alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`, the longest where several begin; finds nothing if there are none."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _ids(encoder: RustTokenizer, text: str) -> list[int]:
    try:
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except (TypeError, UnicodeEncodeError) as e:
        raise BadRequest("the text holds half a surrogate pair; send valid Unicode") from e
    return ids


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"

"""What bytes a token stands for: the two decoder forms that the supported families use.

* **Byte-level BPE** (GPT-2, Qwen, Llama 3): every character of a token's name is one byte. Bytes that print map to
  the character of the same number; the other 68 are moved, in order, to U+0100 and up.
* **Sentencepiece style** (Llama 2): a token's name is its text with U+2581 for a space; `<0xNN>` is one byte; the
  text of a whole sequence loses one leading space, which the encoder had put there.

Text is bytes here and becomes characters in one place only (`detokenizer`): a token may be a third of an emoji.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer as RustTokenizer

from edgeqwen.errors import ModelInvalid

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTING = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


class TokenDecoder(Protocol):
    """Turns the name of an ordinary (not added) token into its bytes."""

    def token_bytes(self, name: str) -> bytes: ...

    def strip_start(self, data: bytes) -> bytes:
        """Drop what the encoder put before the text; `data` is the bytes of a whole sequence."""
        ...


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in the names of byte-level tokens (GPT-2's table), by character."""
    printing = {byte for span in _PRINTING for byte in span}
    moved = (byte for byte in range(256) if byte not in printing)
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


@dataclass(frozen=True, slots=True)
class ByteLevelDecoder:
    """Byte-level BPE; a name with a character outside the table is its own text."""

    table: Mapping[str, int]

    def token_bytes(self, name: str) -> bytes:
        try:
            return bytes([self.table[char] for char in name])
        except KeyError:
            return name.encode()

    def strip_start(self, data: bytes) -> bytes:
        return data


@dataclass(frozen=True, slots=True)
class SentencePieceDecoder:
    """Replaces text; `<0xNN>` is a byte if `has_bytes`; takes `num_stripped` times `stripped` off in front."""

    replacements: tuple[tuple[str, str], ...]
    has_bytes: bool = False
    stripped: bytes = b" "
    num_stripped: int = 0

    def token_bytes(self, name: str) -> bytes:
        if self.has_bytes and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            name = name.replace(old, new)
        return name.encode()

    def strip_start(self, data: bytes) -> bytes:
        for _ in range(self.num_stripped):
            data = data.removeprefix(self.stripped)
        return data


def read_decoder(tokenizer: RustTokenizer, *, file: str) -> TokenDecoder:
    """The decoder that tokenizer.json declares; raises `ModelInvalid` that names an unsupported one and `file`."""
    if tokenizer.decoder is None:
        raise ModelInvalid(f"{file}: has no decoder; byte-level and sentencepiece decoders are supported")
    steps = list(_steps(msgspec.json.decode(tokenizer.decoder.__getstate__())))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoder(byte_characters())
    if [step["type"] for step in steps] == ["Metaspace"]:
        num_stripped = 0 if steps[0].get("prepend_scheme") == "never" else 1
        return SentencePieceDecoder(((steps[0]["replacement"], " "),), num_stripped=num_stripped)
    return _sentencepiece(steps, file=file)


def _steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if state["type"] == "Sequence":
        for inner in state["decoders"]:
            yield from _steps(inner)
    else:
        yield state


def _sentencepiece(steps: list[Mapping[str, Any]], *, file: str) -> SentencePieceDecoder:
    replacements: list[tuple[str, str]] = []
    stripped, num_stripped = b" ", 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Strip", "content": str(text), "start": int(start), "stop": 0} if not num_stripped:
                stripped, num_stripped = text.encode(), start
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise ModelInvalid(
                    f"{file}: decoder step {step['type']} is not supported; take a model with a byte-level or "
                    "sentencepiece (Replace, ByteFallback, Fuse, Strip) decoder"
                )
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    return SentencePieceDecoder(tuple(replacements), has_bytes, stripped, num_stripped)

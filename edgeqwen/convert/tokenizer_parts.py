"""Parts of byte-level BPE tokenizers, as the published `tokenizer.json` of each kind has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from edgeqwen.convert.files import Fields


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text becomes words: `pattern` cuts it (None: the pattern of GPT-2, in the library), digits alone if asked.

    `ignores_merges`: a word that is a token is taken whole, without merging.
    """

    pattern: str | None
    splits_digits: bool = False
    normalises: bool = False
    ignores_merges: bool = False


CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS: Final = (
    CONTRACTIONS + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2: Final = PreTokenizer(WORDS.format(digits=r"\p{N}"), normalises=True)
LLAMA3: Final = PreTokenizer(WORDS.format(digits=r"\p{N}{1,3}"), ignores_merges=True)
GPT2: Final = PreTokenizer(None)
SMOLLM: Final = PreTokenizer(None, splits_digits=True)

PRE_TOKENIZERS: Final = {
    "qwen2": QWEN2,
    "smollm": SMOLLM,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "gpt-2": GPT2,
}
"""By the value of `tokenizer.ggml.pre`. `default` is not here: converters write it when they do not know."""


def byte_level_bpe(
    fields: Fields, texts: Sequence[str], types: Sequence[int], pre_tokenizer: PreTokenizer
) -> dict[str, Any]:
    """The content of `tokenizer.json`. Nothing is put before or after a text: no BOS."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(texts, types),
        "normalizer": {"type": "NFC"} if pre_tokenizer.normalises else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pre_tokenizers(pre_tokenizer, byte_level)},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignores_merges,
            "vocab": vocabulary(fields, texts, types),
            "merges": _merges(fields),
        },
    }


def _pre_tokenizers(given: PreTokenizer, byte_level: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if given.splits_digits else []
    if given.pattern is None:
        return [*parts, {**byte_level, "use_regex": True}]
    split = {"type": "Split", "pattern": {"Regex": given.pattern}, "behavior": "Isolated", "invert": False}
    return [*parts, split, byte_level]


def _merges(fields: Fields) -> list[list[str]]:
    pairs = []
    for index, line in enumerate(fields.get("merges")):
        cut = line.find(" ", 1)
        if cut < 0 or cut + 1 == len(line):
            raise fields.error("merges", f"is damaged: entry {index} is not a pair of tokens")
        pairs.append([line[:cut], line[cut + 1 :]])
    return pairs


def vocabulary(fields: Fields, texts: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Ids by text; added tokens are in it too, which pins their ids."""
    ids: dict[str, int] = {}
    for index, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind == TokenType.UNUSED:
            continue
        if text in ids:
            raise fields.error("tokens", f"holds the same text as tokens {ids[text]} and {index}")
        ids[text] = index
    return ids


def added_tokens(texts: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in a text as a whole before it is cut: control tokens (special) and user-defined ones."""
    return [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != TokenType.USER_DEFINED,
        }
        for index, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN) and text
    ]

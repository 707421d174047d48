"""The sentencepiece tokenizer of a GGUF file (`tokenizer.ggml.model` `llama`) as byte-fallback BPE with merges.

Sentencepiece BPE joins, among all neighbours whose union is a token, the pair of the highest-scoring union. Written as
merges: every way of making a token out of two tokens, best score first; a library that applies merges in order then
does the same. Spaces are written `▁`; text without a token falls back to `<0xNN>` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from edgeqwen.convert.files import Fields
from edgeqwen.convert.tokenizer_parts import TokenType, added_tokens, vocabulary

SPACE: Final = "\u2581"
MAX_PIECE_LEN: Final = 256


def sentencepiece_tokenizer(fields: Fields, texts: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """The content of `tokenizer.json`. Nothing is put before or after a text: no BOS."""
    ids = vocabulary(fields, texts, types)
    has_prefix = fields.boolean("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = [text for text, kind in zip(texts, types, strict=True) if kind == TokenType.UNKNOWN]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(texts, types),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown[0] if unknown else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": _merges(fields, texts, types, ids),
        },
    }


def _merges(fields: Fields, texts: Sequence[str], types: Sequence[int], ids: dict[str, int]) -> list[list[str]]:
    scores = fields.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) < len(texts) or not np.isfinite(scores).all():
        raise fields.error("scores", f"must have one finite number for each of the {len(texts):,} tokens")
    normal = [index for index, kind in enumerate(types) if kind == TokenType.NORMAL]
    pieces = {texts[index] for index in normal}
    merges: list[list[str]] = []
    for index in sorted(normal, key=lambda each: (-float(scores[each]), each)):
        text = texts[index]
        if len(text) > MAX_PIECE_LEN:
            raise fields.error("tokens", f"holds a piece of {len(text)} characters (token {index})")
        ways = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(left, right) for left, right in ways if left in pieces and right in pieces]
        merges += [[left, right] for left, right in sorted(known, key=lambda way: (ids[way[0]], ids[way[1]]))]
    return merges

"""Small tokenizers made in memory, one of each decoder form, so that most text tests need no file."""

from __future__ import annotations

import functools
import json
from typing import Any

from edgeqwen.text import Tokenizer
from edgeqwen.text.decoder import byte_characters

SPECIAL = ("<|im_start|>", "<|im_end|>")
ORDINARY = ("<think>", "</think>", "<tool_call>")
WORDS = ("Hello", "world", "own", "fox", "th", "ink", "im", "_end")


def byte_level_file(*, added: list[dict[str, Any]] | None = None, **changes: Any) -> bytes:
    """A tokenizer.json: byte-level BPE over 256 bytes and some merges; ids of the added tokens come last."""
    vocab, merges = _vocab(sorted(byte_characters()), WORDS)
    added = default_added(len(vocab)) if added is None else [{"id": len(vocab) + i, **a} for i, a in enumerate(added)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return _file(vocab, merges, added, **{"pre_tokenizer": byte_level, "decoder": byte_level} | changes)


def sentencepiece_file(*, prepend_scheme: str = "first", **changes: Any) -> bytes:
    """A tokenizer.json in the manner of Llama 2: Metaspace, byte tokens, a begin token."""
    base = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"HelowrdinkthafxT.<>|_m/sé"]
    vocab, merges = _vocab(list(dict.fromkeys(base)), WORDS)
    added = [_added(0, "<unk>", special=True), *default_added(len(vocab))]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": False}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    decoder = {"type": "Sequence", "decoders": steps}
    model = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    return _file(vocab, merges, added, **{"pre_tokenizer": metaspace, "decoder": decoder, "model": model} | changes)


def default_added(first_id: int) -> list[dict[str, Any]]:
    texts = [*SPECIAL, *ORDINARY]
    return [_added(first_id + i, text, special=text in SPECIAL) for i, text in enumerate(texts)]


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_bytes(byte_level_file())


@functools.cache
def sentencepiece(prepend_scheme: str = "first") -> Tokenizer:
    return Tokenizer.from_bytes(sentencepiece_file(prepend_scheme=prepend_scheme))


def _added(token_id: int, text: str, *, special: bool = False) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": special, **flags}


def _vocab(base: list[str], words: tuple[str, ...]) -> tuple[dict[str, int], list[list[str]]]:
    """Base tokens, then each word built letter by letter."""
    vocab = {name: i for i, name in enumerate(base)}
    merges: list[list[str]] = []
    for word in words:
        for size in range(2, len(word) + 1):
            if word[:size] not in vocab:
                merges.append([word[: size - 1], word[size - 1]])
                vocab[word[:size]] = len(vocab)
    return vocab, merges


def _file(vocab: dict[str, int], merges: list[list[str]], added: list[dict[str, Any]], **parts: Any) -> bytes:
    model = {"type": "BPE", "vocab": vocab, "merges": merges, **parts.pop("model", {})}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    whole = {"version": "1.0", "added_tokens": [flags | token for token in added], **parts, "model": model}
    return json.dumps(whole).encode()

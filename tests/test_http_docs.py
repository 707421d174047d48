"""What docs/http.md shows is accepted, and it leaves out no field that is read, accepted or refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from edgeqwen.config import load
from edgeqwen.http import anthropic_request, openai_request
from edgeqwen.http.completion_request import CompletionBody
from edgeqwen.http.embeddings import EmbeddingBody
from edgeqwen.http.tokens import DetokenizeBody, TokenizeBody
from tests.http_client import connect
from tests.wire import Wire

DOCUMENT: Final = (Path(__file__).parent.parent / "docs" / "http.md").read_text(encoding="utf-8")
EXAMPLES: Final = re.findall(r"^```json post (\S+)\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    return DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0]


def test_there_are_examples_of_every_format() -> None:
    assert {path for path, _ in EXAMPLES} == set(re.findall(r"POST (/v1/\w+(?:/\w+)?)`", DOCUMENT)) | {
        "/v1/messages/count_tokens",
        "/v1/detokenize",
    }


@pytest.mark.parametrize(("path", "body"), EXAMPLES)
async def test_an_example_is_answered(wire: Wire, path: str, body: str) -> None:
    answer = await (await connect(wire)).ask("POST", path, json.loads(body))
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("title", "fields"),
    [
        (
            "Chat completions",
            [
                *openai_request.ChatBody.__struct_fields__,
                *openai_request.NO_EFFECT,
                *openai_request.NEUTRAL,
                *openai_request.UNSUPPORTED,
                *openai_request.EFFORTS,
            ],
        ),
        ("Completions", [name for name in CompletionBody.__struct_fields__ if name != "top_logprobs"]),
        ("Embeddings", ["input", *EmbeddingBody.__struct_fields__]),
        (
            "Anthropic's messages",
            [
                *anthropic_request.MessagesBody.__struct_fields__,
                *anthropic_request.NO_EFFECT,
                *anthropic_request.UNSUPPORTED,
            ],
        ),
        (
            "Tokens",
            [name for name in (*TokenizeBody.__struct_fields__, *DetokenizeBody.__struct_fields__) if name != "model"],
        ),
    ],
)
def test_every_field_has_its_place(title: str, fields: Iterable[str]) -> None:
    text = section(title)
    assert [name for name in fields if f"`{name}`" not in text and f'"{name}"' not in text] == []


def test_the_configuration_that_is_shown_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    (tmp_path / "config.toml").write_text(text)
    http = load(tmp_path / "config.toml", {}, {}).http
    assert {name: getattr(http, name) for name in tomllib.loads(text)["http"]} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in tomllib.loads(text)["http"].items()
    }

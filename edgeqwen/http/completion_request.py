"""OpenAI's older completion request: prompts without a template, to what the engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.errors import BadRequest
from edgeqwen.http.openai_input import StreamOptions, read_texts, wants_usage_chunk
from edgeqwen.http.openai_request import NO_EFFECT
from edgeqwen.protocol.messages import GenerationOptions, convert, given_members

MAX_PROMPTS: Final = 64
DEFAULT_MAX_TOKENS: Final = 16
"""What this format says; chat completions have the daemon's own default."""

NAMES: Final[Mapping[str, str]] = {"tokens": "prompt", "top_logprobs": "logprobs"}
"""The engine's name of a field: its name here."""


class CompletionBody(GenerationOptions, frozen=True, kw_only=True):
    """The supported fields. `logprobs` is the number of alternatives; `best_of` may only say what `n` says."""

    prompt: str
    logprobs: int | None = None  # type: ignore[assignment]  # another type than in the formats that came later
    model: str | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request: one input a prompt, and how the answer is wanted."""

    given: tuple[GenerationInput, ...]
    num_choices: int
    is_stream: bool
    with_usage_chunk: bool
    with_logprobs: bool


def read_completion(members: Mapping[str, Any]) -> CompletionRequest:
    """Raises `BadRequest` with the field at fault."""
    given = given_members(members, but=NO_EFFECT)
    prompts = _read_prompts(given.get("prompt"))
    body: CompletionBody = convert({**given, "prompt": ""}, CompletionBody)  # which knows no unions of lists
    _check(body)
    shared: dict[str, Any] = body.to_input()
    shared["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    shared |= {"logprobs": None if body.logprobs is None else True, "top_logprobs": body.logprobs, "echo": body.echo}
    return CompletionRequest(
        given=tuple(GenerationInput(**source, **shared) for source in prompts),
        num_choices=1 if body.n is None else body.n,
        is_stream=body.stream,
        with_usage_chunk=wants_usage_chunk(body.stream_options, is_stream=body.stream),
        with_logprobs=body.logprobs is not None,
    )


def _check(body: CompletionBody) -> None:
    if body.suffix:
        raise BadRequest("suffix is not supported", field="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest("best_of must be what n is: all that is generated is returned", field="best_of")
    if body.logprobs is not None and body.echo:
        raise BadRequest("logprobs are of the answer only: leave out echo", field="logprobs")
    if body.n is not None and body.n < 1:
        raise BadRequest("n must be at least 1", field="n")


def _read_prompts(prompt: Any) -> list[dict[str, Any]]:
    """Each prompt as the member of `GenerationInput` that it is."""
    texts = read_texts(prompt, "prompt")
    if len(texts) > MAX_PROMPTS:
        raise BadRequest(f"prompt must hold at most {MAX_PROMPTS} prompts, not {len(texts)}", field="prompt")
    return [{"prompt" if isinstance(text, str) else "tokens": text} for text in texts]

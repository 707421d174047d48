"""From what a client gave to what the engine runs: every range is checked here, whichever front it came through.

Two halves, because the second needs the prompt's length and the loaded model:

    check_input(given)                 what is wrong at sight (fields, ranges, ids); messages are read by `text`
    ... template and tokenizer run ...
    resolve(given, prompt, ...)        room for the answer, defaults, the `Request`

Order of precedence: request, then the model's defaults (`defaults`). `max_tokens` is by default the smaller of
`limits.default_max_tokens` and the room that the prompt leaves. One token of the context is always kept for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from edgeqwen.core.constraint import Constraint
from edgeqwen.core.request import PRIORITIES, Request, SamplingParams, Thinking
from edgeqwen.engine.checks import boolean, floating, integer, one_of
from edgeqwen.engine.defaults import SamplingDefaults
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.text import Prompt

_MAX_SEED = (1 << 63) - 1
_MAX_COUNT = (1 << 31) - 1

_ANSWER_TOKENS: Final = 16
"""A thought leaves at least so many to its answer, or a quarter of what there are."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request ready to run, and its effective values as a client is shown them."""

    request: Request
    params: Mapping[str, Any]


def check_input(given: GenerationInput, *, limits: EngineLimits, num_tokens: int, has_template: bool) -> None:
    """Raise `BadRequest` for the first field that no model state could make right. `num_tokens`: ids with a text."""
    _check_prompt(given, limits=limits, num_tokens=num_tokens, has_template=has_template)
    floating("temperature", given.temperature, least=0, most=100)
    integer("top_k", given.top_k, least=0, most=num_tokens)
    floating("top_p", given.top_p, above=0, most=1)
    floating("min_p", given.min_p, least=0, most=1)
    floating("presence_penalty", given.presence_penalty, least=-2, most=2)
    floating("frequency_penalty", given.frequency_penalty, least=-2, most=2)
    floating("repetition_penalty", given.repetition_penalty, above=0, most=10)
    integer("seed", given.seed, least=0, most=_MAX_SEED)
    integer("max_tokens", given.max_tokens, least=1, most=_MAX_COUNT)
    integer("min_tokens", given.min_tokens, least=0, most=_MAX_COUNT)
    integer("think_budget", given.think_budget, least=0, most=_MAX_COUNT)
    integer("n", given.n, least=1, most=limits.choices)
    integer("deadline_ms", given.deadline_ms, least=1, most=limits.max_deadline_ms)
    for field in ("logprobs", "ignore_eos", "echo", "think", "wait", "speculate", "cache", "parallel_tool_calls"):
        boolean(field, getattr(given, field))
    if integer("top_logprobs", given.top_logprobs, least=0, most=limits.top_logprobs) and not given.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    one_of("priority", given.priority, PRIORITIES)
    _check_stop(given.stop, limits)
    _logit_bias(given.logit_bias, limits, num_tokens)


def _check_prompt(given: GenerationInput, *, limits: EngineLimits, num_tokens: int, has_template: bool) -> None:
    sources = {"messages": given.messages, "prompt": given.prompt, "tokens": given.tokens}
    present = [name for name, value in sources.items() if value is not None]
    if len(present) != 1:
        wrong = present[1] if present else "prompt"
        raise BadRequest("give exactly one of messages, prompt and tokens", field=wrong)
    if given.messages is not None:
        if not has_template:
            raise BadRequest("this model has no chat template: use generate", field="messages")
        if given.echo:
            raise BadRequest("echo is for generate only", field="echo")
        if not given.messages or (len(given.messages) > limits.messages and not given.has_history):  # a session grows
            message = f"messages must hold 1 to {limits.messages} messages, not {len(given.messages)}"
            raise BadRequest(message, field="messages")
        return
    for field in ("think", "think_budget", "tools", "tool_choice", "parallel_tool_calls", "template_kwargs"):
        if getattr(given, field) not in (None, (), {}):
            raise BadRequest(f"{field} needs a chat template, and generate uses none", field=field)
    if given.prompt is not None and not isinstance(given.prompt, str):
        raise BadRequest("prompt must be a string", field="prompt")
    if not given.prompt and given.tokens is None:
        raise BadRequest("prompt is empty", field="prompt")
    if given.tokens is not None:
        if not given.tokens:
            raise BadRequest("tokens is empty", field="tokens")
        check_ids(given.tokens, num_tokens)


def check_ids(ids: Sequence[object], num_tokens: int) -> None:
    """Raise `BadRequest` (field `tokens`) unless all of `ids` are token ids that have a text."""
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < num_tokens:
            raise BadRequest(f"tokens[{index}] must be a token id between 0 and {num_tokens - 1}", field="tokens")


def _check_stop(stop: Sequence[object] | None, limits: EngineLimits) -> None:
    if stop is None:
        return
    if isinstance(stop, str) or len(stop) > limits.stop_strings:
        raise BadRequest(f"stop must be at most {limits.stop_strings} strings", field="stop")
    for item in stop:
        if not isinstance(item, str) or not 1 <= len(item.encode("utf-8", "surrogatepass")) <= limits.stop_bytes:
            raise BadRequest(f"stop must hold strings of 1 to {limits.stop_bytes} bytes", field="stop")


def _logit_bias(
    bias: Mapping[str, float] | None, limits: EngineLimits, num_tokens: int
) -> tuple[tuple[int, float], ...]:
    if bias is None:
        return ()
    if len(bias) > limits.logit_bias:
        raise BadRequest(f"logit_bias holds more than {limits.logit_bias} tokens", field="logit_bias")
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        text = str(key)
        token = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else num_tokens
        if token >= num_tokens:
            message = f"logit_bias: every key must be a token id between 0 and {num_tokens - 1}"
            raise BadRequest(message, field="logit_bias")
        number = floating("logit_bias", value, least=-100, most=100)
        if number is None:
            raise BadRequest("logit_bias must be a number for every token", field="logit_bias")
        pairs[token] = number
    return tuple(sorted(pairs.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveContext:
    """What `resolve` needs beside the input. `seed` is drawn by the caller, for requests that bring none. `constraint`
    is the compiled form of the answer, `thinking` how it thinks.
    """

    limits: EngineLimits
    defaults: SamplingDefaults
    context: int
    num_tokens: int
    rid: str
    owner: str
    seed: int
    arrived_at: float
    constraint: Constraint | None = None
    thinking: Thinking | None = None


def resolve(given: GenerationInput, prompt: Prompt, at: ResolveContext) -> Resolved:
    """The request for a checked `given` and its prompt. Raises `EdgeqwenError` (`too_long`) or `BadRequest`."""
    if not prompt.ids:
        raise BadRequest("the prompt has no tokens", field="prompt")
    if max(prompt.ids) >= at.num_tokens:
        raise BadRequest(f"tokens must be ids below {at.num_tokens}", field="tokens")
    max_tokens = _max_tokens(given, len(prompt.ids), at)
    min_tokens = given.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens must be between 0 and max_tokens ({max_tokens})", field="min_tokens")
    deadline_ms = _or(given.deadline_ms, at.limits.max_deadline_ms)
    request = Request(
        rid=at.rid,
        owner=at.owner,
        prompt_ids=prompt.ids,
        sampling=_sampling(given, at),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=_or(given.n, 1),
        stop=tuple(given.stop or ()),
        ignore_eos=bool(given.ignore_eos),
        logprobs=_or(given.top_logprobs, 0) if given.logprobs else None,
        constraint=at.constraint,
        thinking=_with_room(at.thinking, max_tokens, prompt),
        finds_calls=bool(given.tools) and given.tool_choice != "none",
        is_single_call=given.parallel_tool_calls is False,
        splits_reasoning=prompt.splits_reasoning,
        starts_in_reasoning=prompt.starts_in_reasoning,
        may_speculate=_or(given.speculate, True),
        may_cache=_or(given.cache, True),
        priority=PRIORITIES[_or(given.priority, "normal")],
        deadline_at=at.arrived_at + deadline_ms / 1000,
        arrived_at=at.arrived_at,
    )
    return Resolved(request, _shown(request, deadline_ms) | _shown_form(given, request.thinking))


def _max_tokens(given: GenerationInput, prompt_len: int, at: ResolveContext) -> int:
    # context   |<------ prompt ------>|<------ room ------>|
    room = at.context - prompt_len
    if room < 1:
        message = (
            f"the prompt has {prompt_len} tokens, {1 - room} more than fit: the context is {at.context}"
            " and one token is kept for the answer"
        )
        raise EdgeqwenError(message, code="too_long")
    if given.max_tokens is None:
        return min(at.limits.default_max_tokens, room)
    if given.max_tokens > room:
        message = (
            f"max_tokens {given.max_tokens} is {given.max_tokens - room} more than the room that the prompt's"
            f" {prompt_len} tokens leave in the context of {at.context}"
        )
        raise EdgeqwenError(message, code="too_long", field="max_tokens")
    return given.max_tokens


def _with_room(thinking: Thinking | None, max_tokens: int, prompt: Prompt) -> Thinking | None:
    """With a budget that leaves room for an answer, however large a client's is: one who asks for as long a thought as
    there may be still wants to hear what comes of it.
    """
    # max_tokens |<- opening ->|<------ budget ------>|<- closing ->|<- a beginning of the answer ->|
    if thinking is None or thinking.budget is None:
        return thinking
    num_markers = len(thinking.closing) + (not prompt.starts_in_reasoning)
    num_kept = min(_ANSWER_TOKENS, max_tokens // 4)
    most = max(0, max_tokens - num_markers - num_kept)
    return replace(thinking, budget=min(thinking.budget, most))


def _sampling(given: GenerationInput, at: ResolveContext) -> SamplingParams:
    defaults = at.defaults
    return SamplingParams(
        temperature=_or(given.temperature, defaults.temperature),
        top_k=_or(given.top_k, min(defaults.top_k, at.num_tokens)),
        top_p=_or(given.top_p, defaults.top_p),
        min_p=_or(given.min_p, defaults.min_p),
        presence_penalty=_or(given.presence_penalty, 0.0),
        frequency_penalty=_or(given.frequency_penalty, 0.0),
        repetition_penalty=_or(given.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(given.logit_bias, at.limits, at.num_tokens),
        seed=_or(given.seed, at.seed & _MAX_SEED),
    )


def _or(value: Any, default: Any) -> Any:
    """`value` if it was given: 0 and false are values."""
    return default if value is None else value


def _shown(request: Request, deadline_ms: int) -> dict[str, Any]:
    sampling = request.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return {name: getattr(sampling, name) for name in names} | {
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
        "seed": sampling.seed,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "stop": list(request.stop),
        "n": request.n,
        "ignore_eos": request.ignore_eos,
        "logprobs": request.logprobs is not None,
        "top_logprobs": request.logprobs or 0,
        "deadline_ms": deadline_ms,
    }


def _shown_choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice["function"]["name"]}}


def _shown_form(given: GenerationInput, thinking: Thinking | None) -> dict[str, Any]:
    """Of the form of the answer what is short: its kind, the budget of its thought, and how tools may be called."""
    budget = given.think_budget if thinking is None else thinking.budget
    shown: dict[str, Any] = {} if budget is None else {"think_budget": budget}
    if given.response_format is not None:
        shown["response_format"] = {"type": given.response_format.get("type")}
    if given.tools:
        shown["tool_choice"] = "auto" if given.tool_choice is None else _shown_choice(given.tool_choice)
        shown["parallel_tool_calls"] = _or(given.parallel_tool_calls, True)
    return shown

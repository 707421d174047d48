"""What the daemon answers, as values with types. `frame` is always all of it, as it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from edgeqwen.errors import EdgeqwenError


class Options(TypedDict, total=False):
    """Members of `chat` and `generate`; see docs/protocol.md. What is not given is as the model and daemon have it."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    n: int
    logprobs: bool
    top_logprobs: int
    ignore_eos: bool
    deadline_ms: int
    priority: str
    wait: bool
    cache: bool
    speculate: bool
    verbose: bool
    response_format: Mapping[str, Any]


class ChatOptions(Options, total=False):
    """Those of `chat` alone."""

    session: str
    if_rev: int
    think: bool
    think_budget: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool


class GenerateOptions(Options, total=False):
    """Those of `generate` alone."""

    echo: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached` of the prompt were not computed again, `reasoning` of the completion are thought."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds since the request came: until it began, until the first token, until the end."""

    queue: int = 0
    ttft: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several answers."""

    text: str = ""
    finish: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Choice):
    """An answer. With `n` above 1 all are in `choices`, and the first one's members are here too."""

    rid: str = ""
    usage: Usage = Usage()
    ms: Timings = Timings()
    seed: int | None = None
    session: str | None = None
    rev: int | None = None
    saved: bool = True
    choices: tuple[Choice, ...] = ()
    frame: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer: text of the answer, or with `is_reasoning` of the thought before it."""

    text: str
    is_reasoning: bool = False
    choice: int = 0
    logprobs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Embeddings:
    """`vectors` in the order of the texts, each of length 1 and `dims` numbers; `num_tokens` of all texts."""

    vectors: tuple[tuple[float, ...], ...]
    dims: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of the item `number`, counted from 0: `frame` as it came, or the `error`."""

    number: int
    frame: Mapping[str, Any]
    error: EdgeqwenError | None = None

    @property
    def answer(self) -> Answer:
        """That of a `chat` or `generate`. Raises the item's error."""
        if self.error is not None:
            raise self.error
        return answer_of(self.frame)


def answer_of(frame: Mapping[str, Any]) -> Answer:
    """The answer that a final frame holds."""
    choices = tuple(_choice(each) for each in frame.get("choices", ()))
    first = choices[0] if choices else _choice(frame)
    return Answer(
        text=first.text,
        finish=frame.get("finish", first.finish),
        reasoning=first.reasoning,
        tool_calls=first.tool_calls,
        logprobs=first.logprobs,
        rid=frame.get("rid", ""),
        usage=Usage(**_known(Usage, frame.get("usage"))),
        ms=Timings(**_known(Timings, frame.get("ms"))),
        seed=frame.get("seed"),
        session=frame.get("session"),
        rev=frame.get("rev"),
        saved=frame.get("saved", True),
        choices=choices or (first,),
        frame=frame,
    )


def embeddings_of(frame: Mapping[str, Any]) -> Embeddings:
    vectors = tuple(tuple(vector) for vector in frame.get("embeddings", ()))
    return Embeddings(vectors, frame.get("dims", 0), frame.get("usage", {}).get("prompt", 0))


def _choice(members: Mapping[str, Any]) -> Choice:
    return Choice(
        text=members.get("text", ""),
        finish=members.get("finish", ""),
        reasoning=members.get("reasoning", ""),
        tool_calls=tuple(ToolCall(**_known(ToolCall, call)) for call in members.get("tool_calls", ())),
        logprobs=tuple(members.get("logprobs", ())),
    )


def _known(kind: type[Any], members: Mapping[str, Any] | None) -> dict[str, Any]:
    """Members that this client knows; a later daemon may say more."""
    return {name: value for name, value in (members or {}).items() if name in kind.__dataclass_fields__}


class Collector:
    """A streamed answer put together again: `take` frames, then `answer`."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}

    def take(self, frame: Mapping[str, Any]) -> Delta | None:
        """The piece in a frame, if there is one to show."""
        members = self._choices.setdefault(frame.get("choice", 0), {})
        for call in frame.get("tool_calls", ()):
            self._take_call(members.setdefault("tool_calls", []), call)
        logprobs = tuple(frame.get("logprobs", ()))
        members.setdefault("logprobs", []).extend(logprobs)
        for name, target in (("delta", "text"), ("reasoning", "reasoning")):
            if name in frame:
                members.setdefault(target, []).append(frame[name])
                return Delta(frame[name], target == "reasoning", frame.get("choice", 0), logprobs)
        return None

    @staticmethod
    def _take_call(calls: list[dict[str, Any]], call: Mapping[str, Any]) -> None:
        """Long arguments come in several frames: those of all entries with one id, joined."""
        if calls and calls[-1]["id"] == call["id"]:
            calls[-1]["arguments"] += call.get("arguments", "")
        else:
            calls.append(dict(call))

    def answer(self, final: Mapping[str, Any]) -> Answer:
        """`final` is the last frame; nothing that came before it is in it."""
        if "choices" not in final:
            return answer_of({**final, **self._members(0, final)})
        choices = [{**each, **self._members(each["choice"], each)} for each in final["choices"]]
        return answer_of({**final, "choices": choices})

    def _members(self, choice: int, last: Mapping[str, Any]) -> dict[str, Any]:
        found = self._choices.get(choice, {})
        calls = [*found.get("tool_calls", ()), *last.get("tool_calls", ())]
        return {
            "text": "".join(found.get("text", ())),
            "reasoning": "".join(found.get("reasoning", ())),
            "logprobs": found.get("logprobs", []),
            **({"tool_calls": calls} if calls else {}),
        }

"""What a client asks for (`SamplingParams`, `Request`) and what it gets (`Event` and its kinds)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from edgeqwen.core.constraint import Constraint
from edgeqwen.core.model import Pooling
from edgeqwen.errors import EdgeqwenError

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline", "tool_calls"]
Channel: TypeAlias = Literal["content", "reasoning"]

GREEDY_BELOW = 1e-5

PRIORITIES: Final[Mapping[str, int]] = {"low": -1, "normal": 0, "high": 1}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; every value is resolved (request over configuration over the model's file).

    `temperature` below `GREEDY_BELOW` is greedy; `top_k` 0 is off; `seed` makes a choice's draws reproducible.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model thinks: the ids of the markers around a thought. With a `budget`, a thought of so many tokens is
    closed by `closing`, the ids of what a model writes there itself (the closing marker is one of them). `may_open`: an
    answer that must look like something may begin with a thought.
    """

    opening: int
    closing_marker: int
    closing: tuple[int, ...]
    budget: int | None = None
    may_open: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, tokenised and validated: `prompt_ids` is not empty and leaves room for `max_tokens`.

    `owner` is who asked (a uid as text, or `tcp`). `splits_reasoning` and `starts_in_reasoning` say whether the thought
    is told from the content and in which of the two the first generated token stands. `deadline_at` is on the engine's
    clock (seconds). `logprobs` is None when not wanted, else the number of alternatives (0 to 20). `may_speculate`
    allows guesses. `may_cache`: known keys and values are used, and those computed are kept; `is_lasting`: on disk too.
    A request of 0 `max_tokens` is one of the engine's own, to have its prompt computed.

    `constraint` is what the answer, its thought left out, must look like. `thinking` is None for a model that has no
    markers. `finds_calls`: calls of tools in the answer are told from its text; `is_single_call`: the first ends it.

    With `pooling` nothing is generated: `texts` (not empty, none of them empty) are to be made into vectors, choice i
    is text i, there is no prompt, and `max_tokens` is 0. What was computed for a text is neither looked for nor kept: a
    text is hardly ever seen twice, and the mean needs all of its hidden states anyway.
    """

    rid: str
    owner: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    splits_reasoning: bool = False
    starts_in_reasoning: bool = False
    may_speculate: bool = True
    may_cache: bool = True
    is_lasting: bool = False
    priority: int = 0
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    finds_calls: bool = False
    is_single_call: bool = False
    pooling: Pooling | None = None
    texts: tuple[tuple[int, ...], ...] = ()
    deadline_at: float = float("inf")
    arrived_at: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt, or of all texts."""
        return len(self.prompt_ids) + sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a generated token and of the likeliest alternatives (natural log, of the unpenalised
    logits).
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens: `prompt` all of the prompt, `cached` those not computed, `completion` generated (`reasoning` of them
    thought).
    """

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from arrival: until first scheduled, until the first token, until the end."""

    queue: int
    ttft: int
    total: int


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted; `queue` requests stand before it."""

    rid: str
    queue: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of text of one choice. Whole code points only; may be empty when it carries logprobs alone."""

    choice: int
    channel: Channel
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that a choice calls; `arguments` is JSON text, an object unless the model wrote something else. `call_id`
    is its own in this answer, `index` counts the calls of the choice.
    """

    choice: int
    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Done:
    """Terminal: every choice has ended. `finishes` holds one reason a choice, `stops` the stop string that ended it."""

    rid: str
    finishes: tuple[FinishReason, ...]
    usage: Usage
    ms: Timings
    stops: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the request ended with an error."""

    rid: str
    error: EdgeqwenError = field(compare=False)


Event: TypeAlias = Started | Delta | ToolCall | Done | Failed

"""The sampler of one choice: its own generator, its own history.

Order: padding ids are cut off; end tokens are masked until `min_tokens`; logit bias; repetition, frequency and presence
penalties; then the filters of `filters` and the draw. Greedy is the largest logit, the lowest id of equals. Reported
log-probabilities are of the logits before bias and penalties, over the ids that have a text.

Draws depend on the logits, the seed and the number of tokens drawn before, nothing else: a choice gives the same tokens
whoever runs beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng  # `np.random` would be imported by the first request
from numpy.typing import NDArray

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.errors import RuntimeFailed
from edgeqwen.sampling.filters import draw, exponentials, top_ids
from edgeqwen.sampling.history import History


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; `logprob` and `top` (id, log-probability; likeliest first) only if they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of choice `choice` of `request`, one row of logits after another.

    `num_tokens` is the number of ids that have a text; `eos_token_ids` may be empty. Not safe for use by two threads.
    """

    def __init__(self, request: Request, *, choice: int, num_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        self._params = request.sampling
        self._num_tokens = num_tokens
        self._eos = np.asarray([token for token in eos_token_ids if token < num_tokens], np.int64)
        self._min_tokens = request.min_tokens
        self._logprobs = request.logprobs
        self._num_drawn = 0
        self._rng = None if self._params.is_greedy else default_rng((self._params.seed, choice))
        self._history = History(request.prompt_ids) if _has_penalties(self._params) else None
        self._bias_ids = np.asarray([token for token, _ in self._params.logit_bias], np.int64)
        self._bias = np.asarray([bias for _, bias in self._params.logit_bias], np.float32)

    def sample(self, logits: NDArray[np.float32]) -> Sampled:
        """The next token after a row of logits, float32 `[vocab_size]`, which is left as it was.

        Raises `RuntimeFailed` if the row has a NaN or no finite largest value.
        """
        raw = logits[: self._num_tokens]
        row = self._adjusted(raw)
        token = int(row.argmax())  # a NaN counts as the largest value, so one look at the winner finds it
        if not math.isfinite(row[token]):
            raise RuntimeFailed("the model gave logits that are not numbers")
        if self._rng is not None:
            token = draw(row, self._params, self._rng.random())
        self._num_drawn += 1
        if self._history is not None:
            self._history.add(token)
        if self._logprobs is None:
            return Sampled(token)
        return _with_logprobs(raw, token, self._logprobs)

    def _adjusted(self, raw: NDArray[np.float32]) -> NDArray[np.float32]:
        """`raw` itself if nothing applies, else a copy with masks, bias and penalties."""
        is_masking_eos = self._num_drawn < self._min_tokens and self._eos.size > 0
        if not is_masking_eos and not self._bias.size and self._history is None:
            return raw
        row = raw.copy()
        if self._bias.size:
            row[self._bias_ids] += self._bias
        if self._history is not None:
            self._history.penalise(row, self._params)
        if is_masking_eos:
            row[self._eos] = -np.inf
        return row


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _with_logprobs(raw: NDArray[np.float32], token: int, num_top: int) -> Sampled:
    log_total = float(raw.max()) + math.log(float(exponentials(raw).sum()))
    top = tuple((int(i), float(raw[i]) - log_total) for i in top_ids(raw, num_top)) if num_top else ()
    return Sampled(token, float(raw[token]) - log_total, top)

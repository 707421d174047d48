"""The sampler of one choice: its own generator, its own history.

Order: padding ids are cut off; logit bias; repetition, frequency and presence penalties; what the thought or the form
of the answer does not let come is masked (`phases`), and end tokens until `min_tokens`, unless nothing else may come;
then the filters of `filters` and the draw. Greedy is the largest logit, the lowest id of equals. Reported
log-probabilities are of the logits before all that, over the ids that have a text, also of tokens that could not come.

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
from edgeqwen.sampling.phases import Phases


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; `logprob` and `top` (id, log-probability; likeliest first) only if they were asked for. `is_last`:
    nothing but an end token could follow, so the answer ends here.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    is_last: bool = False


class Sampler:
    """Draws the tokens of choice `choice` of `request`, one row of logits after another.

    `num_tokens` is the number of ids that have a text; `eos_token_ids` may be empty. Not for two threads at once.
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
        self._phases = None if _is_free(request) else Phases(request, self._eos)
        self._bias_ids = np.asarray([token for token, _ in self._params.logit_bias], np.int64)
        self._bias = np.asarray([bias for _, bias in self._params.logit_bias], np.float32)

    @property
    def needs_preparation(self) -> bool:
        """There is a mask to be worked out before the next token, which `prepare` may do while the model computes."""
        return self._phases is not None and self._phases.is_masking

    def prepare(self) -> None:
        """Work out the mask of the next token. On any thread, if `sample` is not called before it has returned."""
        assert self._phases is not None
        self._phases.prepare()

    def sample(self, logits: NDArray[np.float32]) -> Sampled:
        """The next token after a row of logits, float32 `[vocab_size]`, which is left as it was.

        Raises `RuntimeFailed` if the row has a NaN or no finite largest value, or cannot be masked.
        """
        raw = logits[: self._num_tokens]
        phases = self._phases
        token = None if phases is None else phases.forced
        if token is None:
            token = self._drawn(raw)
        else:
            _check(raw.max())
        self._num_drawn += 1
        if self._history is not None:
            self._history.add(token)
        if phases is not None:
            phases.take(token)
        is_last = phases is not None and phases.is_over
        if self._logprobs is None:
            return Sampled(token, is_last=is_last)
        logprob, top = _logprobs(raw, token, self._logprobs)
        return Sampled(token, logprob, top, is_last)

    def _drawn(self, raw: NDArray[np.float32]) -> int:
        row = self._adjusted(raw)
        token = int(row.argmax())
        _check(row[token])
        if self._rng is None:
            return token
        share = self._rng.random()
        if self._phases is None or not self._phases.is_masking:
            return draw(row, self._params, share)
        # Filters look for the upper end of a vocabulary; of the few tokens that a form lets come they need not.
        ids = np.flatnonzero(row > -np.inf)
        return int(ids[draw(row[ids], self._params, share)])

    def _adjusted(self, raw: NDArray[np.float32]) -> NDArray[np.float32]:
        """`raw` itself if nothing applies, else a copy with masks, bias and penalties."""
        is_masking_eos = self._num_drawn < self._min_tokens and self._eos.size > 0
        is_masking = self._phases is not None and self._phases.is_masking
        if not is_masking_eos and not is_masking and not self._bias.size and self._history is None:
            return raw
        row = raw.copy()
        if self._bias.size:
            row[self._bias_ids] += self._bias
        if self._history is not None:
            self._history.penalise(row, self._params)
        if self._phases is not None and is_masking:
            self._phases.mask(row)
        if is_masking_eos:
            self._mask_eos(row)
        return row

    def _mask_eos(self, row: NDArray[np.float32]) -> None:
        """An answer that is complete in its form ends, however few tokens it has."""
        kept = row[self._eos]
        row[self._eos] = -np.inf
        if row.max() == -np.inf:
            row[self._eos] = kept


def _check(largest: np.float32) -> None:
    """A NaN counts as the largest value of a row, so one look at that finds it."""
    if not math.isfinite(largest):
        raise RuntimeFailed("the model gave logits that are not numbers")


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _is_free(request: Request) -> bool:
    """Whether any token may come at any time."""
    return request.constraint is None and (request.thinking is None or request.thinking.budget is None)


def _logprobs(raw: NDArray[np.float32], token: int, num_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    log_total = float(raw.max()) + math.log(float(exponentials(raw).sum()))
    top = tuple((int(i), float(raw[i]) - log_total) for i in top_ids(raw, num_top)) if num_top else ()
    return float(raw[token]) - log_total, top

"""Which tokens may be drawn, and with what probability: temperature, then top-k, top-p, min-p.

With x the logits over the temperature and p = softmax(x):

* top-k keeps the k largest x;
* top-p keeps, of what is left and renormalised, the shortest run of the most probable whose sum reaches `top_p`; the
  token that crosses the bound stays (Holtzman et al., "The Curious Case of Neural Text Degeneration");
* min-p keeps what has at least `min_p` times the largest probability (Nguyen et al., "Turning Up the Heat"), which
  needs no softmax: x >= max(x) + ln(min_p).

Equal logits rank by id, the lowest first, so that exactly k tokens stay and every machine gets one result. A full sort
of a vocabulary costs several milliseconds, a selection of its upper end a fraction of one: only as much of the upper
end is put in order as top-p needs.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.request import SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

_FIRST_RUN = 256


def top_ids(row: Floats, k: int) -> Ids:
    """Ids of the k largest values of `row` (float32 `[n]`, no NaN), largest first, equal ones by ascending id."""
    if k < row.size:
        bound = np.partition(row, row.size - k)[row.size - k]
        above = np.flatnonzero(row > bound)
        ids = np.concatenate((above, np.flatnonzero(row == bound)[: k - above.size]))
    else:
        ids = np.arange(row.size)
    ordered: Ids = ids[np.lexsort((ids, -row[ids]))]
    return ordered


def candidates(row: Floats, params: SamplingParams) -> tuple[Ids, Doubles]:
    """Ids that may be drawn and their weights (float64, not normalised, the largest is 1).

    `row` is float32 `[n]`, no NaN, its largest value finite; `params.temperature` is not greedy. The ids are ordered by
    falling weight where a filter is on, ascending otherwise.
    """
    low = _min_p_bound(row, params)
    if 0 < params.top_k < row.size:
        ids = top_ids(row, params.top_k)
        return _cut(ids, _weights(row[ids], row[ids[0]], params.temperature), row=row, low=low, top_p=params.top_p)
    if params.top_p < 1.0:
        return _nucleus(row, params, low)
    if low is not None:
        ids = np.flatnonzero(row >= low)
        return ids, _weights(row[ids], row.max(), params.temperature)
    return np.arange(row.size), _weights(row, row.max(), params.temperature)


def _min_p_bound(row: Floats, params: SamplingParams) -> np.float64 | None:
    if params.min_p <= 0.0:
        return None
    # Not a plain float: numpy would round that to float32 before comparing.
    return np.float64(row.max()) + params.temperature * math.log(params.min_p)


def _weights(values: Floats, largest: np.float32, temperature: float) -> Doubles:
    weights: Doubles = values.astype(np.float64)
    weights -= float(largest)
    weights /= temperature
    np.exp(weights, out=weights)
    return weights


def _cut(
    ids: Ids, weights: Doubles, *, row: Floats, low: np.float64 | None, top_p: float, total: float | None = None
) -> tuple[Ids, Doubles]:
    """Top-p and min-p on ids in falling order; `total` is the weight of all tokens that top-p counts."""
    keep = ids.size
    if top_p < 1.0:
        sums = np.cumsum(weights)
        bound = top_p * (float(sums[-1]) if total is None else total)
        keep = min(keep, int(np.searchsorted(sums, bound)) + 1)
    if low is not None:
        keep = min(keep, int(np.count_nonzero(row[ids] >= low)))
    return ids[:keep], weights[:keep]


def _nucleus(row: Floats, params: SamplingParams, low: np.float64 | None) -> tuple[Ids, Doubles]:
    """Top-p over the whole vocabulary: order a growing upper end until it holds enough of the probability."""
    weights = _weights(row, row.max(), params.temperature)
    total = float(weights.sum())
    k = _FIRST_RUN
    while True:
        ids = top_ids(row, k)
        run = weights[ids]
        if k >= row.size or float(run.sum()) > params.top_p * total * (1 + 1e-12):
            return _cut(ids, run, row=row, low=low, top_p=params.top_p, total=total)
        k *= 8

"""Which tokens may be drawn, and with what probability: temperature, then top-k, top-p, min-p.

With x the logits over the temperature and p = softmax(x):

* top-k keeps the k largest x;
* top-p keeps, of what is left and renormalised, the shortest run of the most probable whose sum reaches `top_p`; the
  token that crosses the bound stays (Holtzman et al., "The Curious Case of Neural Text Degeneration");
* min-p keeps what has at least `min_p` times the largest probability (Nguyen et al., "Turning Up the Heat"), which
  needs no softmax: x >= max(x) + ln(min_p).

Equal logits rank by id, the lowest first, so that exactly k tokens stay and every machine gets one result. A full sort
of a vocabulary costs several milliseconds, a selection of its upper end a fraction of one: only as much of the upper
end is put in order as top-p needs. Even the selection looks at few logits: of the largest of each of many groups, the
k-th largest is at most the k-th largest of all, so what lies below it is out.

Sums over a whole vocabulary are of exponentials in single precision, eight times faster than in double and off by 1e-7
of the sum, which is less than what the logits themselves are off by.
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
_GROUPS = 1024
_RUN = 512


def top_ids(row: Floats, k: int) -> Ids:
    """Ids of the k largest values of `row` (float32 `[n]`, no NaN), largest first, equal ones by ascending id."""
    ids = _upper_end(row, k)
    values = row[ids]
    if k < ids.size:
        bound = np.partition(values, ids.size - k)[ids.size - k]
        above = np.flatnonzero(values > bound)
        kept = np.concatenate((above, np.flatnonzero(values == bound)[: k - above.size]))
        ids, values = ids[kept], values[kept]
    ordered: Ids = ids[np.lexsort((ids, -values))]
    return ordered


def _upper_end(row: Floats, k: int) -> Ids:
    """Ids, ascending, among which are those of the k largest values and hardly more."""
    if k > _GROUPS // 2 or row.size < 8 * _GROUPS:
        return np.arange(row.size)
    size = row.size // _GROUPS * _GROUPS
    largest = row[:size].reshape(-1, _GROUPS).max(axis=0)  # the values at equal places of each run are a group
    if size < row.size:
        largest = np.append(largest, row[size:].max())
    bound = np.partition(largest, largest.size - k)[largest.size - k]
    return np.flatnonzero(row >= bound)


def exponentials(row: Floats, temperature: float = 1.0) -> Floats:
    """exp((row - max) / temperature), float32 `[n]`; `row` has no NaN and a finite largest value."""
    values: Floats = row - row.max()
    if temperature != 1.0:
        values /= np.float32(temperature)
    np.exp(values, out=values)
    return values


def draw(row: Floats, params: SamplingParams, share: float) -> int:
    """The id at which the running sum of the weights passes `share`, in [0, 1), of all; `row` as in `candidates`."""
    if not 0 < params.top_k < row.size and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _place_in_runs(exponentials(row, params.temperature), share)
    ids, weights = candidates(row, params)
    return int(ids[_place(weights, share * float(weights.sum()))])


def _place(weights: NDArray[np.floating], bound: float) -> int:
    """The first place at which the running sum is above `bound`."""
    place = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), bound, side="right"))
    if place < weights.size:
        return place
    return int(np.flatnonzero(weights)[-1])  # rounding: the bound may equal the last sum


def _place_in_runs(weights: Floats, share: float) -> int:
    """The same for a share of a whole vocabulary, without a running sum over all of it."""
    sums = np.add.reduceat(weights, np.arange(0, weights.size, _RUN), dtype=np.float64)
    bound = share * float(sums.sum())
    run = _place(sums, bound)
    start = run * _RUN
    return start + _place(weights[start : start + _RUN], bound - float(sums[:run].sum()))


def candidates(row: Floats, params: SamplingParams) -> tuple[Ids, Doubles]:
    """Ids that the filters of `params`, of which there is one at least, leave, and their weights (float64, not
    normalised, the largest is 1).

    `row` is float32 `[n]`, no NaN, its largest value finite; `params.temperature` is not greedy. The ids are ordered by
    falling weight, or ascending if there is nothing but min-p.
    """
    low = _min_p_bound(row, params)
    if 0 < params.top_k < row.size:
        ids = top_ids(row, params.top_k)
        return _cut(ids, _weights(row[ids], row[ids[0]], params.temperature), row=row, low=low, top_p=params.top_p)
    if params.top_p < 1.0:
        return _nucleus(row, params, low)
    ids = np.flatnonzero(row >= low) if low is not None else np.arange(row.size)
    return ids, _weights(row[ids], row.max(), params.temperature)


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
    total = float(exponentials(row, params.temperature).sum())
    k = _FIRST_RUN
    while True:
        ids = top_ids(row, k)
        run = _weights(row[ids], row[ids[0]], params.temperature)
        if k >= row.size or float(run.sum()) > params.top_p * total * (1 + 1e-12):
            return _cut(ids, run, row=row, low=low, top_p=params.top_p, total=total)
        k *= 8

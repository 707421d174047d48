"""Speeds in turns: in each round, at each point, for each peer first ours, then the peer's forms.

So the two sides of every ratio were measured within a minute or two of each other, and a machine that slows down for a
while slows both. The figure reported is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from benchmarks.peers.contenders import Contender
from benchmarks.peers.environments import Unavailable, say
from benchmarks.peers.points import Metric, Point, Row

CONFIGURATION = ("quant", "weight_form", "kv", "threads", "prefill_threads", "cpus")
"""What `edgeqwen bench` says of how it ran."""
CLOSE = 0.9
"""A setting that reached this share of the best one in the first round stays in the race."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: `turn` is the round and the peer with which it was measured."""

    turn: tuple[int, str]
    point: tuple[int, int]
    contender: Contender
    setting: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell of a table. Medians in tokens a second; `ratio` is ours over theirs."""

    row: Row
    ours: str
    peer: str
    setting: str
    ours_tok_s: float
    peer_tok_s: float
    ratio: float
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Own:
    """Our own median in a row, over all runs."""

    row: Row
    quant: str
    tok_s: float


@dataclass(slots=True)
class Speeds:
    """All runs, and what could not be measured with the reason, by label and point."""

    samples: list[Sample] = field(default_factory=list)
    failures: dict[tuple[str, str, tuple[int, int]], str] = field(default_factory=dict)


def measure(
    ours: Sequence[Contender], theirs: Sequence[Contender], points: Sequence[Point], *, pairs: int, num_threads: int
) -> Iterator[Speeds]:
    """Run everything `pairs` times in turns; after each round all that was found so far. Without peers ours alone."""
    speeds = Speeds()
    groups = [(name, list(forms)) for name, forms in groupby(theirs, key=lambda each: each.engine)] or [("", [])]
    for number in range(pairs):
        for point in points:
            for name, forms in groups:
                say(f"round {number + 1} of {pairs}: {point.prompt} tokens, {point.streams} streams, {name or 'alone'}")
                for contender in (*ours, *forms):
                    _turn(speeds, contender, point, turn=(number, name), num_threads=num_threads)
        yield speeds


def _turn(speeds: Speeds, contender: Contender, point: Point, *, turn: tuple[int, str], num_threads: int) -> None:
    for setting in _in_the_race(speeds, contender, point):
        key = (contender.label, setting, (point.prompt, point.streams))
        if key in speeds.failures:
            continue
        try:
            values = contender.measure(point, setting, num_threads=num_threads)
        except Unavailable as error:
            speeds.failures[key] = str(error)
            say(f"{contender.label} ({setting}): {error}")
            continue
        speeds.samples.append(Sample(turn, (point.prompt, point.streams), contender, setting, values))


def _in_the_race(speeds: Speeds, contender: Contender, point: Point) -> Iterator[str]:
    """All settings in the first round; then those that were best, or close to it, in a row of this point."""
    first: dict[str, dict[str, Any]] = {}
    for sample in speeds.samples:
        if sample.contender == contender and sample.point == (point.prompt, point.streams):
            first.setdefault(sample.setting, sample.values)
    for setting in contender.settings:
        if len(first) < len(contender.settings) or any(
            first[setting][row.metric] >= CLOSE * max(values[row.metric] for values in first.values())
            for row in point.rows
        ):
            yield setting


def medians(speeds: Speeds, label: str, row: Row) -> dict[str, float]:
    """Median speed of a contender in a row, by setting."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in speeds.samples:
        if sample.contender.label == label and sample.point == row.point:
            found[sample.setting].append(sample.values[row.metric])
    return {setting: statistics.median(values) for setting, values in found.items()}


def own_medians(speeds: Speeds, ours: Contender, rows: Sequence[Row]) -> list[Own]:
    """What a package of ours reached, row by row."""
    found = [(row, medians(speeds, ours.label, row)) for row in rows]
    return [Own(row, ours.form, values[ours.settings[0]]) for row, values in found if values]


def configuration(speeds: Speeds, ours: Contender) -> dict[str, list[Any]]:
    """What a package of ours says that it ran with, over all rows: one value each if there was one configuration."""
    own = [sample.values for sample in speeds.samples if sample.contender == ours]
    return {
        name: sorted({values[name] for values in own})
        for name in CONFIGURATION
        if own and all(name in values for values in own)
    }


def compare(speeds: Speeds, ours: Contender, peer: Contender, row: Row) -> Comparison | None:
    """The cell of this pair, in the peer's better setting; None if either side has no figure."""
    settings = medians(speeds, peer.label, row)
    if not settings:
        return None
    setting = max(settings, key=lambda each: settings[each])
    mine = _by_turn(speeds, ours, row, ours.settings[0])
    other = _by_turn(speeds, peer, row, setting)
    turns = [turn for turn in other if turn in mine]
    if not turns:
        return None
    ratios = tuple(mine[turn] / other[turn] for turn in turns)
    return Comparison(
        row=row,
        ours=ours.form,
        peer=peer.label,
        setting=setting,
        ours_tok_s=statistics.median(mine[turn] for turn in turns),
        peer_tok_s=settings[setting],
        ratio=statistics.median(ratios),
        ratios=ratios,
    )


def _by_turn(speeds: Speeds, contender: Contender, row: Row, setting: str) -> dict[tuple[int, str], float]:
    metric: Metric = row.metric
    return {
        sample.turn: sample.values[metric]
        for sample in speeds.samples
        if sample.contender == contender and sample.point == row.point and sample.setting == setting
    }

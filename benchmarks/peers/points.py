"""What is measured: points (one process each) and the rows of the tables that they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Metric = Literal["prefill_tok_s", "decode_tok_s"]

PREFILL: Final = (128, 256, 512, 1024, 2048)
DECODE: Final = (128, 1024, 3072)
STREAMS: Final = (4, 8)
STREAMS_PROMPT: Final = 128
LONG: Final = 2048
"""From this prompt length on one counted run is enough: it takes long, and noise averages out within it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a point and which of its figures."""

    label: str
    metric: Metric
    prompt: int
    streams: int = 1

    @property
    def point(self) -> tuple[int, int]:
        return self.prompt, self.streams


@dataclass(frozen=True, slots=True)
class Point:
    """What one process measures; `rows` are the lines that need it."""

    prompt: int
    decode: int
    streams: int
    rows: tuple[Row, ...]

    @property
    def options(self) -> list[str]:
        """For edgeqwen and for runners alike."""
        return [f"--prompt={self.prompt}", f"--decode={self.decode}", f"--streams={self.streams}"]

    @property
    def num_repeats(self) -> int:
        return 1 if self.prompt >= LONG else 2


def rows_of(kinds: Sequence[str], *, longest: int) -> list[Row]:
    """The lines of these kinds (`prefill`, `decode`, `streams`) with prompts up to `longest` tokens."""
    rows: list[Row] = []
    if "prefill" in kinds:
        rows += [Row(f"prefill {length}", "prefill_tok_s", length) for length in PREFILL if length <= longest]
    if "decode" in kinds:
        rows += [Row(f"decode at {length}", "decode_tok_s", length) for length in DECODE if length <= longest]
    if "streams" in kinds:
        prompt = min(STREAMS_PROMPT, longest)
        rows += [Row(f"{count} streams", "decode_tok_s", prompt, count) for count in STREAMS]
    return rows


def points_of(rows: Sequence[Row], *, most_decoded: int = 64) -> list[Point]:
    """The processes that give these rows: as few as possible, decoding only where a row asks for it."""
    points = []
    for prompt, streams in dict.fromkeys(row.point for row in rows):
        here = tuple(row for row in rows if row.point == (prompt, streams))
        is_decoding = any(row.metric == "decode_tok_s" for row in here)
        num_decoded = 1 if not is_decoding else 64 if prompt <= 128 and streams == 1 else 32
        points.append(Point(prompt, min(num_decoded, most_decoded), streams, here))
    return points

"""The results as one JSON object and as tables, for a terminal or in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.quality import Quality
from benchmarks.peers.rest import Rest
from benchmarks.peers.speed import Comparison, Own
from edgeqwen import __version__

Cells = list[list[str]]
MISSING = "–"
MB = 1e6


@dataclass(slots=True)
class Report:
    """All that one run found; `configuration` is what ours ran with, `unavailable` what could not be had and why."""

    machine: dict[str, Any]
    configuration: dict[str, Any]
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    own: list[Own] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    rest: dict[str, Rest] = field(default_factory=dict)
    quality: dict[str, Quality] = field(default_factory=dict)
    unavailable: list[dict[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"benchmark": "peers", "edgeqwen": __version__, **asdict(self)}

    def kl(self, label: str) -> float | None:
        """Mean KL divergence of the form with this label; of forms that differ in speed alone, of that they share."""
        found = self.quality.get(label) or self.quality.get(label.removesuffix(" last"))
        return found.kl_mean if found else None


def machine() -> dict[str, Any]:
    """The processor and when this was measured."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": facts.get("model name", platform.machine()),
        "flags": sorted(each for each in facts.get("flags", facts.get("Features", "")).split() if _says(each)),
        "clock_mhz": facts.get("cpu MHz"),
        "cores": sum(line.startswith("processor") for line in lines),
        "kernel": platform.release(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _says(flag: str) -> bool:
    return flag.startswith(("avx", "amx", "fma", "f16c", "sve", "asimd", "i8mm", "bf16"))


def speed_tables(report: Report) -> dict[str, Cells]:
    """For each package of ours: rows of our speed and of ratios, one column for each form of a peer."""
    tables: dict[str, Cells] = {}
    labels = list(dict.fromkeys(each.peer for each in report.comparisons))
    for quant in dict.fromkeys(each.quant for each in report.own):
        cells = {(each.row.label, each.peer): each for each in report.comparisons if each.ours == quant}
        kl = [_number(report.kl(label), 4) for label in (f"edgeqwen {quant}", *labels)]
        table = [["ours over theirs", "tok/s", *labels], ["KL mean", *kl]]
        for own in report.own:
            if own.quant == quant:
                ratios = (_ratio(cells.get((own.row.label, label))) for label in labels)
                table.append([own.row.label, f"{own.tok_s:.1f}", *ratios])
        tables[quant] = table
    return tables


def peer_table(report: Report) -> Cells:
    """Tokens a second of the peers themselves, with the better setting where there was a choice."""
    found: dict[tuple[str, str], Comparison] = {(each.row.label, each.peer): each for each in report.comparisons}
    labels = list(dict.fromkeys(each.peer for each in report.comparisons))
    rows = list(dict.fromkeys(each.row.label for each in report.comparisons))
    return [["tok/s", *labels], *([row, *(_speed(found.get((row, label))) for label in labels)] for row in rows)]


def rest_table(rest: Mapping[str, Rest]) -> Cells:
    """Start, memory and idling."""
    head = ["", "start to ready, s", "memory at ready, MB", "of it private, MB", "at most, MB", "idle, % of a core"]
    rows = [
        [label, f"{one.start_s:.2f}", *(f"{size / MB:.0f}" for size in _sizes(one)), f"{one.idle_percent:.3f}"]
        for label, one in rest.items()
    ]
    return [head, *rows]


def _sizes(one: Rest) -> tuple[int, int, int]:
    return one.ready_bytes, one.ready_private_bytes, one.peak_bytes


def quality_table(quality: Mapping[str, Quality]) -> Cells:
    """Distances from the reference; English and code together, Chinese apart."""
    head = ["", "MB", "KL mean", "KL p99", "top-1", "perplexity", "KL mean, Chinese"]
    rows = []
    for label, one in quality.items():
        counted = one.scores["counted"]
        figures = [_number(counted.kl_mean, 4), _number(counted.kl_p99, 3), _number(counted.top1_agreement, 3)]
        chinese = _number(one.scores["chinese"].kl_mean, 4)
        rows.append([label, f"{one.num_bytes / MB:.0f}", *figures, f"{counted.perplexity:.2f}", chinese])
    return [head, *rows]


def tables(report: Report) -> dict[str, Cells]:
    """Everything that was measured, by title."""
    found = {f"edgeqwen {quant}": table for quant, table in speed_tables(report).items()}
    if report.comparisons:
        found["The peers themselves"] = peer_table(report)
    if report.rest:
        found["Start, memory, idle"] = rest_table(report.rest)
    if report.quality:
        found["Quality"] = quality_table(report.quality)
    return found


def as_text(table: Cells) -> str:
    """Columns lined up."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())
    return "\n".join(lines)


def as_markdown(table: Cells) -> str:
    head, *rows = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([head, f"|{' --- |' * len(table[0])}", *rows])


def render(report: Report, *, is_markdown: bool) -> str:
    """All tables below their titles, and what could not be had."""
    parts = [*_configurations(report), ""]
    for title, table in tables(report).items():
        parts += [f"## {title}\n", as_markdown(table)] if is_markdown else [title, as_text(table)]
        parts.append("")
    if report.unavailable:
        title = "Not to be had"
        parts += [f"## {title}\n" if is_markdown else title]
        parts += [f"* {each['what']}: {each['reason']}" for each in report.unavailable]
    return "\n".join(parts)


def _configurations(report: Report) -> list[str]:
    """What each package of ours ran with, a line each."""
    packages: dict[str, dict[str, list[Any]]] = report.configuration.get("packages", {})
    lines = []
    for quant, facts in packages.items():
        words = [f"{name} {'/'.join(map(str, values))}" for name, values in facts.items()]
        lines.append(f"edgeqwen {quant}: {', '.join(words)}")
    return lines


def _ratio(cell: Comparison | None) -> str:
    return f"{cell.ratio:.2f}" if cell else MISSING


def _speed(cell: Comparison | None) -> str:
    if not cell:
        return MISSING
    return f"{cell.peer_tok_s:.1f}" if cell.setting == "default" else f"{cell.peer_tok_s:.1f} ({cell.setting})"


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"

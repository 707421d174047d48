"""Speeds as a picture: one panel for each row of the tables, one bar for each engine. Plain SVG, written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from benchmarks.peers.report import Report

COLUMNS = 2
PANEL_WIDTH = 460
LABEL_WIDTH = 190
VALUE_WIDTH = 60
BAR, GAP, TITLE, MARGIN = 14, 4, 26, 16
OURS, THEIRS = "#0b6e4f", "#9aa5b1"
STYLE = "text{font-family:system-ui,sans-serif;font-size:11px;fill:#1f2933}.title{font-size:13px;font-weight:600}"


@dataclass(frozen=True, slots=True)
class Bar:
    """One engine's tokens a second."""

    label: str
    value: float
    is_ours: bool


def panels(report: Report) -> dict[str, list[Bar]]:
    """Bars by row: ours first, then the peers, each in its better setting."""
    found: dict[str, dict[str, Bar]] = {}
    for own in report.own:
        label = f"edgeqwen {own.quant}"
        found.setdefault(own.row.label, {})[label] = Bar(label, own.tok_s, is_ours=True)
    for each in report.comparisons:
        found[each.row.label][each.peer] = Bar(each.peer, each.peer_tok_s, is_ours=False)
    return {row: list(bars.values()) for row, bars in found.items()}


def svg(report: Report) -> str:
    """The whole picture; an empty one if nothing was measured."""
    found = panels(report)
    height = max((_height(bars) for bars in found.values()), default=0)
    num_lines = -(-len(found) // COLUMNS)
    size = (COLUMNS * (PANEL_WIDTH + MARGIN) + MARGIN, num_lines * (height + MARGIN) + MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    for index, (row, bars) in enumerate(found.items()):
        line, column = divmod(index, COLUMNS)
        x, y = MARGIN + column * (PANEL_WIDTH + MARGIN), MARGIN + line * (height + MARGIN)
        parts.append(f'<g transform="translate({x} {y})">{_panel(row, bars)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _height(bars: list[Bar]) -> int:
    return TITLE + len(bars) * (BAR + GAP)


def _panel(row: str, bars: list[Bar]) -> str:
    most = max(bar.value for bar in bars)
    parts = [f'<text class="title" y="13">{escape(row)}, tokens/s</text>']
    for index, bar in enumerate(bars):
        y = TITLE + index * (BAR + GAP)
        width = bar.value / most * (PANEL_WIDTH - LABEL_WIDTH - VALUE_WIDTH)
        colour = OURS if bar.is_ours else THEIRS
        parts += [
            f'<text x="{LABEL_WIDTH - 6}" y="{y + 11}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{LABEL_WIDTH + width + 5:.1f}" y="{y + 11}">{bar.value:.1f}</text>',
        ]
    return "".join(parts)

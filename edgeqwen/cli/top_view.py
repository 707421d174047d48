"""What `edgeqwen top` shows, as lines of text: a function of what the daemon says, and of the terminal's size."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

STATES: Final = {
    "ready": "ready",
    "loading": "loading the model",
    "asleep": "asleep: the next request wakes the model",
    "draining": "shutting down",
    "failed": "failed: the log says why",
}
COLUMNS: Final[tuple[tuple[str, str, int], ...]] = (
    ("RID", "rid", 9),
    ("OWNER", "owner", 12),
    ("KIND", "kind", 10),
    ("STATE", "state", 8),
    ("PROMPT", "prompt", 7),
    ("CACHED", "cached", 7),
    ("TOKENS", "tokens", 7),
    ("TOK/S", "tok_s", 7),
    ("AGE", "age_s", 7),
)
NUMBERS: Final = frozenset({"prompt", "cached", "tokens", "tok_s", "age_s"})


def size_text(num_bytes: int) -> str:
    """`84 MB`."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.0f} MB"


def time_text(seconds: float) -> str:
    """`3d 04:05` or `4:05:06`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}" if days else f"{hour}:{minute:02}:{second:02}"


def fit(text: str, width: int) -> tuple[str, int]:
    """As much of `text` as fits into `width` columns, without what would move the cursor, and the columns it takes."""
    shown, used = "", 0
    for given in text:
        char = "?" if unicodedata.category(given).startswith("C") else given
        columns = 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used + columns > width:
            break
        shown += char
        used += columns
    return shown, used


def cut(text: str, width: int) -> str:
    """As much of `text` as fits into `width` columns."""
    return fit(text, width)[0]


def summary(health: Mapping[str, Any], stats: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The lines above the requests."""
    state = STATES.get(health["state"], health["state"])
    if "progress" in health:
        state += f" ({health['progress']:.0%})"
    kv, tok_s, totals = stats["kv"], stats["tok_s"], stats["totals"]
    known = kv.get("cached", 0)
    head = f"edgeqwen  {facts.get('model', '')} {facts.get('quant', '')}  {state}  up {time_text(stats['uptime_s'])}"
    queued = f"{stats['queued']} queued" + (f" ({stats['waiting']} of everybody)" if stats["scope"] == "own" else "")
    waiting = f"{stats['running']} running, {queued}, {stats['slots']} slots"
    requests = f"requests  {waiting}  |  {totals['requests']} in all, {totals['errors']} failed"
    speeds = f"prompts {tok_s['prefill']:.0f}, answers {tok_s['decode']:.1f} tokens/s"
    speed = f"speed     {speeds}  |  {totals['tokens']} tokens generated"
    cache = f"cache     {size_text(stats['kv_bytes'])} of {size_text(kv.get('budget_bytes', 0))} in memory"
    if "disk_bytes" in kv:
        cache += f", {size_text(kv['disk_bytes'])} on disk"
    if "computed" in kv and known + kv["computed"]:
        cache += f"  |  {known / (known + kv['computed']):.0%} of prompt tokens were cached"
    memory = f"memory    {size_text(stats['rss_bytes'])}  |  {stats['sessions']} sessions"
    if "conns" in stats:
        memory += f", {stats['conns']} connections"
    return [head, requests, speed, cache, memory]


def table(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """A head and a line for each request."""
    columns = [each for each in COLUMNS if each[1] != "owner" or any("owner" in request for request in requests)]

    def line(values: Mapping[str, str]) -> str:
        cells = []
        for _, key, width in columns:
            text, used = fit(values[key], width)
            space = " " * (width - used)
            cells.append(space + text if key in NUMBERS else text + space)
        return " ".join(cells).rstrip()

    head = {key: name for name, key, _ in columns}
    return [line(head), *(line({key: str(request.get(key, "")) for _, key, _ in columns}) for request in requests)]


def screen(
    health: Mapping[str, Any], stats: Mapping[str, Any], facts: Mapping[str, Any], *, width: int, height: int
) -> list[str]:
    """At most `height` lines of at most `width` columns."""
    lines = [*summary(health, stats, facts), "", *table(stats["requests"])]
    if len(lines) > height:
        hidden = len(lines) - height + 1
        lines = [*lines[: height - 1], f"and {hidden} more"]
    return [cut(line, width) for line in lines]


def no_answer(why: str, *, width: int, height: int) -> list[str]:
    """The same while nobody answers."""
    return [cut(line, width) for line in (f"edgeqwen top: {why}", "", "trying again; q ends it")][:height]

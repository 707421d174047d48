"""One thing that was found, and how sizes are written in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`topic` names it to scripts. An error keeps the daemon from serving and has the exit code that `serve` would end
    with; a warning costs speed or memory; a note is worth knowing. `advice` says what to do.
    """

    level: Level
    topic: str
    text: str
    advice: str
    exit_code: int = 0

    def __post_init__(self) -> None:
        assert (self.level == "error") == (self.exit_code != 0), self


def size_text(num_bytes: float) -> str:
    """`1.9 GB`, `640 MB`."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 999.5e6 else f"{num_bytes / 1e6:.0f} MB"

"""How fast each runtime was found to be on this machine: written by the examination, read when `auto` is to choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from edgeqwen.core.state import write_whole

PROMPT: Final = 500
ANSWER: Final = 200
"""Tokens of the request by which runtimes are compared."""


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens a second, of as many layers as were timed."""

    prefill_tok_s: float
    decode_tok_s: float

    @property
    def request_s(self) -> float:
        """Seconds of a request of `PROMPT` new tokens and `ANSWER` tokens; the less, the better."""
        return PROMPT / self.prefill_tok_s + ANSWER / self.decode_tok_s


def speeds_path(folder: Path, machine: str) -> Path:
    """Where they are kept; `machine` is the fingerprint of what they are of."""
    return folder / f"runtimes-{machine}.json"


def read_speeds(path: Path) -> Mapping[str, Speed]:
    """By name of the runtime; empty if nothing was timed, or the file cannot be used."""
    try:
        speeds = msgspec.json.decode(path.read_bytes(), type=dict[str, Speed])
    except (OSError, msgspec.DecodeError):
        return {}
    is_sound = all(speed.prefill_tok_s > 0 and speed.decode_tok_s > 0 for speed in speeds.values())
    return speeds if is_sound else {}


def write_speeds(path: Path, speeds: Mapping[str, Speed]) -> None:
    """Keep them, whole or not at all; raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(dict(speeds)) + b"\n")

"""What depends on the machine, measured once: what a step costs by its number of rows, in each graph.

From a number of rows on the prefill graph is the faster one; where that is differs between processors by a factor of
ten (vector and matrix units), so it is timed when a package is first loaded on a machine, and kept in the state
directory under the machine's fingerprint and the package's digest. A file that cannot be read, or is of something else,
is measured anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from edgeqwen.core.model import KVType, Manifest, Stage
from edgeqwen.core.state import write_whole
from edgeqwen.core.step import Chunk

ROWS: Final = (1, 2, 4, 8, 12, 16, 24, 32)
CONTEXT: Final = 64  # tokens in the cache while a step is timed
REPEATS: Final = 2
REMEASURES: Final = 2
FALL: Final = 0.75
VERSION: Final = 2
NEVER: Final = 1 << 30
STEPS_MEASURED: Final = 40  # about


class MachineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`decode_s` and `prefill_s`: (rows, seconds) of a step in each graph; `prefill_s` is empty if there is none."""

    decode_s: tuple[tuple[int, float], ...]
    prefill_s: tuple[tuple[int, float], ...] = ()
    version: int = VERSION

    @property
    def prefill_rows(self) -> int:
        """The least number of rows from which on the prefill graph is never slower, as far as it was timed."""
        best = NEVER
        decode = dict(self.decode_s)
        for rows, prefill_s in reversed(self.prefill_s):
            if rows in decode and prefill_s > decode[rows]:
                break
            best = rows
        return best

    @property
    def row_costs(self) -> tuple[tuple[int, float], ...]:
        """(rows, seconds) of a step in whichever graph takes it."""
        prefill = {rows: took for rows, took in self.prefill_s if rows >= self.prefill_rows}
        return tuple(sorted({**dict(self.decode_s), **prefill}.items()))


StepTimer = Callable[[Stage, Chunk], float]
"""Runs a chunk in slot 0 through the graph of a stage; returns the seconds it took."""


def measure(time_step: StepTimer, *, has_prefill: bool, capacity: int) -> MachineProfile:
    """Time steps of one sequence, each the best of `REPEATS` after one that is not counted.

    More rows never take less: what says so was timed while the machine had other work. It is timed again, up to
    `REMEASURES` times; what then still takes longer than more rows is taken to cost what they do, since other work only
    ever adds.
    """
    context = min(CONTEXT, max(0, capacity - max(ROWS)))
    if context:
        time_step("prefill" if has_prefill else "decode", Chunk(0, 0, (0,) * context, 0))

    def timed(stage: Stage, rows: int) -> float:
        chunk = Chunk(0, context, (0,) * rows)
        return min([time_step(stage, chunk) for _ in range(1 + REPEATS)][1:])

    def series(stage: Stage) -> tuple[tuple[int, float], ...]:
        took = {rows: timed(stage, rows) for rows in ROWS if context + rows <= capacity}
        for _ in range(REMEASURES):
            for rows in out_of_order(took):
                took[rows] = min(took[rows], timed(stage, rows))
        from_the_widest = itertools.accumulate(reversed(took.values()), min)
        return tuple(zip(took, reversed([*from_the_widest]), strict=True))

    return MachineProfile(series("decode"), series("prefill") if has_prefill else ())


def out_of_order(took: Mapping[int, float]) -> tuple[int, ...]:
    """Numbers of rows (those of `took` rise) that cannot both be right: each that takes less than `FALL` of what fewer
    rows take, and those fewer ones.
    """
    pairs = [(less, more) for less, more in itertools.combinations(took, 2) if took[more] < FALL * took[less]]
    return tuple(sorted({rows for pair in pairs for rows in pair}))


def kept_profile(
    path: Path,
    time_step: StepTimer,
    *,
    has_prefill: bool,
    capacity: int,
    progress: Callable[[float], None],
) -> MachineProfile:
    """The profile at `path`, measured and kept there if there is none. That takes a minute on a slow machine, so each
    step is told as progress, between 0.9 and 1.
    """
    profile = read_profile(path)
    if profile is not None:
        return profile
    fractions = (0.9 + 0.1 * number / (number + STEPS_MEASURED) for number in itertools.count(1))

    def told(stage: Stage, chunk: Chunk) -> float:
        progress(next(fractions))
        return time_step(stage, chunk)

    profile = measure(told, has_prefill=has_prefill, capacity=capacity)
    write_profile(path, profile)
    return profile


def profile_path(folder: Path, fingerprint: str, manifest: Manifest, kv_type: KVType) -> Path:
    """Where the profile of a package on a machine is kept."""
    digests = "".join(sorted(manifest.digests.values()))
    package = hashlib.sha256(digests.encode()).hexdigest()[:16]
    return folder / f"{fingerprint}-{package}-{kv_type}.json"


def read_profile(path: Path) -> MachineProfile | None:
    """A kept profile; None if there is none or it cannot be used."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=MachineProfile)
    except (OSError, msgspec.DecodeError):
        return None
    is_sound = profile.decode_s and all(rows > 0 and took > 0 for rows, took in profile.decode_s + profile.prefill_s)
    return profile if is_sound and profile.version == VERSION else None


def write_profile(path: Path, profile: MachineProfile) -> None:
    """Keep a profile, whole or not at all; a folder that cannot be written is no error."""
    with contextlib.suppress(OSError):
        write_whole(path, msgspec.json.encode(profile) + b"\n")

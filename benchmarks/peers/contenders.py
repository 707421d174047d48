"""Who runs: a package of ours or a form of a peer, each as the commands that measure it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import Form
from benchmarks.peers.environments import Environment, run_json
from benchmarks.peers.points import Point

OURS = "edgeqwen"


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine with one form of the model."""

    engine: str
    form: str
    path: Path
    settings: tuple[str, ...] = ("default",)
    environment: Environment | None = None
    options: tuple[str, ...] = field(default=())
    """Flags that `edgeqwen bench`, `eval` and `serve` share: one configuration for all rows."""

    @property
    def label(self) -> str:
        return f"{self.engine} {self.form}"

    def measure(self, point: Point, setting: str, *, num_threads: int) -> dict[str, Any]:
        """Speeds at a point; raises `Unavailable`."""
        shared = [*point.options, f"--threads={num_threads}"]
        if self.environment is None:
            command = [sys.executable, "-m", "edgeqwen", "bench", str(self.path), "--json"]
            return run_json([*command, *shared, *self.options])
        extra = [f"--setting={setting}", f"--repeats={point.num_repeats}"]
        return run_json(self.environment.command("bench", str(self.path), *shared, *extra))


def ours(quant: str, path: Path, options: tuple[str, ...] = ()) -> Contender:
    return Contender(OURS, quant, path, options=options)


def theirs(environment: Environment, form: Form, path: Path) -> Contender:
    return Contender(environment.peer.name, form.name, path, form.settings, environment)

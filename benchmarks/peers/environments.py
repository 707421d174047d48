"""Each peer's own virtual environment: made once, checked by an import; commands run in it with their output kept.

What cannot be had (a package that does not install, a program that fails) is `Unavailable` with the reason, for the
report to name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import Peer

CHECKOUT = Path(__file__).resolve().parents[2]
HANG_GUARD_S = 3600.0
LLAMA_FLAGS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx_vnni": "AVX_VNNI",
}
"""Flags of /proc/cpuinfo and llama.cpp's options for them. AMX is left out: its path crashed where this was tried."""


class Unavailable(Exception):
    """A peer, a form of a model or a measurement that cannot be had; says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer with the interpreter that can import it."""

    peer: Peer
    python: Path

    def command(self, *arguments: str) -> list[str]:
        """The peer's runner with these arguments, to be run in the checkout."""
        return [str(self.python), "-m", f"benchmarks.peers.runners.{self.peer.runner}", *arguments]

    def versions(self) -> dict[str, str]:
        """Installed versions of what the peer is made of."""
        names = [each.partition("==")[0].partition("[")[0] for each in self.peer.requirements]
        code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        versions: dict[str, str] = json.loads(run([str(self.python), "-c", code, *names]))
        if self.peer.details:
            code = f"import {self.peer.import_name}; print({self.peer.details})"
            versions["built"] = run([str(self.python), "-c", code]).strip()
        return versions


def prepare(peer: Peer, cache: Path, given: Path | None = None) -> Environment:
    """The environment at `cache/NAME`, made if it is not there, or the interpreter `given`; raises `Unavailable`."""
    environment = Environment(peer, given or cache / peer.name / "bin" / "python")
    if given is None and not (cache / peer.name / ".ready").exists():
        _install(peer, cache / peer.name)
    run([str(environment.python), "-c", f"import {peer.import_name}"])
    return environment


def _install(peer: Peer, folder: Path) -> None:
    began = time.monotonic()
    say(f"setting up {peer.name} in {folder}")
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not Path(python).exists():
        run([sys.executable, "-m", "venv", str(folder)])
    fresh = ["--no-cache-dir"] if peer.is_compiled else []
    run([*pip, "install", *fresh, *peer.requirements], environ={"CMAKE_ARGS": " ".join(llama_options())})
    if peer.unwanted:
        run([*pip, "uninstall", "--yes", *peer.unwanted])
    (folder / ".ready").touch()
    say(f"{peer.name} took {time.monotonic() - began:.0f} s")


def llama_options() -> list[str]:
    """What llama.cpp is built with on this machine."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for flag, name in LLAMA_FLAGS.items() if flag in flags)]


def run(command: Sequence[str], *, environ: Mapping[str, str] | None = None) -> str:
    """Standard output of a program that must succeed; raises `Unavailable` with its last words."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_GUARD_S,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environ or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{Path(command[0]).name}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{_short(command)} ended with {ending(done.returncode)}: {last_words(done.stderr)}")
    return done.stdout


def run_json(command: Sequence[str]) -> dict[str, Any]:
    """The last line of a program's standard output, a JSON object."""
    lines = run(command).splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise Unavailable(f"{_short(command)} said nothing that can be read") from error
    return answer


def ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def last_words(text: str) -> str:
    """The last line that says something, cut short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def say(text: str) -> None:
    """Progress, beside the results on standard output."""
    print(f"# {text}", file=sys.stderr, flush=True)


def _short(command: Sequence[str]) -> str:
    return " ".join(Path(each).name for each in command[:5])

"""A daemon that is started, looked at, killed and started again over one folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from edgeqwen.core.package import open_package
from tests.daemons import start_command, write_text_model
from tests.processes import status
from tests.soak.line import Ended, Line

GUARD_S: Final = 120.0
POLL_S: Final = 0.02
SCRIPTED_BYTES: Final = 1024
"""Bytes of cache that a token of the scripted model is said to take."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a daemon serves. `token_bytes` of cache are what one token takes; a `word` is about so many tokens."""

    name: str
    flags: tuple[str, ...]
    token_bytes: int
    word_tokens: float

    def memory_mb(self, num_tokens: int) -> int:
        """A budget for so many tokens."""
        return max(1, -(-num_tokens * self.token_bytes // (1 << 20)))


def scripted_model(folder: Path, **script: Any) -> Model:
    """A model whose next token is a function of all tokens before it, quick to start and to answer."""
    given = {"kv_bytes_per_token": SCRIPTED_BYTES, "records": False, **script}
    flags = ("--model", str(write_text_model(folder)), "--runtime", "fake:" + json.dumps(given))
    return Model("scripted", flags, SCRIPTED_BYTES, 6.0)


def package_model(path: Path, kv_type: str) -> Model:
    """A package over one of its types of cache."""
    spec = open_package(path).manifest.spec
    flags = ("--model", str(path), "--kv", kv_type)
    return Model(f"{path.name} {kv_type}", flags, spec.kv_floats_per_token * (4 if kv_type == "fp32" else 1), 1.5)


class Service:
    """`settings` are keys of the configuration, such as `kv_memory_mb`. State is kept in `folder`."""

    def __init__(self, folder: Path, model: Model, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.state = folder / "state"
        self.socket_path = folder / "s"
        self._model = model
        self._environ = {f"EDGEQWEN_{key.upper()}": str(value) for key, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        """What the daemon that was started last has logged."""
        return (self.folder / "log").read_text(encoding="utf-8")

    def start(self) -> None:
        """Begin; `wait_until_ready` says when it serves."""
        flags = ["--socket", str(self.socket_path), "--state-dir", str(self.state), *self._model.flags]
        with (self.folder / "log").open("wb") as log:
            self._process = start_command(
                "serve", *flags, environ=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait_until_ready(self) -> None:
        give_up_at = time.monotonic() + GUARD_S
        while not self._is_ready():
            assert self.process.poll() is None, f"the daemon ended: {self.log}"
            assert time.monotonic() < give_up_at, f"the daemon is not ready: {self.log}"
            time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        try:
            with self.line() as line:
                return "error" not in line.ask("ready")
        except Ended:
            return False

    def line(self) -> Line:
        return Line(self.socket_path)

    def stats(self) -> dict[str, Any]:
        with self.line() as line:
            return line.must("stats")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(GUARD_S)

    def stop(self) -> None:
        """SIGTERM; it must end well."""
        self.process.terminate()
        assert self.process.wait(GUARD_S) == 0, self.log
        assert "Traceback" not in self.log, self.log

    def wait_until_idle(self) -> dict[str, Any]:
        """Until no request is left; returns the statistics. What it had reserved must be free then."""
        give_up_at = time.monotonic() + GUARD_S
        while True:
            stats = self.stats()
            if not (stats["running"] or stats["queued"] or stats["kv"]["reserved_bytes"]):
                return stats
            assert time.monotonic() < give_up_at, f"not idle: {stats}"
            time.sleep(POLL_S)

    @property
    def resident_bytes(self) -> int:
        return int(status(Path(f"/proc/{self.process.pid}"))["VmRSS"].split()[0]) << 10

    def descriptors(self) -> Counter[str]:
        """Open files by name, sockets and pipes by their kind."""
        names: Counter[str] = Counter()
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed just now
                target = os.readlink(path)
                names[target if target.startswith("/") else target.partition(":")[0]] += 1
        return names

    def files(self) -> dict[str, int]:
        """Number of files in the state folder by the end of their names."""
        found: dict[str, int] = {}
        for path in self.state.rglob("*"):
            if path.is_file():
                found[path.suffix] = found.get(path.suffix, 0) + 1
        return found


class Watch:
    """Looks at a daemon all the time, in a thread of its own: the cache must never exceed its budget."""

    def __init__(self, service: Service, every_s: float = 0.05) -> None:
        self._service = service
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.problems: list[str] = []
        self.num_looks = 0
        self.most: dict[str, int] = {"kv_bytes": 0, "rss_bytes": 0, "running": 0, "queued": 0}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()
        if kind is None:
            assert not self.problems, self.problems[:3]
            assert self.num_looks, "nobody looked"

    def _run(self) -> None:
        with self._service.line() as line:
            while not self._is_over.wait(self._every_s):
                try:
                    self._look(line.must("stats"))
                except (AssertionError, Ended) as error:
                    self.problems.append(str(error))
                    return

    def _look(self, stats: Mapping[str, Any]) -> None:
        self.num_looks += 1
        kv = stats["kv"]
        for name, most in self.most.items():
            self.most[name] = max(most, stats[name])
        if stats["kv_bytes"] > kv["budget_bytes"] or kv["reserved_bytes"] + kv["block_bytes"] > kv["budget_bytes"]:
            self.problems.append(f"beyond the budget: {stats['kv_bytes']} bytes, {kv}")

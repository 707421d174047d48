"""Processes under measurement: the daemon itself, and what the kernel says of any process's memory and CPU time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeqwen.client import Client

START_GUARD_S = 900.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: resident, of that private (mapped files left out), and the most that was ever resident."""

    resident: int
    private: int
    peak: int


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running `edgeqwen serve`; `start_s` is the time from its start until it said that it is ready."""

    pid: int
    socket_path: Path
    start_s: float

    def client(self) -> Client:
        return Client.connect(self.socket_path)


def memory(pid: int) -> Memory:
    """What /proc says of a process now (kB there)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()}
    resident, private, peak = (int(fields[name]) << 10 for name in ("VmRSS", "RssAnon", "VmHWM"))
    return Memory(resident, private, peak)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that the living threads of a process have had (nanoseconds in schedstat)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


@contextlib.contextmanager
def running_daemon(
    package: Path, state: Path, *flags: str, environ: Mapping[str, str] | None = None
) -> Iterator[Daemon]:
    """A daemon on a socket of its own, ready; what it finds out about the machine is kept in `state`."""
    with tempfile.TemporaryDirectory(prefix="edgeqwen-") as name:
        path, log = Path(name) / "socket", Path(name) / "log"
        command = [sys.executable, "-m", "edgeqwen", "serve", "--model", str(package), "--socket", str(path)]
        command += ["--state-dir", str(state), "--cache-dir", str(state / "cache"), *flags]
        with _notifications(Path(name) / "notify") as sock, log.open("wb") as file:
            env = {key: value for key, value in os.environ.items() if not key.startswith("EDGEQWEN_")}
            env |= {"NOTIFY_SOCKET": str(Path(name) / "notify"), **(environ or {})}
            began = time.perf_counter()
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            try:
                _wait_until_ready(sock, process, command, log)
                yield Daemon(process.pid, path, time.perf_counter() - began)
            finally:
                process.terminate()
                process.wait()


@contextlib.contextmanager
def _notifications(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.settimeout(0.1)
        yield sock


def _wait_until_ready(sock: socket.socket, process: subprocess.Popen[bytes], command: Sequence[str], log: Path) -> None:
    give_up_at = time.monotonic() + START_GUARD_S
    while process.poll() is None and time.monotonic() < give_up_at:
        with contextlib.suppress(TimeoutError):
            if b"READY=1" in sock.recv(4096):
                return
    raise RuntimeError(f"{' '.join(command)} is not ready: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")

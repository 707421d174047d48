"""A stand-in for a service manager: holds the sockets, starts a daemon when somebody comes, listens to what it says.

It does what systemd does of socket activation (the descriptors from 3 on, LISTEN_PID of the process itself, the socket
watched only while no daemon runs), of sd_notify (a datagram socket) and of the watchdog (it notes, and does not kill).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemons import HANG_GUARD_S, script_of, write_text_model

LAUNCH = """
import os, sys
count = int(sys.argv[1])
for place, fd in enumerate(map(int, sys.argv[2:2 + count])):
    os.dup2(fd, 100 + place)
for place in range(count):
    os.dup2(100 + place, 3 + place)
    os.set_inheritable(3 + place, True)
os.environ["LISTEN_PID"] = os.environ.get("LISTEN_PID") or str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "edgeqwen", *sys.argv[2 + count:]])
"""


@dataclass(frozen=True, slots=True)
class Message:
    """One notification, and when it came."""

    text: str
    at: float

    @property
    def keys(self) -> list[str]:
        return [line.partition("=")[0] for line in self.text.splitlines()]


@dataclass(eq=False)
class ServiceManager:
    """`environ` is what its daemons are given beside the sockets."""

    folder: Path
    sockets: Sequence[socket.socket]
    notify: socket.socket
    address: str
    environ: Mapping[str, str] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "s"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """A daemon that has the sockets."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("EDGEQWEN_")}
        env |= {"NOTIFY_SOCKET": self.address, "STATE_DIRECTORY": str(self.folder / "state")}
        env |= {"LISTEN_FDS": str(len(self.sockets)), **self.environ}
        fds = [sock.fileno() for sock in self.sockets]
        command = [sys.executable, "-c", LAUNCH, str(len(fds)), *map(str, fds), "serve", *flags]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=fds)
        self.daemons.append(process)
        return process

    def listen(self) -> None:
        """Take in notifications, until the socket is closed."""
        with contextlib.suppress(OSError):
            while data := self.notify.recv(4096):
                self.messages.append(Message(data.decode(), time.monotonic()))

    def wait_for(self, text: str, *, times: int = 1, process: subprocess.Popen[bytes] | None = None) -> None:
        """Until `text` has come so often in notifications."""
        give_up_at = time.monotonic() + HANG_GUARD_S
        while sum(text in message.text for message in self.messages) < times:
            assert time.monotonic() < give_up_at, (text, self.messages, self.log)
            assert process is None or process.poll() is None, self.log
            time.sleep(0.005)

    def serve_on_demand(self, *flags: str, until: threading.Event) -> None:
        """Start a daemon whenever somebody waits on a socket and none runs."""
        while not until.is_set():
            if not self.daemons or self.daemons[-1].poll() is not None:
                ready, _, _ = select.select(self.sockets, [], [], 0.02)
                if ready:
                    self.start(*flags)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.daemons[-1].wait(0.005)


@contextlib.contextmanager
def service_manager(
    folder: Path,
    environ: Mapping[str, str] | None = None,
    *,
    sockets: Sequence[socket.socket] | None = None,
    is_abstract: bool = False,
) -> Iterator[ServiceManager]:
    """One with a listening socket at `folder / "s"`, unless others are given. Its daemons are killed at the end."""
    made: list[socket.socket] = []
    if sockets is None:
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        made[0].bind(str(folder / "s"))
        made[0].listen(64)
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    address = f"@edgeqwen-{os.getpid()}-{id(notify)}" if is_abstract else str(folder / "notify")
    notify.bind("\0" + address[1:] if is_abstract else address)
    manager = ServiceManager(folder, sockets if sockets is not None else made, notify, address, environ or {})
    thread = threading.Thread(target=manager.listen, daemon=True)
    thread.start()
    try:
        yield manager
    finally:
        for process in manager.daemons:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            notify.shutdown(socket.SHUT_RD)
        notify.close()
        for sock in made:
            sock.close()


def flags_of(folder: Path, runtime: str | None = None) -> tuple[str, ...]:
    """Of a daemon with scripted answers."""
    return ("--model", str(write_text_model(folder / "model")), "--runtime", runtime or script_of("yes"))

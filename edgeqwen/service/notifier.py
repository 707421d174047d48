"""Telling a service manager how the daemon is (sd_notify(3)): a datagram of `KEY=value` lines to $NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping


class Notifier:
    """Sends states to the service manager; does nothing without one.

    A manager that has gone away must not take the daemon with it, so errors of the socket are ignored.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # "@name" is a socket in the abstract namespace, which the kernel spells with a leading NUL.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._status: str | None = None  # what was said with READY=1

    def ready(self, status: str) -> None:
        self._status = status
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={_line(status)}")

    def extend(self, by_s: float, status: str) -> None:
        """Starting takes longer than it may: have it last `by_s` more from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(by_s * 1e6)}\nSTATUS={_line(status)}")

    def alive(self) -> None:
        """The daemon works. To be said as often as the manager wants to hear it (WATCHDOG_USEC)."""
        self._send("WATCHDOG=1")

    def hangs(self) -> None:
        """The daemon does not work, and will not again: the manager is to do now what it does to one that hangs."""
        self._send("WATCHDOG=trigger")

    @contextlib.contextmanager
    def reloading(self, monotonic_us: int) -> Iterator[None]:
        """Around the reading of a configuration, whatever comes of it. `monotonic_us` is CLOCK_MONOTONIC as it begins.

        Nothing is sent before the daemon was said to be ready, for what ends a reload says just that.
        """
        if self._status is not None:
            self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}")
        try:
            yield
        finally:
            if self._status is not None:
                self.ready(self._status)

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
            sock.setblocking(False)
            sock.sendto(text.encode(), self._address)


def _line(text: str) -> str:
    """One line: what stands behind a newline would be a message of its own."""
    return " ".join(text.split())

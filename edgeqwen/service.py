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
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

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

"""Entries with fields for systemd's journal: datagrams to its socket (systemd.io/JOURNAL_NATIVE_PROTOCOL).

A field is `NAME=value` and a newline; one whose value has a newline in it is `NAME`, a newline, the length of the value
in eight bytes, little-endian, the value, a newline. So nothing that is logged can pass for a field of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

from edgeqwen.logs.event import Event, describe_error, one_line

JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
MOST_VALUE_BYTES: Final = 16 << 10
"""A datagram holds some 200 kB; nothing that we say is worth as much."""

_PRIORITIES: Final = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


def priority_of(level: int) -> int:
    """The priority of syslog(3) for a level of `logging`."""
    return next((priority for least, priority in _PRIORITIES if level >= least), 7)


def is_connected_to_journal(journal_stream: str, stream: TextIO) -> bool:
    """Whether `stream` is what $JOURNAL_STREAM, `DEVICE:INODE`, speaks of: it may be of a parent whose output is not
    ours (systemd.exec(5)).
    """
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(stream.fileno())
        return journal_stream == f"{status.st_dev}:{status.st_ino}"
    return False


def encode_entry(fields: Mapping[str, str]) -> bytes:
    """A datagram of fields, whose names are of capital letters, digits and underscores."""
    parts: list[bytes] = []
    for name, value in fields.items():
        data = value.encode("utf-8", "backslashreplace")[:MOST_VALUE_BYTES]
        if b"\n" in data:
            parts += [name.encode(), b"\n", len(data).to_bytes(8, "little"), data, b"\n"]
        else:
            parts += [name.encode(), b"=", data, b"\n"]
    return b"".join(parts)


def entry_of(record: logging.LogRecord) -> dict[str, str]:
    """The fields of a record."""
    message = one_line(record.getMessage())
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(priority_of(record.levelno)),
        "SYSLOG_IDENTIFIER": "edgeqwen",
        "LOGGER": record.name,
    }
    if isinstance(record.msg, Event):
        fields |= {"MESSAGE_ID": record.msg.message_id, "EDGEQWEN_EVENT": record.msg.name}
        fields |= {f"EDGEQWEN_{name.upper()}": str(value) for name, value in record.msg.fields.items()}
    if record.exc_info:
        fields["EDGEQWEN_ERROR"] = error = describe_error(record.exc_info)
        fields["MESSAGE"] = f"{message}\n{error}"
    return fields


class JournalHandler(logging.Handler):
    """Sends records to the journal. One that it does not take is lost, and no reason to stop."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        super().__init__()
        self._sock = sock
        self._path = str(path)

    @classmethod
    def open(cls, path: Path) -> JournalHandler | None:
        """None if there is no journal there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            if probe.connect_ex(str(path)) != 0:
                return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setblocking(False)
        return cls(sock, path)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._sock.sendto(encode_entry(entry_of(record)), self._path)  # not connected: the journal may be restarted

    def close(self) -> None:
        self._sock.close()
        super().close()

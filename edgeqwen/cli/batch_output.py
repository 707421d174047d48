"""The output file of a batch: what is there already, and one line more for each answer."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from edgeqwen.cli.streams import StreamFailed
from edgeqwen.errors import CannotWrite, ConfigInvalid

Key: TypeAlias = tuple[str, str | int]
"""What an item is known by: ("id", its id), or ("index", its place in the input, from 0)."""

READ_BYTES: Final = 1 << 20


class BatchOutput:
    """Lines are appended whole, each in one write, so that a run that is killed leaves whole lines and at most one that
    is torn; that one is cut off at the next start. One process at a time may have the file. Raises `CannotWrite`,
    `ConfigInvalid` (what is there is no output of a batch, or another run has it).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            raise CannotWrite(f"the output {path} cannot be opened: {exc.strerror}") from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._cut_torn_line()
            self.done = frozenset(self._read_keys())
        except BlockingIOError as exc:
            os.close(self._fd)
            raise ConfigInvalid(f"{path}: another run is writing to this file") from exc
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def is_same_file(self, fd: int) -> bool:
        return os.path.samestat(os.fstat(fd), os.fstat(self._fd))

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line. Raises `CannotWrite`; what was written of the line then is cut off again."""
        size = os.fstat(self._fd).st_size
        try:
            _write(self._fd, line)
        except OSError as exc:
            os.ftruncate(self._fd, size)
            raise CannotWrite(f"the output {self._path} cannot be written: {exc.strerror}") from exc

    def _cut_torn_line(self) -> None:
        end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - READ_BYTES)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end == 0 and os.fstat(self._fd).st_size > 0 and os.pread(self._fd, 1, 0) != b"{":
            raise self._foreign(1)
        if end < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, end)

    def _read_keys(self) -> Iterator[Key]:
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                try:
                    yield key_of(json.loads(line))
                except (ValueError, TypeError, KeyError) as exc:
                    raise self._foreign(number) from exc

    def _foreign(self, number: int) -> ConfigInvalid:
        return ConfigInvalid(f"{self._path}: line {number} is no answer of a batch; choose another output file")


class StandardOutput:
    """Standard output in place of a file: nothing is known of what went there before."""

    done: frozenset[Key] = frozenset()

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line. Raises `StreamFailed`."""
        try:
            _write(sys.stdout.fileno(), line)
        except OSError as exc:
            raise StreamFailed(exc) from exc


def _write(fd: int, line: Mapping[str, Any]) -> None:
    data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def key_of(line: Any) -> Key:
    """What the item of an output line is known by. Raises TypeError or KeyError for anything else."""
    if not isinstance(line, dict):
        raise TypeError
    name = "id" if "id" in line else "index"
    value = line[name]
    if not isinstance(value, str | int):
        raise TypeError
    return name, value

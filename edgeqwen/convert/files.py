"""Model files as the readers see them: opened once, of a known size, read by position.

Data is read with `preadv` and not through a mapping: a file cut short while it is read is then an error, not a signal.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgeqwen.errors import FileError, ModelInvalid, ModelMissing

LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
MAX_JSON_BYTES = 64 << 20


class DataFile:
    """A regular file open for reading; `size` was taken at opening."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelMissing` if there is none, `ModelInvalid` if it is empty, not regular or a Git LFS pointer."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise open_error(path, e) from e
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise ModelInvalid(f"{path} is not a regular file")
            self.size = status.st_size
            if self.size == 0:
                raise ModelInvalid(f"{path} is empty (0 bytes): fetch it again")
            self._refuse_lfs_pointer()
        except BaseException:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        return self._fd

    def read(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Bytes `[offset, offset + length)`; the caller has checked them against `size`."""
        data = np.empty(length, np.uint8)
        done = 0
        while done < length:
            try:
                count = os.preadv(self._fd, [data.data[done:]], offset + done)
            except OSError as e:
                raise ModelInvalid(f"{self.path} cannot be read: {e.strerror}") from e
            if count == 0:
                raise ModelInvalid(f"{self.path} became shorter while it was read: {self.size:,} bytes at opening")
            done += count
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _refuse_lfs_pointer(self) -> None:
        head = self.read(0, min(self.size, 512)).tobytes()
        if not head.startswith(LFS_MAGIC):
            return
        sizes = [line[5:] for line in head.decode("ascii", "replace").splitlines() if line.startswith("size ")]
        expected = f"{int(sizes[0]):,} bytes" if sizes and sizes[0].isdigit() else "an unknown size"
        raise ModelInvalid(
            f"{self.path} is a Git LFS pointer of {self.size} bytes in the place of a file of {expected}: "
            "run 'git lfs pull', or fetch the model with 'edgeqwen pull'"
        )


def open_error(path: Path, error: OSError) -> FileError:
    """What a failed open of a model file means."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return ModelMissing(f"{path} does not exist")
    return ModelInvalid(f"{path} cannot be opened: {error.strerror}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model."""
    return parse_json(path, read_small(path))


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ModelInvalid(f"{path} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path} must hold a JSON object")
    return value


def read_small(path: Path) -> bytes:
    """All of a side file (at most `MAX_JSON_BYTES`)."""
    file = DataFile(path)
    try:
        if file.size > MAX_JSON_BYTES:
            raise ModelInvalid(f"{path} has {file.size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        return file.read(0, file.size).tobytes()
    finally:
        file.close()


class Fields:
    """Typed access to the members of a model's metadata; every error names the file and the member."""

    def __init__(self, path: Path, values: Mapping[str, Any], *, prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        return self._values.get(self._prefix + name)

    def members(self) -> Mapping[str, Any]:
        return self._values

    def integer(self, name: str, default: int | None = None, *, maximum: int = 1 << 31) -> int:
        """A positive integer up to `maximum`."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= maximum:
            raise self.error(name, f"must be an integer from 1 to {maximum:,}, not {_shown(value)}")
        return value

    def count(self, name: str) -> int:
        """An integer from 0 up; 0 if absent."""
        value = self.get(name)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, f"must be an integer from 0 up, not {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, f"must be a finite number above 0, not {_shown(value)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {_shown(value)}")
        return value

    def string(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"must be a string, not {_shown(value)}")
        return value

    def table(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {_shown(value)}")
        return Fields(self.path, value)

    def token_id(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.error(name, f"must be a token id, not {_shown(value)}")
        return value

    def error(self, name: str, problem: str) -> ModelInvalid:
        return ModelInvalid(f"{self.path}: '{self._prefix}{name}' {problem}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

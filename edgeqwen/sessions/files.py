"""Sessions on disk: one file each, `<root>/<owner>/<id>.session`, replaced as a whole.

    magic "eqsess" | version u16 | length u32 | crc32 u32 | payload (JSON)          little endian

The checksum covers version, length and payload. This head is that of every version, so a file of a later one is told
from a damaged one, and left alone. A write makes a temporary file, syncs it, renames it over the old one and syncs the
folder: after a crash there is the old file or the new one. Damaged files are moved aside, a few of them kept.

Everything here blocks, and is for one thread. A lock held for life keeps a second daemon out of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from edgeqwen.errors import CannotWrite
from edgeqwen.sessions.session import ID_PATTERN, OWNER_PATTERN, Session

VERSION: Final = 1
SUFFIX: Final = ".session"
DAMAGED_SUFFIX: Final = ".damaged"
TEMPORARY_SUFFIX: Final = ".tmp"
MAX_DAMAGED: Final = 8
"""Damaged files of one owner that are kept, for whoever wants to look into them."""

MAX_FILE_BYTES: Final = 64 << 20
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

_MAGIC: Final = b"eqsess"
_HEAD: Final = struct.Struct("<6sHII")
_COVERED: Final = struct.Struct("<HI")
_ID: Final = ID_PATTERN[1:-1]
_FILE_NAME: Final = re.compile(rf"({_ID}){re.escape(SUFFIX)}")
_TEMPORARY_NAME: Final = re.compile(rf"{_ID}{re.escape(TEMPORARY_SUFFIX)}")
_DAMAGED_NAME: Final = re.compile(rf"{_ID}{re.escape(DAMAGED_SUFFIX)}")
_OWNER_NAME: Final = re.compile(OWNER_PATTERN[1:-1])

log = logging.getLogger(__name__)


class SessionDamaged(Exception):
    """The bytes are no session: cut short, changed, or never one."""


class SessionOfLaterVersion(Exception):
    """The bytes are whole, and of a version that this program does not know."""


def encode(session: Session) -> bytes:
    """The content of a session's file."""
    payload = msgspec.json.encode(session)
    return _HEAD.pack(_MAGIC, VERSION, len(payload), _checksum(VERSION, payload)) + payload


def decode(data: bytes) -> Session:
    """The session in a file's content. Raises `SessionDamaged` or `SessionOfLaterVersion`."""
    if len(data) < _HEAD.size:
        raise SessionDamaged
    magic, version, num_bytes, checksum = _HEAD.unpack_from(data)
    payload = data[_HEAD.size :]
    if magic != _MAGIC or num_bytes != len(payload) or checksum != _checksum(version, payload):
        raise SessionDamaged
    if version > VERSION:
        raise SessionOfLaterVersion
    try:
        return msgspec.json.decode(payload, type=Session)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SessionDamaged from error


def _checksum(version: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_COVERED.pack(version, len(payload))))


@dataclass(slots=True)
class Found:
    """What was in the folder: sessions, and how many files were no use."""

    sessions: list[Session] = field(default_factory=list)
    num_damaged: int = 0
    num_later: int = 0


class SessionFolder:
    """The files of all sessions."""

    def __init__(self, root: Path, lock_fd: int) -> None:
        self._root = root
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, root: Path) -> SessionFolder:
        """Make the folder if it is not there, and lock it. Raises `CannotWrite` that names it."""
        try:
            root.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)  # the mode is for the last folder only
            root.mkdir(mode=FOLDER_MODE, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock_fd = os.open(root / "lock", flags, FILE_MODE)
        except OSError as error:
            raise CannotWrite(f"{root}: {error.strerror}") from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            reason = "another daemon keeps its sessions there" if isinstance(error, BlockingIOError) else error.strerror
            raise CannotWrite(f"{root}: {reason}") from error
        return cls(root, lock_fd)

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock_fd)

    def read_all(self) -> Found:
        """Every session there is. Leftovers of interrupted writes are removed; names of no known form are let be."""
        found = Found()
        for owner in _names(self._root, _OWNER_NAME):
            folder = self._root / owner
            if folder.is_dir() and not folder.is_symlink():
                for name in _names(folder, _TEMPORARY_NAME):
                    _remove(folder / name)
                for name in _names(folder, _FILE_NAME):
                    self._read_into(found, folder / name)
        return found

    def _read_into(self, found: Found, path: Path) -> None:
        try:
            session = decode(_read(path))
            if (session.owner, session.id) != (path.parent.name, path.stem):
                raise SessionDamaged
        except SessionOfLaterVersion:
            found.num_later += 1
            log.warning("%s: written by a later version of edgeqwen; it is left alone", path)
        except SessionDamaged:
            found.num_damaged += 1
            log.warning("%s: damaged; it is moved aside, and its session is lost", path)
            _move_aside(path)
        except OSError as error:
            found.num_damaged += 1
            log.warning("%s: cannot be read: %s", path, error.strerror)
        else:
            found.sessions.append(session)

    def write(self, session: Session) -> None:
        """Have the session on disk, for good. Raises `CannotWrite`; the file is then what it was before."""
        folder = self._root / session.owner
        temporary = folder / (session.id + TEMPORARY_SUFFIX)
        try:
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            try:
                _write_synced(temporary, encode(session))
                temporary.rename(folder / (session.id + SUFFIX))
            except OSError:
                _remove(temporary)
                raise
            _sync_folder(folder)
        except OSError as error:
            raise CannotWrite(f"{folder}: a session cannot be kept: {error.strerror}") from error

    def remove(self, session: Session) -> None:
        """Forget the session of this id, if there is one. Raises `CannotWrite`."""
        folder = self._root / session.owner
        try:
            (folder / (session.id + SUFFIX)).unlink()
            _sync_folder(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CannotWrite(f"{folder}: a session cannot be removed: {error.strerror}") from error


def _names(folder: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        log.warning("%s: cannot be read: %s", folder, error.strerror)
        return
    yield from (name for name in names if pattern.fullmatch(name))


def _read(path: Path) -> bytes:
    """What `path` holds, if that is a file of bearable size. Raises `SessionDamaged` and `OSError`."""
    if path.is_symlink() or not path.is_file():
        raise SessionDamaged
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_FILE_BYTES:
            raise SessionDamaged
        return file.read(MAX_FILE_BYTES)


def _write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_aside(path: Path) -> None:
    """Keep a damaged file under another name; of too many the oldest go."""
    with contextlib.suppress(OSError):
        path.rename(path.with_suffix(DAMAGED_SUFFIX))
        kept = [path.parent / name for name in _names(path.parent, _DAMAGED_NAME)]
        for old in sorted(kept, key=lambda each: each.lstat().st_mtime)[:-MAX_DAMAGED]:
            _remove(old)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()

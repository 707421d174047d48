"""A folder that is written beside its place and put there when it is whole.

An import that is killed leaves at most a folder whose name begins with `.` and ends in `.importing` (or `.replaced`);
the next import to the same place removes it. While an import runs it holds a lock on its folder, so two to one place
don't meet: the second is told. What stood in the place before stays there until the new folder is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgeqwen.convert.exchange import exchange
from edgeqwen.core.package import MANIFEST
from edgeqwen.errors import CannotWrite


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A fresh folder beside `out`; removed at the end unless `publish` put it in place.

    Raises `CannotWrite` for every error of the file system, if `out` is something else than a package, and if another
    import to the same place runs.
    """
    folder = out.parent / f".{out.name}.importing"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not (out / MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
            raise CannotWrite(f"{out}: exists and is not a model package; choose another --out")
        with _claimed(folder, out):
            _restore(out)
            yield folder
    except OSError as error:
        reason = "no space left on the device" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise CannotWrite(f"{error.filename or folder}: cannot write the package: {reason}") from error


def publish(folder: Path, out: Path) -> None:
    """Put the finished folder in place of `out`; the old package's files live on for whoever has them open.

    The two change places in one step, so `out` is a whole package whenever the import is killed; the old one is left
    under the name of `folder`, to be removed. Where a file system cannot do that, `out` is missing for an instant, and
    `_restore` brings the old package back if the import ends just there.
    """
    _sync(folder)
    if not out.exists():
        folder.rename(out)
    elif not exchange(folder, out):
        out.rename(_set_aside(out))
        folder.rename(out)
        _remove(_set_aside(out))


@contextlib.contextmanager
def _claimed(folder: Path, out: Path) -> Iterator[None]:
    """An empty `folder` that is locked while this process uses it; a killed import's, which nobody holds, is
    removed.
    """
    if folder.is_dir() and not folder.is_symlink():
        with _locked(folder, out):
            _remove(folder)
    _remove(folder)
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise _is_running(out) from error
    with _locked(folder, out):
        try:
            yield
        finally:
            _remove(folder)


@contextlib.contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    """The lock ends with its process, however that ends. A file system without locks goes without."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(PermissionError, NotADirectoryError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise _is_running(out) from error
    finally:
        os.close(descriptor)


def _is_running(out: Path) -> CannotWrite:
    return CannotWrite(f"{out}: another import to this place is running; wait for it, or choose another --out")


def _sync(folder: Path) -> None:
    """Write the files through to the device before they replace others: a power cut must not leave neither of both."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _restore(out: Path) -> None:
    """Undo the first half of a replacement that another import did not live to finish."""
    aside = _set_aside(out)
    if aside.exists() and not out.exists():
        aside.rename(out)
    _remove(aside)


def _set_aside(out: Path) -> Path:
    return out.parent / f".{out.name}.replaced"


def _remove(path: Path) -> None:
    """Remove a folder of ours, or the link to one that stood in its place."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)

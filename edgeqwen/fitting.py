"""The package that fits this processor: the one given, or a copy of it remade for here and kept in the cache directory.

Weights come in the form of the processor that a package was made for. Moved to another machine it still answers
rightly, but signed weights on x86 without VNNI are rewritten at every load (seconds, and a quarter more memory), and
unsigned ones on a processor with VNNI make prompts many times slower. Nobody may be there to import the model again,
so the daemon has `edgeqwen import` do it, in a process of its own, and remembers whose copy it is. A copy is used while
its package is what it was; those of packages that are gone, and all but the last few used, are removed. Where there is
no room for one, or anything else goes wrong, the package serves as it is, and the log says what would mend it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

import edgeqwen
from edgeqwen.core.kernel import KERNEL_CHECK, RowKernel
from edgeqwen.core.package import MANIFEST, Package, open_package, verify_digests
from edgeqwen.cpu import Processor, Target
from edgeqwen.errors import CannotWrite, EdgeqwenError, ModelInvalid

FOLDER: Final = "remade"
ORIGIN: Final = "origin.json"
MAX_COPIES: Final = 2
RESERVE_BYTES: Final = 512 << 20
"""Room that a copy leaves free on its file system."""

TIMEOUT_S: Final = 900.0

Remake = Callable[[Package, Path, Target], None]

log = logging.getLogger(__name__)


class Origin(msgspec.Struct, frozen=True):
    """Whose copy a folder is: the package's path, the digest of its manifest (which names all else), the target."""

    path: str
    manifest: str
    target: str


def better_target(package: Package, processor: Processor) -> Target | None:
    """What the package should have been made for, if it is not in the form that this processor needs.

    Runs the package's check of kernels; raises `ModelInvalid` if that is broken.
    """
    from edgeqwen.runtime.kernel_check import examine

    path = package.path / KERNEL_CHECK
    if not path.exists() or package.manifest.graph != "own":  # what another tool has made can't be remade
        return None
    findings = examine(path)
    if RowKernel("signed") in findings.wrong:
        return "any"
    return "vnni" if RowKernel("unsigned") in findings.kernels and processor.target == "vnni" else None


def _is_right(package: Package) -> bool:
    from edgeqwen.runtime.kernel_check import examine

    return not examine(package.path / KERNEL_CHECK).wrong_weights


def mending_command(package: Package, target: Target) -> str:
    """What remakes a package in its place."""
    return f"edgeqwen import {package.path} --target {target} --out {package.path}"


def fitting_package(
    package: Package, processor: Processor, cache_dir: Path, *, remake: Remake | None = None
) -> Package:
    """The package itself if it fits, else its copy (made by `remake` if there is none), else itself nevertheless."""
    target = better_target(package, processor)
    if target is None:
        return package
    copies = cache_dir / FOLDER
    try:
        copy = _copy_of(package, target, copies, remake or remake_by_command)
        if not _is_right(copy):
            raise ModelInvalid("the copy is computed wrongly here: the processor lacks what it says it has")
    except (EdgeqwenError, OSError) as error:
        mending = mending_command(package, target)
        log.warning(
            "package does not fit this processor and could not be remade for it; it serves rightly but slowly "
            "package=%s form=%s reason=%r mend=%r",
            *(package.path, package.manifest.weight_form, str(error), mending),
        )
        return package
    log.info("using a copy remade for this processor package=%s copy=%s target=%s", package.path, copy.path, target)
    return copy


def remake_by_command(package: Package, out: Path, target: Target) -> None:
    """Have `edgeqwen import` write the copy. Raises `CannotWrite` with what it said if it fails."""
    command = [sys.executable, "-P", "-m", "edgeqwen", "import", str(package.path), "--target", target]
    command += ["--out", str(out), "--name", package.manifest.name]
    # The command is to be of this very version, however the daemon was started.
    paths = [str(Path(edgeqwen.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    try:
        subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise CannotWrite(f"not done within {TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise CannotWrite(lines[-1] if lines else f"import ended with {error.returncode}") from error


def _copy_of(package: Package, target: Target, copies: Path, remake: Remake) -> Package:
    path = package.path.resolve()
    origin = Origin(str(path), _digest(path / MANIFEST), target)
    folder = copies / hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    if _read_origin(folder) == origin and (copy := _opened(folder)) is not None:
        os.utime(folder / ORIGIN)
        _prune(copies, keep=folder)
        return copy
    _remove(folder)
    copies.mkdir(parents=True, exist_ok=True)
    _prune(copies, keep=folder)
    size, free = sum(package.manifest.sizes.values()), shutil.disk_usage(copies).free
    if size + RESERVE_BYTES > free:
        raise CannotWrite(
            f"{copies}: {size >> 20} MiB and {RESERVE_BYTES >> 20} to spare are needed, {free >> 20} free"
        )
    log.info("remaking the package for this processor, once package=%s target=%s mib=%d", path, target, size >> 20)
    remake(package, folder, target)
    copy = open_package(folder)
    (folder / ORIGIN).write_bytes(msgspec.json.encode(origin))
    return copy


def _opened(folder: Path) -> Package | None:
    """The copy in `folder`; None if it is not whole, which is no more than a reason to make it again."""
    try:
        copy = open_package(folder)
        verify_digests(copy, with_weights=False)
    except EdgeqwenError:
        return None
    return copy


def _prune(copies: Path, keep: Path) -> None:
    """Remove copies whose package is gone, what is no copy, and all but the last used of the rest."""
    used: list[tuple[float, Path]] = []
    for folder in copies.iterdir():
        if folder == keep:
            continue
        if folder.name.startswith("."):  # an import is writing it, or was killed
            if time.time() - folder.stat().st_mtime > 2 * TIMEOUT_S:
                _remove(folder)
            continue
        origin = _read_origin(folder)
        if origin is None or not (Path(origin.path) / MANIFEST).exists():
            _remove(folder)
        else:
            used.append(((folder / ORIGIN).stat().st_mtime, folder))
    for _, folder in sorted(used, reverse=True)[MAX_COPIES - 1 :]:
        _remove(folder)


def _read_origin(folder: Path) -> Origin | None:
    try:
        return msgspec.json.decode((folder / ORIGIN).read_bytes(), type=Origin)
    except (OSError, msgspec.DecodeError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remove(folder: Path) -> None:
    def keep_going(function: Any, path: Any, error: Any) -> None:
        log.warning("cannot remove a stale copy path=%s", path)

    if folder.exists():
        shutil.rmtree(folder, onerror=keep_going)

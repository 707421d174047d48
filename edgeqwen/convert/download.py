"""One file over HTTP, resumed where it was cut off and checked before it gets its name."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeqwen.errors import CannotWrite, ModelInvalid, ModelMissing

PIECE_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 30.0
ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Where a file is and what it must be; `sha256` None is not checked."""

    url: str
    size: int
    sha256: str | None = None


def download(
    remote: RemoteFile,
    path: Path,
    *,
    on_bytes: Callable[[int], None] = lambda done: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch `remote` to `path`; a file of the right size there already is kept.

    Bytes gather in `path` + `.part`, which a later call continues. `ATTEMPTS` connections in a row without a byte
    end it with `ModelMissing`; a wrong size or digest is `ModelInvalid`; trouble with the disk is `CannotWrite`.
    """
    if path.is_file() and path.stat().st_size == remote.size:
        return
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        failures = 0
        while (before := _size(part)) != remote.size or not part.exists():
            if before > remote.size:
                part.unlink()
                continue
            problem = _continue(remote, part, on_bytes)
            failures = failures + 1 if _size(part) <= before else 0
            if failures == ATTEMPTS:
                raise ModelMissing(f"{remote.url} cannot be fetched: {problem}; what came stays in {part}")
            if failures:
                sleep(2.0 ** (failures - 1))
        _check_digest(remote, part)
        part.replace(path)
    except OSError as e:
        raise write_error(path, e) from e


def write_error(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(f"{error.filename or path} cannot be written: {error.strerror or error}")


def _continue(remote: RemoteFile, part: Path, on_bytes: Callable[[int], None]) -> str:
    """Append what one connection gives to `part`; returns why it ended early, if it did."""
    offset = _size(part)
    request = urllib.request.Request(remote.url, headers={"User-Agent": "edgeqwen", "Range": f"bytes={offset}-"})
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as e:
        with e:
            if e.code in (401, 403, 404):
                raise ModelMissing(f"{remote.url} cannot be fetched: the hub answered {e.code}") from e
            return f"the hub answered {e.code}"
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as e:
        return str(getattr(e, "reason", e)) or type(e).__name__
    is_resumed = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
    with reply, part.open("ab" if is_resumed else "wb") as out:
        done = offset if is_resumed else 0
        while done <= remote.size:
            try:
                piece = reply.read(PIECE_BYTES)
            except (http.client.HTTPException, TimeoutError, ConnectionError) as e:
                return str(e) or type(e).__name__
            if not piece:
                break
            out.write(piece)
            done += len(piece)
            on_bytes(min(done, remote.size))
    if done > remote.size:
        part.unlink()
        raise ModelInvalid(f"{remote.url} gives more than the {remote.size:,} bytes that the hub announced")
    return f"the connection ended after {done:,} of {remote.size:,} bytes"


def _check_digest(remote: RemoteFile, part: Path) -> None:
    if remote.sha256 is None:
        return
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != remote.sha256.lower():
        part.unlink()
        raise ModelInvalid(f"{remote.url} came with another sha256 than the hub announced: try again")


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0

"""What restricts this process, as a unit's settings or a container do, and what of it is in the way."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from edgeqwen.core.state import existing_part
from edgeqwen.cpu.sysfiles import read_text
from edgeqwen.doctor.finding import Finding, size_text

PR_GET_MDWE: Final = 66
LEAST_FILES: Final = 96
"""Connections and the daemon's own."""

LEAST_DISK_BYTES: Final = 256 << 20
SECCOMP: Final = {"1": "strict", "2": "filtered"}
MARKS: Final = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}


@dataclass(frozen=True, slots=True)
class Sandbox:
    """`container` is its kind, if it can be told. `is_proc_whole` is whether /proc tells of the machine. Limits are of
    this process; bytes, None: none.
    """

    container: str
    no_new_privileges: bool
    seccomp: str
    denies_write_execute: bool
    is_proc_whole: bool
    max_files: int | None
    max_locked_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        parts = [
            self.container and f"container ({self.container})",
            self.seccomp and f"system calls {self.seccomp}",
            "no new privileges" if self.no_new_privileges else "",
            "no memory both writable and executable" if self.denies_write_execute else "",
        ]
        return ", ".join(filter(None, parts)) or "none"


def read_sandbox(root: Path = Path("/")) -> Sandbox:
    """Of this process, below `root`."""
    status = dict(line.split(":", 1) for line in read_text(root / "proc/self/status").splitlines() if ":" in line)
    value = {key: text.strip() for key, text in status.items()}
    marks = [kind for mark, kind in MARKS.items() if (root / mark.lstrip("/")).exists()]
    systemd = read_text(root / "run/systemd/container").strip()
    return Sandbox(
        container=systemd or next(iter(marks), ""),
        no_new_privileges=value.get("NoNewPrivs") == "1",
        seccomp=SECCOMP.get(value.get("Seccomp", ""), ""),
        denies_write_execute=_denies_write_execute(),
        is_proc_whole=bool(read_text(root / "proc/meminfo")),
        max_files=_limit(resource.RLIMIT_NOFILE),
        max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
    )


def _denies_write_execute() -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(PR_GET_MDWE, 0, 0, 0, 0) > 0)
    except (OSError, AttributeError):
        return False


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def sandbox_findings(sandbox: Sandbox) -> Iterator[Finding]:
    """What of it costs something."""
    if not sandbox.is_proc_whole:
        text = "/proc hides the machine: how much memory there is, is not known"
        yield Finding("warning", "proc-hidden", text, "ProcSubset=all in the unit (ProtectProc= does no harm)")
    if sandbox.max_files is not None and sandbox.max_files < LEAST_FILES:
        text = f"the process may open {sandbox.max_files} files: so many connections are fewer than limits.connections"
        yield Finding("warning", "open-files", text, "LimitNOFILE=1024 in the unit, or `ulimit -n 1024`")
    if sandbox.denies_write_execute:
        text = "memory cannot be made executable: runtimes that make machine code as they run cannot work"
        yield Finding("note", "write-execute", text, "MemoryDenyWriteExecute=no in the unit; onnxruntime needs none")


def disk_findings(folders: dict[str, Path], kv_disk_bytes: int) -> Iterator[Finding]:
    """Whether there is room where the daemon writes: `folders` by the setting that names them."""
    for setting, folder in folders.items():
        free = free_bytes(folder)
        needed = LEAST_DISK_BYTES + (kv_disk_bytes if setting == "service.cache_dir" else 0)
        if free is not None and free < LEAST_DISK_BYTES:
            text = f"{size_text(free)} are free at {folder}: sessions and keys and values may not be saved"
            yield Finding("warning", "disk-full", text, f"make room, or have {setting} name another place")
        elif free is not None and free < needed:
            text = f"{size_text(free)} are free at {folder}, and kv.disk_mb allows {size_text(kv_disk_bytes)}"
            yield Finding(
                "note", "disk-small", text, "lower kv.disk_mb; when the disk is full the daemon goes on without"
            )


def free_bytes(folder: Path) -> int | None:
    """For this user, where `folder` is or would be made; None if that cannot be found out."""
    try:
        found = os.statvfs(existing_part(folder))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize

"""The socket: where it is, who may connect, and whether a daemon answers there."""

from __future__ import annotations

import grp
import json
import os
import pwd
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from edgeqwen.doctor.finding import Finding

ANSWER_S: Final = 2.0
Answer = Literal["answers", "refuses", "denied", "silent", "none"]


@dataclass(frozen=True, slots=True)
class SocketReport:
    """`kind` is what stands at `path`. `answer` is what becomes of a connection; `state` what the daemon says of
    itself, empty if none answers, and `num_active` counts what it has under way, as far as it tells this user.
    """

    path: str
    kind: Literal["socket", "other", "none"]
    mode: int = 0
    owner: str = ""
    group: str = ""
    answer: Answer = "none"
    state: str = ""
    num_active: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "kind": self.kind,
            "mode": f"{self.mode:04o}",
            "owner": self.owner,
            "group": self.group,
            "answer": self.answer,
            "state": self.state,
            "active": self.num_active,
        }

    def to_text(self) -> str:
        if self.kind != "socket":
            return f"{self.path}: {'nothing is there' if self.kind == 'none' else 'is no socket'}"
        state = f", {self.state}" if self.state else ""
        return f"{self.path} ({self.owner}:{self.group} {self.mode:04o}), {self.answer}{state}"


def examine_socket(path: Path) -> SocketReport:
    """Look, and ask whoever listens how it is. Nothing is changed."""
    try:
        status = path.lstat()
    except OSError:
        return SocketReport(str(path), "none")
    if not stat.S_ISSOCK(status.st_mode):
        return SocketReport(str(path), "other")
    answer, state, num_active = _ask(path)
    return SocketReport(
        str(path),
        "socket",
        stat.S_IMODE(status.st_mode),
        _name(status.st_uid, pwd.getpwuid, "pw_name"),
        _name(status.st_gid, grp.getgrgid, "gr_name"),
        answer,
        state,
        num_active,
    )


def _name(number: int, find: Any, member: str) -> str:
    try:
        return str(getattr(find(number), member))
    except KeyError:
        return str(number)


def _ask(path: Path) -> tuple[Answer, str, int]:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(ANSWER_S)
            sock.connect(str(path))
            sock.sendall(b'{"op":"health"}\n{"op":"stats","close":true}\n')
            with sock.makefile("rb") as file:
                frame, stats = (json.loads(file.readline() or b"{}") for _ in range(2))
    except ConnectionRefusedError:
        return "refuses", "", 0
    except PermissionError:
        return "denied", "", 0
    except (OSError, ValueError):
        return "silent", "", 0
    if not isinstance(frame, dict) or "state" not in frame:
        code = frame.get("error", {}).get("code", "") if isinstance(frame, dict) else ""
        return ("denied" if code == "forbidden" else "silent"), "", 0
    counts = [stats.get(key) for key in ("running", "waiting")] if isinstance(stats, dict) else []
    return "answers", str(frame["state"]), sum(count for count in counts if isinstance(count, int))


def socket_findings(report: SocketReport, groups: frozenset[str]) -> Iterator[Finding]:
    """What is amiss with it for somebody who is in `groups`."""
    if report.kind == "other":
        advice = "choose another socket.path, or move away what is there"
        yield Finding("warning", "socket-place", f"{report.path} is no socket", advice)
    if report.answer == "refuses":
        text = f"{report.path} is there, and nobody listens: a daemon was killed, or is not started"
        yield Finding("note", "socket-stale", text, "`edgeqwen serve` replaces it when it starts")
    if report.answer == "denied":
        if report.mode & 0o060 and report.group not in groups:
            advice = f"`sudo usermod -aG {report.group} $USER`, then log in again"
        else:
            advice = f"ask as {report.owner}, or have socket.group name a group of yours"
        yield Finding("warning", "socket-denied", f"this user may not connect to {report.path}", advice)
    if report.answer == "silent":
        text = f"whoever listens at {report.path} gave no answer within {ANSWER_S:g} s"
        yield Finding("warning", "socket-silent", text, "look at its log: `journalctl -u edgeqwen`")
    if report.kind == "socket" and report.mode & 0o006:
        text = f"every user of this machine may connect to {report.path}"
        yield Finding("note", "socket-open", text, "socket.mode 0600, or 0660 with socket.group, lets fewer in")


def own_groups() -> frozenset[str]:
    """Names of the groups that this process has."""
    return frozenset(_name(number, grp.getgrgid, "gr_name") for number in {os.getgid(), *os.getgroups()})

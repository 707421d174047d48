"""A Debian system below a folder whose systemd runs, as the first process of namespaces of its own.

It sees no more of the control groups than the one it is started in, and of the network its own loopback.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.soak.package import POLL_S, QUESTION, Failed, System, step

UNTIL_S: Final = 150.0
NAMESPACES: Final = ("--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup")
BOOT: Final = """
set -eu
mount --make-rprivate /
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount -t sysfs sysfs "$1/sys"
mount -t tmpfs tmpfs "$1/run"
mount -t tmpfs tmpfs "$1/tmp"
mkdir -p "$1/old" && cd "$1" && pivot_root . old && cd / && umount -l /old
exec env -i container=soak PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=journal
"""
"""systemd mounts the rest itself."""

SERVICE: Final = "edgeqwen.service"
RESTART: Final = "systemctl daemon-reload && systemctl reset-failed edgeqwen; systemctl restart edgeqwen"
"""As often as wanted: starts by hand count towards StartLimitBurst=, too."""

DROP_INS: Final = f"/etc/systemd/system/{SERVICE}.d"


class Booted(System):
    """A system whose first process is systemd, which is process `pid` to us."""

    def __init__(self, root: Path, pid: int) -> None:
        super().__init__(root)
        self._pid = pid

    def entering(self) -> list[str]:
        return ["nsenter", f"--target={self._pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]

    def show(self, key: str, unit: str = SERVICE) -> str:
        return self.run(f"systemctl show {shlex.quote(unit)} -p {key} --value").strip()

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + UNTIL_S
        while not is_so():
            if time.monotonic() > give_up_at:
                raise Failed(f"{what}: never\n{self.run('systemctl status --no-pager edgeqwen* || true')}")
            time.sleep(POLL_S)

    def ask(self, *, exit_code: int = 0, flags: str = "") -> str:
        """The question of a user who may ask; the right answer, or what is said instead of one."""
        command = f"edgeqwen ask {flags} --temperature 0 --max-tokens 40 {shlex.quote(QUESTION)}"
        text = self.run(command, user="alice", exit_code=exit_code).strip()
        assert exit_code or "Paris" in text, text
        return text

    def take(self, drop_in: str, *changes: str) -> None:
        """A drop-in as the manual says, with changes to the copy as commands of sed, and a restart."""
        self.run(f"install -D -m 644 /usr/share/edgeqwen/drop-ins/{drop_in}.conf -t {DROP_INS}")
        for change in changes:
            self.run(f"sed -i {shlex.quote(change)} {DROP_INS}/{drop_in}.conf")
        self.run(RESTART)

    def drop(self) -> None:
        self.run(f"rm -r {DROP_INS} && {RESTART}")


def control_group() -> Path:
    """A new control group below our own, of version 2."""
    mounted = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    place = next(fields[1] for fields in mounted if fields[2] == "cgroup2")
    listed = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next(line.partition("::")[2] for line in listed if line.startswith("0::"))
    folder = Path(place + own) / f"edgeqwen-soak-{time.monotonic_ns()}"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def booted(system: System) -> Iterator[Booted]:
    began = time.monotonic()
    group = control_group()
    start = (
        f'echo $$ >{group}/cgroup.procs && exec unshare --fork --kill-child {" ".join(NAMESPACES)} sh -c "$0" sh "$1"'
    )
    process = subprocess.Popen(["sh", "-c", start, BOOT, str(system.root)], stdin=subprocess.DEVNULL)
    try:
        inside = Booted(system.root, first_child(process))
        inside.until(lambda: is_up(inside), "the start of systemd")
        step("boot", began, state=inside.run("systemctl is-system-running || true").strip())
        yield inside
    finally:
        process.kill()  # and everything in there with it
        process.wait()
        for folder in sorted(group.rglob("*/"), reverse=True):
            remove_group(folder)
        remove_group(group)


def remove_group(folder: Path) -> None:
    """Its last processes may still be on their way out."""
    give_up_at = time.monotonic() + 10.0
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(POLL_S)


def first_child(process: subprocess.Popen[bytes]) -> int:
    """systemd, as soon as unshare has forked."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (children := listed.read_text(encoding="ascii").split()):
        assert process.poll() is None, "unshare ended"
        time.sleep(POLL_S)
    return int(children[0])


def is_up(system: Booted) -> bool:
    try:
        return system.run("systemctl is-system-running --wait || true").strip() in {"running", "degraded"}
    except Failed:  # it has not got so far that it could be asked
        return False

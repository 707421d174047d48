"""What a unit's settings do to a process, done without systemd: namespaces, mounts, limits, capabilities, seccomp.

`python -m tests.confinement --unit UNIT [--writable DIR]... [--proc OPTIONS] -- COMMAND...` reads the settings of the
section `[Service]` and becomes COMMAND under them. Needs root, libseccomp and systemd-analyze. `APPLIED` says what of
a unit is imitated here and `ELSEWHERE` what is not; a test sees to it that a unit has nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import ctypes.util
import errno
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

APPLIED: Final = {
    "NoNewPrivileges": "prctl",
    "CapabilityBoundingSet": "dropped from the bounding set and all others",
    "AmbientCapabilities": "there are none left",
    "ProtectSystem": "everything mounted read-only",
    "PrivateMounts": "a mount namespace",
    "PrivateDevices": "a /dev of pseudo devices",
    "DevicePolicy": "by the same /dev",
    "PrivateNetwork": "a network namespace without an address",
    "PrivateIPC": "an IPC namespace",
    "ProtectHostname": "a UTS namespace",
    "ProtectProc": "/proc mounted anew",
    "ProcSubset": "/proc mounted anew",
    "ProtectControlGroups": "everything mounted read-only",
    "ProtectKernelTunables": "everything mounted read-only",
    "NoExecPaths": "what can be written is mounted noexec",
    "MemoryDenyWriteExecute": "prctl and seccomp",
    "RestrictAddressFamilies": "seccomp",
    "RestrictNamespaces": "seccomp",
    "RestrictRealtime": "seccomp",
    "RestrictSUIDSGID": "seccomp",
    "LockPersonality": "seccomp",
    "SystemCallFilter": "seccomp",
    "SystemCallErrorNumber": "seccomp",
    "SystemCallArchitectures": "seccomp",
    "LimitNOFILE": "rlimit",
    "LimitMEMLOCK": "rlimit",
    "LimitCORE": "rlimit",
    "UMask": "umask",
    "StateDirectory": "given with --writable",
    "CacheDirectory": "given with --writable",
    "Environment": "set, but for the places that the test chooses",
}

ELSEWHERE: Final = {
    "User": "the interpreter of a test may be root's alone: root without any capability stands in",
    "Group": "as User",
    "ProtectHome": "the interpreter of a test may be there",
    "PrivateTmp": "the files of a test are there",
    "PrivateUsers": "no, so nothing is done",
    "ProtectClock": "needs capabilities that are gone",
    "ProtectKernelLogs": "as ProtectClock",
    "ProtectKernelModules": "as ProtectClock",
    "IPAddressDeny": "there is no network",
    "RemoveIPC": "no IPC objects outlast the namespace",
    "KeyringMode": "key calls are refused",
}

LIBC: Final = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 24, 38, 65
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NE, MASKED_EQ, EQ = 1, 7, 4
NAMESPACES: Final = 0x7E020080
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")


def read_service(path: Path) -> dict[str, list[str]]:
    """The settings of `[Service]`, each with its values in order."""
    settings: dict[str, list[str]] = {}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def system_calls(filters: list[str]) -> set[str]:
    """The calls that `SystemCallFilter=` lines leave; the first is a list of what is allowed."""
    allowed: set[str] = set()
    for text in filters:
        names = {call for name in text.removeprefix("~").split() for call in _expanded(name)}
        allowed = allowed - names if text.startswith("~") else allowed | names
    return allowed


def _expanded(name: str) -> set[str]:
    if not name.startswith("@"):
        return {name}
    command = ["systemd-analyze", "syscall-filter", "--no-pager", name]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = re.findall(r"^    (@?[a-z_0-9-]+)$", re.sub(r"\x1b\[[0-9;]*m", "", text), re.MULTILINE)
    return {call for word in words for call in _expanded(word)}


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind)]
    _check(LIBC.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def confine_files(writable: list[Path], proc: str) -> None:
    """A view of the files in which only `writable` folders can be written, and nothing in them be executed."""
    _check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET), "unshare")
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    kept = [os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES]
    for folder in writable:
        _mount(str(folder), str(folder), "", MS_BIND)
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in sorted({place.encode().decode("unicode_escape") for place in places}):
        own = Path(place) in writable
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC if own else MS_RDONLY | MS_NOSUID
        with contextlib.suppress(OSError):  # what is covered by another mount cannot be reached, nor remounted
            _mount("none", place, "", MS_REMOUNT | MS_BIND | flags)
    _mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755")
    for name, fd in zip(DEVICES, kept, strict=True):
        Path(f"/dev/{name}").touch()
        _mount(f"/proc/self/fd/{fd}", f"/dev/{name}", "", MS_BIND)
        os.close(fd)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, proc)


def drop_capabilities() -> None:
    """All, also those that a program of root's would get."""
    for number in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0 and ctypes.get_errno() != errno.EINVAL:
            _check(-1, "capabilities")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


class _Argument(ctypes.Structure):
    """struct scmp_arg_cmp of libseccomp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Seccomp:
    """A filter of libseccomp."""

    def __init__(self, default: int) -> None:
        name = ctypes.util.find_library("seccomp")
        assert name is not None, "no libseccomp"
        self._lib = ctypes.CDLL(name, use_errno=True)
        self._lib.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._lib.seccomp_init(default))

    def add(self, action: int, call: str, *arguments: tuple[int, int, int, int]) -> None:
        """A rule; calls that this machine does not have are left out."""
        number = self._lib.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            return
        array = (_Argument * max(1, len(arguments)))(*(_Argument(*each) for each in arguments))
        result = self._lib.seccomp_rule_add_array(self._context, ctypes.c_uint32(action), number, len(arguments), array)
        assert result in {0, -errno.EEXIST}, (call, result)

    def load(self) -> None:
        assert self._lib.seccomp_load(self._context) == 0


def filter_calls(settings: dict[str, list[str]]) -> None:
    """seccomp as the settings say. Rules with conditions first: the list may not allow seccomp(2) itself."""
    eperm = ERRNO | errno.EPERM
    rules = Seccomp(ALLOW)
    if settings.get("MemoryDenyWriteExecute") == ["yes"]:  # as systemd has it (seccomp-util.c)
        rules.add(eperm, "mmap", (2, MASKED_EQ, 6, 6))
        for call in ("mprotect", "pkey_mprotect"):
            rules.add(eperm, call, (2, MASKED_EQ, 4, 4))
        rules.add(eperm, "shmat", (2, MASKED_EQ, 0o100000, 0o100000))
    if "RestrictAddressFamilies" in settings:
        assert settings["RestrictAddressFamilies"] == ["AF_UNIX"]
        rules.add(ERRNO | errno.EAFNOSUPPORT, "socket", (0, NE, 1, 0))
        rules.add(ERRNO | errno.EAFNOSUPPORT, "socketpair", (0, NE, 1, 0))
    if settings.get("RestrictNamespaces") == ["yes"]:
        rules.add(ERRNO | errno.ENOSYS, "clone3")
        for bit in (1 << number for number in range(32) if NAMESPACES >> number & 1):
            rules.add(eperm, "unshare", (0, MASKED_EQ, bit, bit))
            rules.add(eperm, "clone", (0, MASKED_EQ, bit, bit))
        rules.add(eperm, "setns")
    if settings.get("RestrictRealtime") == ["yes"]:
        for policy in (1, 2, 6):
            rules.add(eperm, "sched_setscheduler", (1, EQ, policy, 0))
    if settings.get("RestrictSUIDSGID") == ["yes"]:
        for call, place in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2)):
            for bit in (stat.S_ISUID, stat.S_ISGID):
                rules.add(eperm, call, (place, MASKED_EQ, bit, bit))
    if settings.get("LockPersonality") == ["yes"]:
        rules.add(eperm, "personality", (0, NE, 0, 0))
    listed = Seccomp(eperm)
    calls = system_calls(settings["SystemCallFilter"])
    for call in calls | {"execve", "exit", "exit_group", "rt_sigreturn", "seccomp", "prctl"}:
        listed.add(ALLOW, call)
    rules.load()
    listed.load()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--unit", type=Path, required=True)
    parser.add_argument("--writable", type=Path, action="append", default=[])
    parser.add_argument("--proc", default="hidepid=2")
    parser.add_argument("--socket", type=int, help="a descriptor that becomes the one of socket activation")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    settings = read_service(given.unit)
    confine_files(given.writable, given.proc)
    for name, value in (("NOFILE", 1024), ("MEMLOCK", 0), ("CORE", 0)):
        assert settings[f"Limit{name}"] == [str(value)]
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.umask(int(settings["UMask"][0], 8))
    drop_capabilities()
    _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if settings.get("MemoryDenyWriteExecute") == ["yes"] and LIBC.prctl(PR_SET_MDWE, 1, 0, 0, 0) != 0:
        print("confinement: this kernel has no PR_SET_MDWE; seccomp alone stands for it", file=sys.stderr)
    filter_calls(settings)
    if given.socket is not None:
        os.dup2(given.socket, 3)
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    command = given.command
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

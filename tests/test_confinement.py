"""The daemon with a real model under the restrictions of its unit, which are read from the unit."""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeqwen.client import Client
from edgeqwen.cpu import read_processor
from tests.confinement import APPLIED, ELSEWHERE, read_service, system_calls
from tests.daemons import HANG_GUARD_S, script_of, write_text_model
from tests.models import smollm2_gguf, smollm2_package
from tests.runtimes import needs_torch

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "systemd/system/edgeqwen.service"
RESTRICTIONS = (
    *("Private", "Protect", "Restrict", "SystemCall", "Capability", "Ambient", "NoNew", "NoExec", "Memory", "Lock"),
    *("Device", "IPAddress", "RemoveIPC", "Keyring", "Proc", "Limit", "UMask", "User", "Group", "StateDirectory"),
)
AMOUNTS = {"MemoryHigh", "MemoryMax", "MemorySwapMax", "StateDirectoryMode"}

needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or ctypes.util.find_library("seccomp") is None
    or shutil.which("systemd-analyze") is None
    or not Path("/proc/self/ns/net").exists(),
    reason="needs root, libseccomp and systemd-analyze",
)


@dataclass(eq=False)
class Confined:
    process: subprocess.Popen[bytes]
    path: Path
    folder: Path
    notified: list[str]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait_for(self, text: str) -> None:
        """Until it has been notified."""
        give_up_at = time.monotonic() + 4 * HANG_GUARD_S
        while not any(text in each for each in self.notified):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.02)


@contextlib.contextmanager
def confined_daemon(*flags: str, proc: str = "hidepid=2", affinity: str = "", unit: Path = UNIT) -> Iterator[Confined]:
    """A daemon that is given its socket, as by the manager, under the restrictions of the unit."""
    with tempfile.TemporaryDirectory(prefix="eq-confined-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        state, config = folder / "state", folder / "edgeqwen.toml"
        state.mkdir()
        config.write_text("")
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.bind(str(folder / "s"))
        sock.listen()
        notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        notify.bind(str(folder / "notify"))
        command = [sys.executable, "-m", "tests.confinement", "--unit", str(unit), "--writable", str(state)]
        command += ["--proc", proc, "--socket", str(sock.fileno()), "--"]
        command += [sys.executable, "-m", "edgeqwen", "serve", "--config", str(config), *flags]
        if affinity:
            command = ["taskset", "-c", affinity, *command]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EDGEQWEN_")}
        environ |= {"STATE_DIRECTORY": str(state), "NOTIFY_SOCKET": str(folder / "notify")}
        environ |= {"WATCHDOG_USEC": "20000000", "PYTHONDONTWRITEBYTECODE": "1"}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                pass_fds=(sock.fileno(),),
            )
        confined = Confined(process, folder / "s", folder, [])
        threading.Thread(target=_listen, args=(notify, confined.notified), daemon=True).start()
        try:
            yield confined
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                notify.shutdown(socket.SHUT_RD)


def _listen(notify: socket.socket, notified: list[str]) -> None:
    with contextlib.suppress(OSError):
        while data := notify.recv(4096):
            notified.append(data.decode())


def test_all_restrictions_of_the_unit_are_imitated_or_known_not_to_be() -> None:
    names = {name for name in read_service(UNIT) if name.startswith(RESTRICTIONS)} - AMOUNTS
    assert names - APPLIED.keys() - ELSEWHERE.keys() == set()


@needs_root
def test_what_is_left_of_the_system_calls_is_enough_and_no_more_than_meant() -> None:
    calls = system_calls(read_service(UNIT)["SystemCallFilter"])
    assert {"read", "sendmsg", "sched_setaffinity", "futex", "mmap", "accept4"} <= calls
    assert not {"io_uring_setup", "mount", "ptrace", "bpf", "reboot", "keyctl", "mlock", "chroot"} & calls


@needs_root
def test_the_restrictions_hold(tmp_path: Path) -> None:
    """Else the other tests would show nothing."""
    probe = f"""
import ctypes, errno, json, mmap, os, socket
found = {{}}
def note(name, call):
    try: call(); found[name] = "done"
    except OSError as error: found[name] = errno.errorcode[error.errno]
note("write", lambda: open({str(tmp_path / "other")!r}, "w"))
note("network", lambda: socket.socket(socket.AF_INET))
note("wx", lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))
note("suid", lambda: os.chmod({str(tmp_path / "own/file")!r}, 0o4700))
note("own", lambda: open({str(tmp_path / "own/file")!r}, "w").write("x"))
note("chown", lambda: os.chown({str(tmp_path / "own/file")!r}, 1234, 1234))
libc = ctypes.CDLL(None, use_errno=True)
for name, number in (("io_uring", 425), ("unshare", 272)):
    found[name] = "done" if libc.syscall(number, 0x10000000, 0) == 0 else errno.errorcode[ctypes.get_errno()]
found["devices"] = sorted(os.listdir("/dev"))
found["caps"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd"))]
print(json.dumps(found))
"""
    own = tmp_path / "own"
    own.mkdir()
    (own / "file").touch()
    command = [sys.executable, "-m", "tests.confinement", "--unit", str(UNIT), "--writable", str(own), "--"]
    done = subprocess.run([*command, sys.executable, "-c", probe], cwd=ROOT, capture_output=True, check=False)
    found = json.loads(done.stdout or "{}")
    assert found == {
        "write": "EROFS",
        "network": "EAFNOSUPPORT",
        "wx": found.get("wx"),
        "suid": "EPERM",
        "own": "done",
        "chown": "EPERM",
        "io_uring": "EPERM",
        "unshare": "EPERM",
        "devices": sorted(["full", "null", "random", "tty", "urandom", "zero"]),
        "caps": ["0" * 16, "0" * 16],
    }, done.stderr
    assert found["wx"] in {"EPERM", "EACCES"}


@needs_root
def test_the_daemon_does_its_work_under_them() -> None:
    model = smollm2_package("int8")
    with confined_daemon("--model", str(model)) as daemon:
        daemon.wait_for("READY=1")
        with Client.connect(daemon.path) as client:
            session = client.session_create()
            text = client.chat("What is the capital of France?", session=session, temperature=0, max_tokens=20).text
            assert "Paris" in text
            assert client.stats()["session_files"] == {"on_disk": True, "unsaved": 0, "damaged": 0, "later_version": 0}
            form = {"type": "regex", "regex": "(yes|no)"}
            assert client.chat("Is water wet?", response_format=form, max_tokens=5).text in {"yes", "no"}
        with socket.socket(socket.AF_UNIX) as http:
            http.settimeout(HANG_GUARD_S)
            http.connect(str(daemon.path))
            http.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            with http.makefile("rb") as answer:
                assert answer.readline().startswith(b"HTTP/1.1 200")
        assert list((daemon.folder / "state/sessions").rglob("*"))
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("RELOADING=1")
        daemon.wait_for("WATCHDOG=1")
        daemon.process.terminate()
        assert daemon.process.wait(HANG_GUARD_S) == 0
        assert "Traceback" not in daemon.log
        assert "EPERM" not in daemon.log


@needs_root
def test_a_proc_without_the_processor_in_it_is_noticed(tmp_path: Path) -> None:
    with confined_daemon("--model", str(smollm2_package("int8")), proc="subset=pid") as daemon:
        daemon.wait_for("READY=1")
        assert "WARNING /proc/cpuinfo cannot be read" in daemon.log
        assert "ProcSubset=all" in daemon.log


@needs_root
def test_it_computes_on_the_cores_that_it_may_use(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    flags = ("--model", str(write_text_model(tmp_path / "m")), "--runtime", script_of("x"))
    with confined_daemon(*flags, affinity=str(first)) as daemon:
        daemon.wait_for("READY=1")
        assert "threads decode=1 prefill=1 " in daemon.log


@needs_root
def test_torch_says_which_setting_is_in_its_way(tmp_path: Path) -> None:
    """Where bf16 is not computed in hardware nothing is in its way."""
    needs_torch()
    if not read_processor().computes_bf16:
        pytest.skip("this processor computes in fp32, which needs no code of its own")
    with confined_daemon("--model", str(smollm2_gguf()), "--runtime", "torch") as daemon:
        assert daemon.process.wait(4 * HANG_GUARD_S) == 78
        last = daemon.log.strip().splitlines()[-1]
        assert "MemoryDenyWriteExecute=no (the drop-in jit.conf)" in last


@needs_root
def test_with_the_drop_in_torch_does_its_work_under_the_restrictions(tmp_path: Path) -> None:
    needs_torch()
    drop_in = (ROOT / "systemd/drop-ins/jit.conf").read_text(encoding="utf-8")
    assert "MemoryDenyWriteExecute=no" in drop_in
    unit = tmp_path / "edgeqwen.service"
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("MemoryDenyWriteExecute=yes", "MemoryDenyWriteExecute=no"))
    with confined_daemon("--model", str(smollm2_gguf()), "--runtime", "torch", unit=unit) as daemon:
        daemon.wait_for("READY=1")
        with Client.connect(daemon.path) as client:
            assert "Paris" in client.chat("What is the capital of France?", temperature=0, max_tokens=20).text
        daemon.process.terminate()
        assert daemon.process.wait(HANG_GUARD_S) == 0
        assert "Traceback" not in daemon.log


@needs_root
def test_torch_without_the_processor_in_proc_says_how_slow_it_is(tmp_path: Path) -> None:
    needs_torch()
    flags = ("--model", str(smollm2_gguf()), "--runtime", "torch", "--torch-weights", "fp32")
    with confined_daemon(*flags, proc="subset=pid") as daemon:
        daemon.wait_for("READY=1")
        assert "torch computes without vector units" in daemon.log
        assert "ProcSubset=all" in daemon.log

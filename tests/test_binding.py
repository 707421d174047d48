"""Binding the socket: what may stand at the path, who may see it, and that two daemons cannot share it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeqwen.errors import ConfigInvalid
from edgeqwen.protocol.address import MAX_PATH_BYTES
from edgeqwen.server import binding
from edgeqwen.server.binding import BoundSocket, bind_socket
from edgeqwen.server.lock_file import LockFile

HOLD = """
import sys, time
from edgeqwen.server.binding import bind_socket
bound = bind_socket(sys.argv[1])
print("bound", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def bound(folder: Path) -> Iterator[BoundSocket]:
    bound = bind_socket(folder / "s.sock")
    yield bound
    bound.close()


def fault_of(path: Path) -> ConfigInvalid:
    with pytest.raises(ConfigInvalid) as caught:
        bind_socket(path)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 78
    return caught.value


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_socket_listens_with_mode_0600(folder: Path, bound: BoundSocket) -> None:
    assert mode_of(folder / "s.sock") == 0o600
    assert can_connect(folder / "s.sock")
    assert sorted(path.name for path in folder.iterdir()) == ["s.sock", "s.sock.lock"]


def test_socket_of_a_group_has_mode_0660(folder: Path) -> None:
    bound = bind_socket(folder / "s.sock", group=os.getgid())
    assert mode_of(folder / "s.sock") == 0o660
    assert (folder / "s.sock").stat().st_gid == os.getgid()
    bound.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_mode_does_not_depend_on_the_umask(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        bound = bind_socket(folder / "s.sock")
    finally:
        os.umask(before)
    assert mode_of(folder / "s.sock") == 0o600
    bound.close()


def test_at_no_moment_is_a_socket_wider_than_0660(folder: Path) -> None:
    widest: set[int] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            for entry in os.scandir(folder):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISSOCK(status.st_mode):
                    widest.add(stat.S_IMODE(status.st_mode))

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = os.umask(0)
    try:
        num_starts = 0
        while num_starts < 200 or (not widest and num_starts < 20_000):  # until the watcher has had its turn
            bind_socket(folder / "s.sock", group=os.getgid()).close()
            num_starts += 1
    finally:
        os.umask(before)
        is_over.set()
        watcher.join()
    assert widest
    assert not any(mode & ~0o660 for mode in widest)


def test_a_missing_parent_is_named(folder: Path) -> None:
    assert str(folder / "a") in fault_of(folder / "a" / "b" / "s.sock").message


def test_close_removes_the_socket_and_keeps_the_lock_file(folder: Path) -> None:
    bind_socket(folder / "s.sock").close()
    assert list(folder.iterdir()) == []


def test_close_leaves_a_socket_that_is_not_ours(folder: Path) -> None:
    bound = bind_socket(folder / "s.sock")
    os.unlink(folder / "s.sock")
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(folder / "s.sock"))
    bound.close()
    assert (folder / "s.sock").exists()
    other.close()


@pytest.mark.parametrize("char", ["a", "é"])
def test_path_length_counts_in_bytes(folder: Path, char: str) -> None:
    room = MAX_PATH_BYTES - len(os.fsencode(folder)) - 1
    name = char * (room // len(char.encode())) + "b" * (room % len(char.encode()))
    assert len(os.fsencode(folder / name)) == MAX_PATH_BYTES == 107
    bound = bind_socket(folder / name)
    assert can_connect(folder / name)
    bound.close()
    message = fault_of(folder / f"{name}x").message
    assert str(folder / name) in message
    assert "108 bytes" in message
    assert "107" in message


def test_second_instance_is_already_running(folder: Path, bound: BoundSocket) -> None:
    assert "already running" in fault_of(folder / "s.sock").message
    assert can_connect(folder / "s.sock")


def test_live_socket_of_somebody_without_a_lock_is_already_running(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "s.sock"))
        other.listen()
        assert "already running" in fault_of(folder / "s.sock").message


def test_stale_socket_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "s.sock"))
    bound = bind_socket(folder / "s.sock")
    assert can_connect(folder / "s.sock")
    bound.close()


def test_killed_daemon_leaves_nothing_in_the_way(folder: Path) -> None:
    path = folder / "s.sock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"bound\n"
        assert "already running" in fault_of(path).message
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    bound = bind_socket(path)
    assert can_connect(path)
    bound.close()


def test_regular_file_symlink_and_folder_are_refused(folder: Path) -> None:
    (folder / "file").write_text("precious")
    (folder / "link").symlink_to(folder / "elsewhere.sock")
    (folder / "dir").mkdir()
    for name in ("file", "link", "dir"):
        assert "not a socket" in fault_of(folder / name).message
    assert (folder / "file").read_text() == "precious"
    assert (folder / "link").is_symlink()


def test_refusal_leaves_nothing_behind(folder: Path, bound: BoundSocket) -> None:
    (folder / "file").write_text("precious")
    (folder / "dir").mkdir()
    before = sorted(folder.iterdir())
    for name in ("file", "dir", "s.sock", "missing/s.sock", "file/s.sock"):
        fault_of(folder / name)
        assert sorted(folder.iterdir()) == before


def test_missing_folder_is_named_with_the_command_that_makes_it(folder: Path) -> None:
    assert f"mkdir -m 700 {folder}/new" in fault_of(folder / "new" / "s.sock").message
    assert f"mkdir -p -m 700 '{folder}/a b/c'" in fault_of(folder / "a b" / "c" / "s.sock").message


def test_systems_own_folder_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "MADE_FOLDER", str(folder / "run"))
    bind_socket(folder / "run" / "s.sock").close()
    assert mode_of(folder / "run") == 0o750 & ~current_umask()


def test_lock_file_left_by_a_killed_daemon_is_used_and_removed(folder: Path) -> None:
    (folder / "s.sock.lock").touch()
    bind_socket(folder / "s.sock").close()
    assert list(folder.iterdir()) == []


def test_file_of_somebody_in_the_lock_files_place_stays(folder: Path) -> None:
    (folder / "s.sock.lock").write_text("precious")
    bind_socket(folder / "s.sock").close()
    assert (folder / "s.sock.lock").read_text() == "precious"


def test_lock_of_a_file_that_has_been_removed_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first holder ends between another's open and its flock: the other has to lock the file that is there then."""
    folder_fd = os.open(folder, os.O_RDONLY)
    first = LockFile.acquire(str(folder / "lock"), folder_fd=folder_fd)
    assert first is not None
    flock, holders = fcntl.flock, [first]

    def end_first(fd: int, how: int) -> None:
        if holders:
            holders.pop().release()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", end_first)
    second = LockFile.acquire(str(folder / "lock"), folder_fd=folder_fd)
    assert second is not None
    assert os.fstat(second.fd).st_ino == (folder / "lock").stat().st_ino
    assert LockFile.acquire(str(folder / "lock"), folder_fd=folder_fd) is None
    second.release()
    assert not (folder / "lock").exists()
    os.close(folder_fd)


def test_lock_file_that_is_a_symlink_is_refused(folder: Path) -> None:
    (folder / "s.sock.lock").symlink_to(folder / "target")
    assert "lock file" in fault_of(folder / "s.sock").message
    assert not (folder / "target").exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_folder_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(mode)
    assert "written by others" in fault_of(folder / "open" / "s.sock").message
    assert list((folder / "open").iterdir()) == []


def test_private_folder_below_a_world_writable_one_is_fine(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o1777)
    (folder / "open" / "mine").mkdir(mode=0o700)
    bound = bind_socket(folder / "open" / "mine" / "s.sock")
    assert (folder / "open" / "mine" / "s.sock").is_socket()
    bound.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_foreign_folder_socket_and_link_are_refused(folder: Path) -> None:
    (folder / "theirs").mkdir(mode=0o755)
    os.chown(folder / "theirs", 1001, 1001)
    assert "belongs to uid 1001" in fault_of(folder / "theirs" / "s.sock").message
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "s.sock"))
    os.chown(folder / "s.sock", 1001, 1001)
    assert "socket of uid 1001" in fault_of(folder / "s.sock").message
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    bind_socket(folder / "link" / "s.sock").close()
    os.lchown(folder / "link", 1001, 1001)
    assert "symbolic link" in fault_of(folder / "link" / "s.sock").message


def test_unbound_places_leave_no_descriptor_behind(folder: Path) -> None:
    (folder / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        fault_of(folder / "file")
        bind_socket(folder / "s.sock").close()
    assert len(os.listdir("/proc/self/fd")) == before

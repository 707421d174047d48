"""Blocks on disk: found again after a restart, bounded, and never believed when anything is wrong with them."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgeqwen.errors import EXIT_CANNOT_WRITE, CannotWrite
from edgeqwen.kvcache.block_file import BlockHead, block_name, file_bytes
from edgeqwen.kvcache.block_folder import BlockFolder
from edgeqwen.kvcache.claimed_folder import LOCK_FILE
from edgeqwen.kvcache.folder_files import UNFINISHED
from edgeqwen.kvcache.write_budget import FILE_NAME as BUDGET_FILE

FINGERPRINT = "tiny|int8|kv8|3"
PLENTY = 1 << 40


def open_folder(
    root: Path, fingerprint: str = FINGERPRINT, *, max_bytes: int = PLENTY, daily_bytes: int = PLENTY, day: int = 100
) -> BlockFolder:
    return BlockFolder.open(
        root, fingerprint=fingerprint, max_bytes=max_bytes, daily_bytes=daily_bytes, today=lambda: day
    )


def block(seed: int, num_bytes: int = 500, fingerprint: str = FINGERPRINT) -> tuple[BlockHead, bytearray]:
    """A first block, different for each seed, with data that tell which one it is."""
    ids = (seed, seed + 1)
    head = BlockHead(fingerprint, "uid:1000", block_name("", "uid:1000", ids, fingerprint), "", 0, ids, num_bytes)
    return head, bytearray(random.Random(seed).randbytes(num_bytes))


def path_of(folder: BlockFolder, head: BlockHead) -> Path:
    return folder.path / f"{head.name}.kv"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BlockFolder]:
    opened = open_folder(tmp_path)
    yield opened
    opened.check()
    opened.close()


def test_blocks_are_read_back_and_found_after_a_restart(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    blocks = [block(seed, 100 + seed) for seed in range(5)]
    assert all(folder.write(head, data) for head, data in blocks)
    assert [folder.read(head.name) for head, _ in blocks] == [data for _, data in blocks]
    folder.close()
    folder = open_folder(tmp_path)
    assert folder.num_bytes == sum(file_bytes(head) for head, _ in blocks), "known before the scan"
    found = folder.scan()
    assert {each.head.name: each.head for each in found} == {head.name: head for head, _ in blocks}
    assert all(each.num_file_bytes == file_bytes(each.head) for each in found)
    assert [folder.read(head.name) for head, _ in blocks] == [data for _, data in blocks]
    assert (folder.num_files, folder.num_damaged) == (5, 0)
    folder.check()
    folder.close()


def test_a_block_that_is_not_there_is_a_miss(folder: BlockFolder) -> None:
    head, data = block(1)
    assert folder.read(head.name) is None
    assert folder.write(head, data)
    path_of(folder, head).unlink()
    assert folder.read(head.name) is None
    assert (folder.num_files, folder.num_bytes, folder.num_damaged) == (0, 0, 0)
    folder.remove(head.name)


def test_a_removed_block_is_gone_and_its_bytes_with_it(folder: BlockFolder) -> None:
    for seed in (1, 2):
        assert folder.write(*block(seed))
    folder.remove(block(1)[0].name)
    assert folder.read(block(1)[0].name) is None
    assert folder.num_bytes == file_bytes(block(2)[0])
    assert folder.read(block(2)[0].name) == block(2)[1]


def test_a_block_that_is_there_is_not_written_again(folder: BlockFolder) -> None:
    head, data = block(1)
    assert folder.write(head, data)
    os.utime(path_of(folder, head), ns=(0, 0))
    written = folder.written_today_bytes
    assert folder.write(head, data)
    assert folder.written_today_bytes == written == file_bytes(head)
    assert path_of(folder, head).stat().st_mtime_ns > 0, "but it was of use"
    path_of(folder, head).unlink()
    assert folder.write(head, data), "a file that somebody removed is written again"
    assert folder.read(head.name) == data


def test_the_longest_unused_blocks_are_found_first(folder: BlockFolder) -> None:
    heads = [block(seed)[0] for seed in range(4)]
    for seed, age in enumerate([300, 100, 400, 200]):
        assert folder.write(*block(seed))
        os.utime(path_of(folder, heads[seed]), ns=(0, 10**12 - age))
    assert [each.head.ids[0] for each in folder.scan()] == [2, 0, 3, 1]
    assert folder.touch(heads[2].name)
    found = folder.scan()
    assert [each.head.ids[0] for each in found] == [0, 3, 1, 2]
    assert found[0].modified_ns == 10**12 - 300
    assert not folder.touch(block(9)[0].name)


def test_only_the_user_may_look_into_the_folder(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    assert folder.write(*block(1))
    folder.path.chmod(0o755)
    folder.close()
    folder = open_folder(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    for path in folder.path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    folder.close()


def damage_cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_empty(path: Path) -> None:
    os.truncate(path, 0)


def damage_longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def damage_head(path: Path) -> None:
    flip(path, 30)


def damage_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def damage_swapped(path: Path) -> None:
    other = open_folder(path.parent.parent / "other")
    assert other.write(*block(77))
    shutil.copy(path_of(other, block(77)[0]), path)
    other.close()


def damage_foreign(path: Path) -> None:
    other = open_folder(path.parent.parent / "other", "another model")
    assert other.write(*block(1, fingerprint="another model"))
    shutil.copy(path_of(other, block(1, fingerprint="another model")[0]), path)
    other.close()


def damage_link(path: Path) -> None:
    target = path.parent.parent / "target"
    path.rename(target)
    path.symlink_to(target)


def damage_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def damage_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


DAMAGES = [
    damage_cut,
    damage_empty,
    damage_longer,
    damage_head,
    damage_zeros,
    damage_swapped,
    damage_foreign,
    damage_link,
    damage_dangling_link,
    damage_pipe,
]


@pytest.mark.parametrize("is_scanned", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_believed_is_a_miss_and_is_removed(
    tmp_path: Path, damage: Callable[[Path], None], is_scanned: bool
) -> None:
    folder = open_folder(tmp_path)
    (head, data), sound = block(1), block(2)
    for each in ((head, data), sound):
        assert folder.write(*each)
    path = path_of(folder, head)
    damage(path)
    folder.close()
    folder = open_folder(tmp_path)
    if is_scanned:
        assert [each.head for each in folder.scan()] == [sound[0]]
    else:
        assert folder.read(head.name) is None
    assert not os.path.lexists(path)
    assert (folder.num_damaged, folder.num_files) == (1, 1)
    folder.check()
    assert folder.read(sound[0].name) == sound[1], "others are not touched"
    assert folder.write(head, data), "it can be written anew"
    assert folder.read(head.name) == data
    folder.close()


def test_a_block_of_another_model_is_not_believed_under_its_own_name_either(
    tmp_path: Path, folder: BlockFolder
) -> None:
    head, data = block(1, fingerprint="another model")
    other = open_folder(tmp_path / "other", "another model")
    assert other.write(head, data)
    for _ in range(2):
        shutil.copy(path_of(other, head), path_of(folder, head))
        assert folder.read(head.name) is None
        assert not path_of(folder, head).exists()
    other.close()
    assert folder.num_damaged == 2


def test_what_a_link_points_to_is_neither_read_nor_removed(tmp_path: Path, folder: BlockFolder) -> None:
    head, data = block(1)
    assert folder.write(head, data)
    damage_link(path_of(folder, head))
    target = tmp_path / "target"
    assert folder.read(head.name) is None
    assert data in target.read_bytes()


def test_changed_data_are_noticed_when_they_are_read(folder: BlockFolder) -> None:
    head, data = block(1, 100_000)
    assert folder.write(head, data)
    flip(path_of(folder, head), file_bytes(head) - 1)
    assert [each.head for each in folder.scan()] == [head], "a scan reads heads only"
    assert folder.read(head.name) is None
    assert (folder.num_damaged, folder.num_files) == (1, 0)


@given(st.data())
def test_a_read_gives_what_was_written_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = open_folder(tmp_path_factory.mktemp("blocks"))
    head, written = block(1, 40)
    assert folder.write(head, written)
    path = path_of(folder, head)
    file = bytearray(path.read_bytes())
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(file))] * 2)))
    file[start:stop] = data.draw(st.binary(max_size=30))
    is_same = bytes(file) == path.read_bytes()
    path.write_bytes(file)
    assert folder.read(head.name) == (written if is_same else None)
    folder.check()
    folder.close()


def test_an_error_of_the_card_is_a_miss_and_the_file_goes(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    head, data = block(1)
    assert folder.write(head, data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        assert folder.read(head.name) is None
    assert not path_of(folder, head).exists()
    assert folder.num_damaged == 1


def test_a_file_is_kept_if_it_is_the_process_that_cannot_open_more(
    folder: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, data = block(1)
    assert folder.write(head, data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.EMFILE))
        assert folder.read(head.name) is None
        assert folder.scan() == []
    assert folder.num_damaged == 0
    assert folder.read(head.name) == data


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_what_is_not_a_block_is_left_alone(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    name = block(1)[0].name
    others = ["notes.txt", "x.kv", f"{name}.kv.bak", f"{name.upper()}.kv", f"{name}0.kv", f"{name}.KV", f"{name}.kv\n"]
    for other in others:
        (folder.path / other).write_text("mine")
    folder.close()
    folder = open_folder(tmp_path)
    assert folder.scan() == []
    assert (folder.num_files, folder.num_bytes, folder.num_damaged) == (0, 0, 0)
    assert all((folder.path / other).read_text() == "mine" for other in others)
    folder.close()


def test_a_folder_in_the_place_of_a_block_stays_and_is_named_when_it_is_in_the_way(folder: BlockFolder) -> None:
    head, data = block(1)
    path_of(folder, head).mkdir()
    (path_of(folder, head) / "mine").write_text("mine")
    assert folder.scan() == []
    assert folder.read(head.name) is None
    with pytest.raises(CannotWrite, match=str(folder.path)):
        folder.write(head, data)
    assert (path_of(folder, head) / "mine").exists()
    assert not (folder.path / UNFINISHED).exists()
    assert folder.num_files == 0


def test_the_size_is_bounded_until_the_caller_makes_room(tmp_path: Path) -> None:
    (head, data), (other, other_data) = block(1), block(2)
    folder = open_folder(tmp_path, max_bytes=2 * file_bytes(head) - 1)
    assert folder.excess_bytes(head) == 0
    assert folder.write(head, data)
    written = folder.written_today_bytes
    assert folder.excess_bytes(other) == 1
    assert not folder.write(other, other_data)
    assert folder.written_today_bytes == written, "a refusal costs no budget"
    folder.remove(head.name)
    assert folder.write(other, other_data)
    folder.check()
    folder.close()


def test_what_a_larger_bound_left_is_all_found(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for seed in range(6):
        assert folder.write(*block(seed))
    folder.close()
    size = file_bytes(block(0)[0])
    folder = open_folder(tmp_path, max_bytes=2 * size)
    found = folder.scan()
    assert len(found) == 6
    for each in found[: folder.num_files - 2]:
        folder.remove(each.head.name)
    assert folder.num_bytes == 2 * size
    assert not folder.write(*block(9))
    folder.close()


def test_a_day_has_so_many_bytes_and_a_restart_no_more(tmp_path: Path) -> None:
    size = file_bytes(block(1)[0])
    folder = open_folder(tmp_path, daily_bytes=2 * size)
    assert folder.write(*block(1))
    folder.remove(block(1)[0].name)
    folder.close()
    folder = open_folder(tmp_path, daily_bytes=2 * size)
    assert folder.left_today_bytes == size
    assert folder.write(*block(2))
    assert not folder.write(*block(3))
    assert folder.read(block(2)[0].name) is not None, "reading goes on"
    folder.close()
    folder = open_folder(tmp_path, daily_bytes=2 * size, day=101)
    assert folder.write(*block(3))
    folder.close()


def test_models_that_take_turns_share_the_days_budget(tmp_path: Path) -> None:
    size = file_bytes(block(1)[0])
    folder = open_folder(tmp_path, daily_bytes=10 * size)
    assert folder.write(*block(1))
    folder.close()
    folder = open_folder(tmp_path, "another model", daily_bytes=10 * size)
    assert folder.written_today_bytes == size
    folder.close()
    folder = open_folder(tmp_path, daily_bytes=10 * size)
    assert folder.written_today_bytes == size
    assert folder.scan() == []
    folder.close()


def test_blocks_of_another_model_go_and_what_else_is_there_stays(tmp_path: Path) -> None:
    old = open_folder(tmp_path, "old model")
    assert old.write(*block(1, fingerprint="old model"))
    (old.path / UNFINISHED).write_bytes(b"half")
    old.close()
    (tmp_path / "0123456789abcdef").symlink_to(old.path)
    (tmp_path / "sessions").mkdir()
    (tmp_path / "fedcba9876543210").write_text("a file")
    folder = open_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([
        "0123456789abcdef",
        "sessions",
        "fedcba9876543210",
        folder.path.name,
    ])
    folder.close()


def test_a_foreign_folder_with_somebodys_file_loses_only_its_blocks(tmp_path: Path) -> None:
    old = open_folder(tmp_path, "old model")
    assert old.write(*block(1, fingerprint="old model"))
    (old.path / "notes.txt").write_text("mine")
    old.close()
    open_folder(tmp_path).close()
    assert [path.name for path in old.path.iterdir()] == ["notes.txt"]


def test_a_live_daemon_of_another_model_keeps_its_blocks(tmp_path: Path) -> None:
    live = open_folder(tmp_path, "live model")
    head, data = block(1, fingerprint="live model")
    assert live.write(head, data)
    folder = open_folder(tmp_path)
    assert live.read(head.name) == data
    folder.close()
    live.check()
    live.close()


HOLDER = """
import sys, pathlib
from edgeqwen.kvcache.block_folder import BlockFolder
folder = BlockFolder.open(
    pathlib.Path(sys.argv[1]), fingerprint=sys.argv[2], max_bytes=1 << 40, daily_bytes=1 << 40, today=lambda: 100
)
print("open", flush=True)
sys.stdin.read()
"""

WRITER = """
import pathlib, sys
from tests.test_block_folder import block, open_folder
folder = open_folder(pathlib.Path(sys.argv[1]))
for seed in range(100_000):
    folder.write(*block(seed, 200_000))
    print(seed, flush=True)
"""


@contextlib.contextmanager
def running(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line."""
    root = Path(__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "the other process did not start"
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_folder_that_another_daemon_uses_is_refused_until_that_ends(tmp_path: Path) -> None:
    with running(HOLDER, str(tmp_path), FINGERPRINT) as holder:
        with pytest.raises(CannotWrite, match="in use by another daemon") as caught:
            open_folder(tmp_path)
        assert str(tmp_path) in caught.value.message
        assert caught.value.exit_code == EXIT_CANNOT_WRITE
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        folder = open_folder(tmp_path)
        folder.close()


def test_a_closed_folder_can_be_opened_again_and_leaves_no_descriptor(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        folder = open_folder(tmp_path)
        assert folder.write(*block(1))
        with pytest.raises(CannotWrite):
            open_folder(tmp_path)
        assert len(folder.scan()) == 1
        folder.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_lock_that_was_removed_with_its_folder_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon of another model removes the folder between the opening of the lock and its locking."""
    real_open = os.open
    removed: list[Path] = []

    def open_and_lose(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real_open(path, flags, mode, dir_fd=dir_fd)
        if path == LOCK_FILE and not removed:
            (lost,) = tmp_path.iterdir()
            shutil.rmtree(lost)
            removed.append(lost)
        return fd

    monkeypatch.setattr(os, "open", open_and_lose)
    folder = open_folder(tmp_path)
    assert removed == [folder.path]
    assert folder.write(*block(1))
    with pytest.raises(CannotWrite, match="in use"):
        open_folder(tmp_path)
    folder.check()
    folder.close()


def test_what_a_killed_daemon_leaves_is_whole_blocks_and_no_trace_of_the_others(tmp_path: Path) -> None:
    for round_number in range(3):
        with running(WRITER, str(tmp_path)) as writer:
            assert writer.stdout is not None
            for _ in range(10 * round_number + 3):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            writer.wait(60)
        folder = open_folder(tmp_path)
        found = folder.scan()
        assert len(found) >= 3
        for each in found:
            assert folder.read(each.head.name) == block(each.head.ids[0], 200_000)[1]
        assert folder.num_damaged == 0
        assert not (folder.path / UNFINISHED).exists()
        assert folder.written_today_bytes >= folder.num_bytes, "all that was written is counted"
        folder.check()
        folder.close()


def test_half_of_a_block_left_by_a_killed_daemon_is_removed_and_in_nobodys_way(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    assert folder.write(*block(1))
    half = path_of(folder, block(1)[0]).read_bytes()[:300]
    (folder.path / UNFINISHED).write_bytes(half)
    folder.close()
    folder = open_folder(tmp_path)
    assert not (folder.path / UNFINISHED).exists()
    (folder.path / UNFINISHED).write_bytes(bytes(10_000))
    assert folder.write(*block(2))
    assert folder.read(block(2)[0].name) == block(2)[1]
    folder.close()


def test_a_disk_that_fills_up_in_the_middle_of_a_block_leaves_nothing_of_it(folder: BlockFolder) -> None:
    """The kernel cuts the file off at a limit and refuses the rest, as it does on a full disk."""
    head, data = block(1, 1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        with pytest.raises(CannotWrite, match=str(folder.path)):
            folder.write(head, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in folder.path.iterdir()) == sorted([LOCK_FILE, BUDGET_FILE])
    assert (folder.num_files, folder.num_bytes) == (0, 0)
    assert folder.written_today_bytes == file_bytes(head), "part of it may be on the device"
    assert folder.write(head, data)
    assert folder.read(head.name) == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "write", "rename", "pwrite"])
def test_an_error_of_the_disk_is_named_and_passes(
    folder: BlockFolder, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    assert folder.write(*block(1))
    written = folder.written_today_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        with pytest.raises(CannotWrite, match=os.strerror(number)) as caught:
            folder.write(*block(2))
    assert str(folder.path) in caught.value.message
    folder.check()
    assert not (folder.path / UNFINISHED).exists()
    assert (folder.written_today_bytes == written) == (call == "pwrite"), "what cannot be counted is not written"
    assert folder.write(*block(2))
    assert folder.read(block(1)[0].name) == block(1)[1]


def test_a_read_only_disk_is_read_from(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (head, data), (bad, bad_data) = block(1), block(2)
    assert folder.write(head, data)
    assert folder.write(bad, bad_data)
    damage_cut(path_of(folder, bad))
    with monkeypatch.context() as patch:
        for call in ("unlink", "utime", "pwrite"):
            patch.setattr(os, call, failing(errno.EROFS))
        assert folder.read(head.name) == data
        assert folder.read(bad.name) is None
        assert folder.touch(head.name)
        assert [each.head for each in folder.scan()] == [head]
        with pytest.raises(CannotWrite):
            folder.remove(head.name)
        with pytest.raises(CannotWrite):
            folder.write(*block(3))
        assert folder.num_files == 2, "what cannot be removed still takes its place"
    assert folder.read(bad.name) is None
    assert folder.num_files == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CannotWrite, match=str(tmp_path)):
        open_folder(tmp_path)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_made_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "mkdir", failing(number))
    with pytest.raises(CannotWrite, match=os.strerror(number)) as caught:
        open_folder(tmp_path / "cache")
    assert str(tmp_path / "cache") in caught.value.message


def test_a_file_or_a_link_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(CannotWrite, match="file"):
        open_folder(tmp_path / "file")
    folder = open_folder(tmp_path / "root")
    folder.close()
    elsewhere = folder.path.rename(tmp_path / "elsewhere")
    folder.path.symlink_to(elsewhere)
    with pytest.raises(CannotWrite, match=folder.path.name):
        open_folder(tmp_path / "root")


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder(tmp_path).close()
    monkeypatch.setattr(os, "geteuid", lambda: 424242)
    with pytest.raises(CannotWrite, match="belongs to uid"):
        open_folder(tmp_path)


def test_a_failed_opening_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        before = os.listdir("/proc/self/fd")
        with pytest.raises(CannotWrite, match=os.strerror(errno.ENOSPC)):
            open_folder(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == len(before)
    open_folder(tmp_path).close()


class FolderMachine(RuleBasedStateMachine):
    """Random operations, restarts and damage; a model in memory says what must be read."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="edgeqwen-blocks-"))
        self.size = file_bytes(block(1)[0])
        self.known: set[int] = set()
        self.written = 0
        self.day = 100
        self.folder = self.opened()

    def opened(self) -> BlockFolder:
        return BlockFolder.open(
            self.root,
            fingerprint=FINGERPRINT,
            max_bytes=4 * self.size,
            daily_bytes=9 * self.size,
            today=lambda: self.day,
        )

    @rule(seed=st.integers(1, 8))
    def write(self, seed: int) -> None:
        is_free = seed in self.known
        fits = len(self.known) < 4 and self.written < 9
        assert self.folder.write(*block(seed)) == (is_free or fits)
        if not is_free and fits:
            self.known.add(seed)
            self.written += 1

    @rule(seed=st.integers(1, 8))
    def read(self, seed: int) -> None:
        assert self.folder.read(block(seed)[0].name) == (block(seed)[1] if seed in self.known else None)

    @rule(seed=st.integers(1, 8))
    def remove(self, seed: int) -> None:
        self.folder.remove(block(seed)[0].name)
        self.known.discard(seed)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def damage_and_read(self, data: st.DataObject) -> None:
        seed = data.draw(st.sampled_from(sorted(self.known)))
        flip(path_of(self.folder, block(seed)[0]), data.draw(st.integers(0, self.size - 1)))
        assert self.folder.read(block(seed)[0].name) is None
        self.known.discard(seed)

    @rule()
    def scan(self) -> None:
        assert {each.head.ids[0] for each in self.folder.scan()} == self.known

    @rule()
    def restart(self) -> None:
        self.folder.close()
        self.folder = self.opened()

    @rule()
    def sleep_till_tomorrow(self) -> None:
        self.day += 1
        self.written = 0

    @invariant()
    def accounts_agree(self) -> None:
        self.folder.check()
        assert self.folder.num_files == len(self.known)
        assert self.folder.num_bytes == len(self.known) * self.size <= self.folder.max_bytes
        assert self.folder.written_today_bytes == self.written * self.size

    def teardown(self) -> None:
        self.folder.close()
        shutil.rmtree(self.root)


TestFolderMachine = FolderMachine.TestCase

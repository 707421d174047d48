"""Sessions on disk: what is written is read again, and nothing else is ever taken for a session."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import stat
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.errors import CannotWrite
from edgeqwen.sessions.files import (
    MAX_DAMAGED,
    VERSION,
    SessionDamaged,
    SessionFolder,
    SessionOfLaterVersion,
    decode,
    encode,
)
from edgeqwen.sessions.session import Session, new_id
from edgeqwen.sessions.store import SessionStore
from tests.test_session import session_of

OWNER = "1000"


def file_of(root: Path, session: Session) -> Path:
    return root / session.owner / f"{session.id}.session"


def with_head(payload: bytes, version: int = VERSION) -> bytes:
    checksum = zlib.crc32(payload, zlib.crc32(struct.pack("<HI", version, len(payload))))
    return struct.pack("<6sHII", b"eqsess", version, len(payload), checksum) + payload


# The format.

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(system=st.none() | TEXT, num_turns=st.integers(0, 3), used_at=st.floats(0, 1e10))
def test_what_is_written_is_read(system: str | None, num_turns: int, used_at: float) -> None:
    session = msgspec.structs.replace(session_of(num_turns, system=system), used_at=used_at)
    assert decode(encode(session)) == session


WHOLE = encode(session_of(2, system="Be brief. 🫠"))


@given(st.integers(0, len(WHOLE) - 1))
def test_file_cut_anywhere_is_damaged(length: int) -> None:
    with pytest.raises(SessionDamaged):
        decode(WHOLE[:length])


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_file_with_any_byte_changed_is_damaged(index: int, change: int) -> None:
    data = bytearray(WHOLE)
    data[index] ^= change
    with pytest.raises(SessionDamaged):
        decode(bytes(data))


@given(st.binary(max_size=64) | st.binary(max_size=64).map(with_head))
def test_foreign_bytes_are_damaged(data: bytes) -> None:
    with pytest.raises(SessionDamaged):
        decode(data)


def test_bytes_after_the_end_are_damage() -> None:
    with pytest.raises(SessionDamaged):
        decode(WHOLE + b"\0")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rev":2,', b'"rev":1,'),  # of a turn or of the session: either way out of order
        (b'"ttl_s":10', b'"ttl_s":0'),
        (b'"owner":"1000"', b'"owner":"../x"'),
        (b'"role":"user"', b'"role":7'),
        (b'"content":"q1"', b'"content":null'),
        (b'"overflow":"error"', b'"overflow":"drop"'),
        (b'"name":null', b'"name":"\\n"'),
        (b'"model":"m"', b'"model":"m","more":1'),
    ],
)
def test_whole_file_of_an_impossible_session_is_damaged(old: bytes, new: bytes) -> None:
    payload = WHOLE[16:]
    assert old in payload
    with pytest.raises(SessionDamaged):
        decode(with_head(payload.replace(old, new)))


def test_file_of_a_later_version_is_told_from_a_damaged_one() -> None:
    with pytest.raises(SessionOfLaterVersion):
        decode(with_head(b"whatever that holds", VERSION + 1))


# The folder.


def test_sessions_are_found_again_with_modes_for_their_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "state" / "sessions"
    folder = SessionFolder.open(root)
    session = session_of(1)
    folder.write(session)
    folder.write(session_of(2))
    folder.close()
    again = SessionFolder.open(root)
    assert again.read_all().sessions == [session_of(2)]
    assert os.listdir(root / OWNER) == [f"{session.id}.session"]
    for path, mode in [(root.parent, 0o700), (root, 0o700), (root / OWNER, 0o700), (file_of(root, session), 0o600)]:
        assert stat.S_IMODE(path.stat().st_mode) == mode
    again.remove(session)
    again.remove(session)
    assert again.read_all().sessions == []


def test_unusable_files_are_moved_aside_or_left_alone_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = SessionFolder.open(tmp_path)
    good, other = session_of(1), new_id(99)
    folder.write(good)
    place = tmp_path / OWNER
    (place / f"{new_id(1)}.session").write_bytes(WHOLE[:-3])
    (place / f"{new_id(2)}.session").write_bytes(encode(good))  # a copy under another name
    (place / f"{new_id(3)}.session").write_bytes(with_head(b"{}", VERSION + 1))
    (place / f"{new_id(4)}.session").symlink_to(file_of(tmp_path, good))
    (place / f"{new_id(5)}.session").mkdir()
    (place / f"{other}.tmp").write_bytes(b"half")
    (place / "notes.txt").write_text("somebody's")
    (tmp_path / "No Owner").mkdir()
    (tmp_path / "2000").symlink_to(place)
    with caplog.at_level(logging.WARNING):
        found = folder.read_all()
    assert (found.sessions, found.num_damaged, found.num_later) == ([good], 4, 1)
    for bits in (1, 2, 3, 4, 5):
        assert f"{new_id(bits)}.session" in caplog.text
    assert (place / f"{new_id(1)}.damaged").read_bytes() == WHOLE[:-3]
    assert (place / f"{new_id(3)}.session").exists()
    assert not (place / f"{other}.tmp").exists()
    assert (place / "notes.txt").exists()
    caplog.clear()
    assert folder.read_all().num_damaged == 0


def test_damaged_files_do_not_pile_up(tmp_path: Path) -> None:
    folder = SessionFolder.open(tmp_path)
    (tmp_path / OWNER).mkdir()
    for bits in range(MAX_DAMAGED + 5):
        (tmp_path / OWNER / f"{new_id(bits)}.session").write_bytes(b"?")
    assert folder.read_all().num_damaged == MAX_DAMAGED + 5
    assert len(os.listdir(tmp_path / OWNER)) == MAX_DAMAGED


@pytest.mark.parametrize(
    ("function", "number"),
    [("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("open", errno.EROFS), ("rename", errno.EACCES)],
)
def test_failed_write_is_told_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    folder = SessionFolder.open(tmp_path)
    folder.write(session_of(1))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        if function == "rename":
            patched.setattr(Path, "rename", fail)
        else:
            patched.setattr(os, function, fail)
        with pytest.raises(CannotWrite, match=os.strerror(number)):
            folder.write(session_of(2))
    assert folder.read_all().sessions == [session_of(1)]
    assert os.listdir(tmp_path / OWNER) == [file_of(tmp_path, session_of(1)).name]


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWrite, match="file/sessions"):
        SessionFolder.open(tmp_path / "file" / "sessions")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CannotWrite, match=str(tmp_path)):
            SessionFolder.open(tmp_path / "sessions")
    finally:
        tmp_path.chmod(0o700)


HOLDER = """
import sys, time
from pathlib import Path
from edgeqwen.sessions.files import SessionFolder
folder = SessionFolder.open(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_folder_is_one_daemons_until_that_has_died(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CannotWrite, match="another daemon"):
            SessionFolder.open(tmp_path)
        holder.kill()
        holder.wait()
        SessionFolder.open(tmp_path).close()


WRITER = """
import sys
from pathlib import Path
from edgeqwen.sessions.files import SessionFolder
from tests.test_session import session_of
folder = SessionFolder.open(Path(sys.argv[1]))
print("go", flush=True)
while True:
    for number in range(1, 60):
        folder.write(session_of(number))
"""


def test_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    for seed in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            time.sleep(0.02 + random.Random(seed).random() / 20)
            writer.kill()
            writer.wait()
        folder = SessionFolder.open(tmp_path)
        found = folder.read_all()
        folder.close()
        assert found.num_damaged == 0
        assert all(session == session_of(session.rev) for session in found.sessions)
        assert {path.suffix for path in (tmp_path / OWNER).iterdir()} <= {".session"}


# The store.


async def test_saving_tells_whether_it_worked_and_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SessionStore(SessionFolder.open(tmp_path))

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        assert not await store.save(session_of(1))
        num_records = len(caplog.records)
        assert not await store.save(session_of(2))
    assert len(caplog.records) == num_records > 0
    assert store.stats()["unsaved"] == 1
    assert await store.save(session_of(3))
    assert store.stats()["unsaved"] == 0
    assert await store.read_all() == [session_of(3)]
    assert await store.remove(session_of(3))
    await store.close()
    SessionFolder.open(tmp_path).close()


async def test_store_without_a_folder_saves_nothing_and_says_so() -> None:
    store = SessionStore(None)
    assert await store.read_all() == []
    assert not await store.save(session_of(1))
    assert await store.remove(session_of(1))
    assert store.stats()["on_disk"] is False
    await store.close()


async def test_disk_that_hangs_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: released.wait(60))
    patient = SessionStore(SessionFolder.open(tmp_path / "a"))
    hasty = SessionStore(SessionFolder.open(tmp_path / "b"), save_timeout_s=0.01)
    try:
        async with asyncio.timeout(20):
            assert not await hasty.save(session_of(1))
            waiting = asyncio.create_task(patient.save(session_of(1)))
            await asyncio.sleep(0.01)
            await patient.close(timeout_s=0.01)
            assert not await waiting
            await hasty.close(timeout_s=0.01)
    finally:
        released.set()

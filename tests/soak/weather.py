"""What happens to a daemon from outside: a disk that is full for a while, little memory, a new configuration."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.soak.service import Service

PIECE_BYTES: Final = 64 << 10
EVERY_S: Final = 0.05
"""Between two looks at what the daemon has freed on its full disk."""

BROKEN: Final = "[limits]\nper_uid = 'many'\n"
ALLOCATE: Final = "import sys; held = b'1' * (int(sys.argv[1]) << 20); print(len(held), flush=True); sys.stdin.read()"


@contextlib.contextmanager
def small_disk(folder: Path, num_mb: int) -> Iterator[None]:
    """A file system of so many MiB in `folder`; with 0 the folder stays what it is. Needs to be root."""
    folder.mkdir(parents=True, exist_ok=True)
    if num_mb == 0:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_mb}m,mode=0700", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Takes what is free of the file system, and what becomes free, until it is left."""
    ballast, is_over = folder / "ballast", threading.Event()

    def keep_full() -> None:
        with ballast.open("ab", buffering=0) as file:
            while not is_over.wait(EVERY_S):
                _fill(file.fileno())

    with ballast.open("ab", buffering=0) as file:
        _fill(file.fileno())
    thread = threading.Thread(target=keep_full)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        ballast.unlink()


def _fill(descriptor: int) -> None:
    """Smaller and smaller pieces, until not one byte has room."""
    size = PIECE_BYTES
    while size:
        try:
            os.write(descriptor, b"\1" * size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            size //= 2


@contextlib.contextmanager
def short_memory(num_mb: int) -> Iterator[None]:
    """Another process that holds so many MiB, all of them touched."""
    command = [sys.executable, "-ISc", ALLOCATE, str(num_mb)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the memory is not to be had"
        try:
            yield
        finally:
            process.kill()


class Reloads:
    """Now and then another configuration, mostly a good one, which the daemon is told to read.

    The keys are such as change nothing of what a request is answered. `text_of` gives the good ones.
    """

    def __init__(
        self, service: Service, path: Path, rng: random.Random, text_of: Callable[[random.Random], str]
    ) -> None:
        self._service = service
        self._path = path
        self._rng = rng
        self._text_of = text_of
        self.num_good = 0
        self.num_broken = 0
        self.write(text_of(rng))

    def write(self, text: str) -> None:
        """All of it or nothing, as an editor does: the daemon may read at any moment."""
        other = self._path.with_suffix(".new")
        other.write_text(text)
        other.replace(self._path)

    @contextlib.contextmanager
    def now_and_then(self, every_s: float) -> Iterator[None]:
        is_over = threading.Event()

        def reload() -> None:
            while not is_over.wait(self._rng.uniform(0.5 * every_s, 1.5 * every_s)):
                self.reload(is_broken=self._rng.random() < 0.2)

        thread = threading.Thread(target=reload)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.write(self._text_of(self._rng))  # what is broken would keep the next daemon from starting

    def reload(self, *, is_broken: bool) -> None:
        """One more, and wait until the log tells what came of it: signals that come together are one."""
        num_before = self._num_told()
        self.write(BROKEN if is_broken else self._text_of(self._rng))
        self._service.process.send_signal(signal.SIGHUP)
        give_up_at = time.monotonic() + 60.0
        while self._num_told() == num_before:
            assert self._service.process.poll() is None, self._service.log
            assert time.monotonic() < give_up_at, "SIGHUP is not answered"
            time.sleep(EVERY_S)
        if is_broken:
            self.num_broken += 1
        else:
            self.num_good += 1

    def _num_told(self) -> tuple[int, int]:
        log = self._service.log
        return log.count(" reloaded by="), log.count(" reload_failed by=")

    def check(self) -> None:
        """Each was told as what it was."""
        assert self._num_told() == (self.num_good, self.num_broken)

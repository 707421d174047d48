"""The standard streams of a command: there from the start, and a failing one is a line and an exit code.

A descriptor of the three that is closed at the start would be given to the next file or socket that is opened, and what
a library prints would then go in there. So they are filled first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Final, TextIO

from edgeqwen.errors import CannotWrite, EdgeqwenError

EXIT_PIPE_CLOSED: Final = 141
"""What a shell reports of a program that SIGPIPE ended (128 + 13)."""

_MODES: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}


_VISIBLE: Final = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters to signs for them (the block of Unicode that shows them; it has none for those of 8 bits)."""


class StreamFailed(CannotWrite):
    """A standard stream failed. Where nobody reads the output any more (`is_closed`) there is nobody to tell."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard input or output: {error.strerror}")
        self.is_closed = error.errno == errno.EPIPE

    @property
    def exit_code(self) -> int:
        return EXIT_PIPE_CLOSED if self.is_closed else super().exit_code


def open_missing() -> None:
    """Open the standard streams that are closed, so that nothing else takes their descriptors."""
    for name, mode in _MODES.items():
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, hence the missing one
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", closefd=False))


@contextlib.contextmanager
def failures_named() -> Iterator[None]:
    """Raise `StreamFailed` if a standard stream fails in here, or when the output is flushed at the end.

    Files and sockets are dealt with where they are used; an error that names a file is theirs and passes.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        _drop(sys.stdout)
        raise StreamFailed(error) from error


def complain(text: str) -> None:
    """A line on stderr, if that takes it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def shown(text: str, stream: TextIO) -> str:
    """`text` as it may go to `stream`: to a terminal without control characters, since a model may be made to say any,
    and they move the cursor, set titles and fill the clipboard; elsewhere as it is.
    """
    return text.translate(_VISIBLE) if stream.isatty() else text


def read_text(data: bytes, source: str) -> str:
    """The text that `source` holds. Raises `bad_utf8`, which names it: a model is not to be asked for another text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        message = (
            f"{source} is not UTF-8 text: byte {error.start + 1} is in the way; convert it first, with iconv(1) say"
        )
        raise EdgeqwenError(message, code="bad_utf8") from error


def valid_text(text: str, source: str) -> str:
    """`text` if no bytes of the argument `source` were anything but UTF-8; else as `read_text`."""
    return read_text(text.encode("utf-8", "surrogateescape"), source)


def _drop(stream: TextIO) -> None:
    """Python flushes its streams once more at exit, and exits with 120 if that fails; let it go nowhere."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""Typed errors, the stable codes they carry, and what a code means elsewhere.

An error that a client or a file can cause is an `EdgeqwenError` with one of the codes below. The code decides the
HTTP status, the exit code of the command line and whether a socket connection is closed; the message is for people.
What cannot happen is asserted instead. Exceptions of libraries are turned into these at the edge that calls the
library, with `raise ... from`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self


@dataclass(frozen=True, slots=True)
class Code:
    """What one error code means to each front."""

    http_status: int
    exit_code: int
    is_fatal: bool = False


CODES: Final[dict[str, Code]] = {
    "bad_json": Code(400, 65, is_fatal=True),
    "bad_utf8": Code(400, 65, is_fatal=True),
    "too_large": Code(413, 65, is_fatal=True),
    "timeout": Code(408, 65, is_fatal=True),
    "slow_reader": Code(408, 74, is_fatal=True),
    "bad_request": Code(400, 64),
    "unknown_op": Code(404, 64),
    "unsupported_version": Code(400, 64),
    "duplicate_id": Code(400, 64),
    "forbidden": Code(403, 77),
    "not_found": Code(404, 69),
    "conflict": Code(409, 75),
    "session_busy": Code(409, 75),
    "too_long": Code(413, 65),
    "busy": Code(429, 75),
    "quota": Code(429, 75),
    "loading": Code(503, 75),
    "draining": Code(503, 75),
    "engine": Code(500, 70),
    "bad_config": Code(409, 78),
}

EXIT_USAGE: Final = 64
EXIT_BAD_MODEL: Final = 65
EXIT_NO_INPUT: Final = 66
EXIT_NO_DAEMON: Final = 69
EXIT_CANNOT_WRITE: Final = 73
EXIT_CUT_OFF: Final = 74
EXIT_CONFIG: Final = 78
EXIT_INTERRUPTED: Final = 130


_PLACE: Final = re.compile(r"(?<=\[)\d+(?=\])")  # in a list


class EdgeqwenError(Exception):
    """Base of every error that a client or a file can cause.

    `code` is one of `CODES`; `field` names the request member at fault; `retry_ms` says when a retry may succeed.
    """

    code: str = "engine"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        assert self.code in CODES, self.code
        self.field = field
        self.retry_ms = retry_ms

    def reworded(self, message: str, *, field: str | None = None) -> Self:
        """The same error in other words; `field` None: it is about the same member as before."""
        other = type(self).__new__(type(self), message)
        other.__dict__.update(self.__dict__, message=message, field=self.field if field is None else field)
        return other

    def counted_from(self, start: int) -> Self:
        """An error about an element of a list that is itself a part, from `start` on, of one that the client sees: by
        the place that the element has there. Any other error as it is.
        """
        if self.field is None or _PLACE.search(self.field) is None:
            return self
        field, message = (
            _PLACE.sub(lambda match: str(start + int(match[0])), text, count=1) for text in (self.field, self.message)
        )
        return self.reworded(message, field=field)

    @property
    def exit_code(self) -> int:
        """Exit code of a command that ends with this error."""
        return CODES[self.code].exit_code


class BadRequest(EdgeqwenError):
    """A request that cannot be served as it stands; `field` names the member."""

    code = "bad_request"


class FileError(EdgeqwenError):
    """A file at fault: a command prints the message in one line and exits with `exit_code`."""

    code = "engine"
    file_exit_code = EXIT_BAD_MODEL

    @property
    def exit_code(self) -> int:
        return self.file_exit_code


class ModelInvalid(FileError):
    """A checkpoint or package that is broken, truncated, mixed up or of an unsupported kind (exit 65)."""


class ModelMissing(FileError):
    """A model file or folder that is not there (exit 66)."""

    file_exit_code = EXIT_NO_INPUT


class CannotWrite(FileError):
    """An output that cannot be written: disk full, read-only, no permission (exit 73)."""

    file_exit_code = EXIT_CANNOT_WRITE


class ConfigInvalid(FileError):
    """Configuration, processor or socket path that cannot be used (exit 78)."""

    code = "bad_config"
    file_exit_code = EXIT_CONFIG


class RuntimeFailed(EdgeqwenError):
    """The runtime failed inside a step; the sequences of that step end with it, the daemon goes on."""

    code = "engine"


class ModelReplaced(RuntimeFailed):
    """The model's files are not those any more that the process began with: only a new process serves the new ones."""

"""What a client raises: what the daemon answers, by code, and what becomes of a connection."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any, Final

from edgeqwen.errors import CODES, EXIT_CUT_OFF, EXIT_NO_DAEMON, BadRequest, EdgeqwenError
from edgeqwen.protocol.address import SOCKET_VARIABLE, SYSTEM_SOCKET


class NoDaemon(EdgeqwenError):
    """Nobody serves the socket (exit 69)."""

    @property
    def exit_code(self) -> int:
        return EXIT_NO_DAEMON


class CutOff(EdgeqwenError):
    """The connection ended, or something that is no frame came, before the final frame (exit 74)."""

    @property
    def exit_code(self) -> int:
        return EXIT_CUT_OFF


class TimedOut(CutOff):
    """Nothing came for as long as the caller wanted to wait; the request was cancelled."""


class SocketForbidden(EdgeqwenError):
    """The socket is there and this user may not connect to it (exit 77)."""

    code = "forbidden"


class TryAgain(EdgeqwenError):
    """The same request may succeed later, after `retry_ms` if the daemon says so: `busy`, `quota`, `loading`,
    `draining`, `session_busy`.
    """


class NotFound(EdgeqwenError):
    """There is no such thing, or it is another user's."""


class Forbidden(EdgeqwenError):
    """The daemon does not do this for this user."""


_KINDS: Final[Mapping[str, type[EdgeqwenError]]] = {
    "bad_request": BadRequest,
    "unknown_op": BadRequest,
    "not_found": NotFound,
    "forbidden": Forbidden,
    **dict.fromkeys(("busy", "quota", "loading", "draining", "session_busy"), TryAgain),
}


def connect_error(path: str, error: OSError) -> EdgeqwenError:
    """Why there is no connection to the socket `path`."""
    if isinstance(error, PermissionError):
        return SocketForbidden(f"{path}: this user may not connect to the daemon")
    reason = "does not answer" if isinstance(error, TimeoutError | BlockingIOError) else "no daemon"
    return NoDaemon(f"{path}: {reason}; start one with: {serve_command(path, os.environ)}")


def serve_command(path: str, environ: Mapping[str, str]) -> str:
    """The command that starts a daemon on the socket `path`, for a user with the variables `environ`."""
    usual = {environ.get(SOCKET_VARIABLE), f"{environ.get('XDG_RUNTIME_DIR')}/edgeqwen.sock", str(SYSTEM_SOCKET)}
    return "edgeqwen serve" if path in usual else f"edgeqwen serve --socket {shlex.quote(path)}"


def error_of(frame: Mapping[str, Any]) -> EdgeqwenError:
    """The error that a final frame carries. A code that this client does not know counts as the daemon's fault."""
    error = frame["error"]
    code = error.get("code")
    return _KINDS.get(code, EdgeqwenError)(
        str(error.get("message", code)),
        code=code if code in CODES else "engine",
        field=error.get("field"),
        retry_ms=error.get("retry_ms"),
    )

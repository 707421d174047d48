"""Where the log goes, and how it reads there.

* To the journal, field by field, if standard error is connected to it.
* To a terminal: `12:03:04 ready model=...`, what is amiss in colour.
* Else lines `edgeqwen INFO ready model=...`, with the time in front unless whoever reads them notes it, or JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from edgeqwen.logs.event import Event, describe_error, one_line
from edgeqwen.logs.journal import JOURNAL_SOCKET, JournalHandler, is_connected_to_journal, priority_of

FORMATS: Final = ("auto", "journal", "text", "json")
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


class TextFormatter(logging.Formatter):
    """`prefix` stands before the priority in angle brackets, as a manager takes it off (sd-daemon(3))."""

    def __init__(self, *, is_terminal: bool = False, is_coloured: bool = False, has_priority: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._is_coloured = is_coloured
        self._has_priority = has_priority

    def format(self, record: logging.LogRecord) -> str:
        message = _message(record)
        if self._is_terminal:
            now = datetime.fromtimestamp(record.created).astimezone()
            level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            head = f"{now:%H:%M:%S} {level}{message}"
        else:
            head = f"edgeqwen {record.levelname} {message}"
            if not self._has_priority:
                head = f"{_iso(record)} {head}"
        lines = [head]
        if record.exc_info:
            lines += [f"    {line}" for line in describe_error(record.exc_info).splitlines()]
        if self._has_priority:
            lines = [f"<{priority_of(record.levelno)}>{line}" for line in lines]
        text = "\n".join(lines)
        if self._is_coloured and record.levelno >= logging.WARNING:
            return f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{text}{_PLAIN}"
        return text


class JsonFormatter(logging.Formatter):
    """One object a line: `time`, `level`, `message`, `event` and its fields if it is one."""

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, Any] = {
            "time": _iso(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if isinstance(record.msg, Event):
            members |= {"event": record.msg.name, **record.msg.fields}
        if record.exc_info:
            members["error"] = describe_error(record.exc_info)
        return json.dumps(members, ensure_ascii=False)


def _message(record: logging.LogRecord) -> str:
    return one_line(record.getMessage())


def _iso(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def make_handler(wanted: str, stream: TextIO, environ: Mapping[str, str]) -> logging.Handler:
    """The handler for `service.log_format` being `wanted`, when `stream` is standard error."""
    assert wanted in FORMATS
    is_journal = is_connected_to_journal(environ.get("JOURNAL_STREAM", ""), stream)
    if (wanted == "auto" and is_journal) or wanted == "journal":
        handler = JournalHandler.open(JOURNAL_SOCKET)
        if handler is not None:
            return handler
    lines = logging.StreamHandler(stream)
    if wanted == "json":
        lines.setFormatter(JsonFormatter())
    elif stream.isatty():
        lines.setFormatter(TextFormatter(is_terminal=True, is_coloured=not environ.get("NO_COLOR")))
    else:
        lines.setFormatter(TextFormatter(has_priority=is_journal))
    return lines


def set_up(wanted: str) -> None:
    """Have all that is logged go where it belongs. Libraries are heard from warnings on."""
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
    root.addHandler(make_handler(wanted, sys.stderr, os.environ))
    root.setLevel(logging.WARNING)
    logging.getLogger("edgeqwen").setLevel(logging.INFO)
    logging.raiseExceptions = False  # a log that nobody reads any more is no reason to stop serving

"""What a conversation reads like when it is the only one and nothing of it was ever known."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.soak.line import Line
from tests.soak.service import Model, Service

GREEDY: Final[dict[str, Any]] = {"temperature": 0, "seed": 1}
Messages = list[dict[str, str]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Reference:
    """A daemon of its own that answers one request at a time with its cache off; the same request is asked once."""

    def __init__(self, folder: Path, model: Model) -> None:
        self._service = Service(folder, model, kv_disk_mb=0, kv_settle="false")
        self._known: dict[str, str] = {}
        self._line: Line

    def __enter__(self) -> Self:
        self._service.__enter__()
        self._line = self._service.line()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._line.close()
        self._service.__exit__(kind, exc, tb)

    def answer(self, messages: Messages, **options: Any) -> str:
        """The greedy answer."""
        key = json.dumps([messages, options])
        if key not in self._known:
            frame = self._line.must("chat", messages=messages, cache=False, speculate=False, **GREEDY, **options)
            assert frame["usage"]["cached"] == 0
            self._known[key] = frame["text"]
        return self._known[key]

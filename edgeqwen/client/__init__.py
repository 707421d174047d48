"""Clients of the daemon's socket, in Python without anything heavy:

    from edgeqwen.client import Client
    with Client.connect() as client:
        print(client.chat("Why is the sky blue?", max_tokens=64).text)
        for delta in client.chat_stream([{"role": "user", "content": "And at night?"}], think=True):
            print(delta.text, end="", flush=True)

`Client` has one connection and one request in flight; it is for one thread at a time. `AsyncClient` has the same
methods as coroutines, and any number of them at once over one connection. What the daemon refuses is raised as an
`EdgeqwenError` with `code`, `field` and `retry_ms`. `text_of` takes the text out of the bytes of a reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeqwen.client.failures import (
    CutOff,
    Forbidden,
    NoDaemon,
    NotFound,
    SocketForbidden,
    TimedOut,
    TryAgain,
    error_of,
)
from edgeqwen.client.results import Answer, BatchResult, Choice, Delta, Embeddings, Timings, ToolCall, Usage
from edgeqwen.client.sync import AnswerStream, Client
from edgeqwen.errors import BadRequest, EdgeqwenError

if TYPE_CHECKING:
    from edgeqwen.client.aio import AsyncAnswerStream, AsyncClient
    from edgeqwen.client.reply_text import text_of

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "BadRequest",
    "BatchResult",
    "Choice",
    "Client",
    "CutOff",
    "Delta",
    "EdgeqwenError",
    "Embeddings",
    "Forbidden",
    "NoDaemon",
    "NotFound",
    "SocketForbidden",
    "TimedOut",
    "Timings",
    "ToolCall",
    "TryAgain",
    "Usage",
    "error_of",
    "text_of",
]


_LATER = {"AsyncAnswerStream": "aio", "AsyncClient": "aio", "text_of": "reply_text"}
"""asyncio takes longer to import than a short answer to come; only who needs it pays for it."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)

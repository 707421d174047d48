"""The synchronous client: one connection, one request at a time.

A connection that breaks before a request's final frame is an error of its own (`CutOff`), never an answer that merely
looks short.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, Unpack

from edgeqwen.client.embedding import EmbedJob
from edgeqwen.client.failures import CutOff, TimedOut, connect_error, error_of
from edgeqwen.client.frames import FrameBuffer, encode_request
from edgeqwen.client.requests import (
    Messages,
    Prompt,
    chat_members,
    generate_members,
    lines_of,
    socket_path,
)
from edgeqwen.client.results import (
    Answer,
    BatchResult,
    ChatOptions,
    Collector,
    Delta,
    Embeddings,
    GenerateOptions,
    answer_of,
)

READ_BYTES: Final = 64 << 10
RETRY_S: Final = 0.02


def _connect(sock: socket.socket, path: str, *, give_up_at: float) -> None:
    """A socket with a timeout does not wait while too many others wait to be accepted: it has to ask again."""
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise
        time.sleep(RETRY_S)


class Client:
    """A connection, for one thread at a time. All methods raise what the daemon answers, as `EdgeqwenError`, and
    `CutOff`; after an error of the connection the client is of no use.

    `silence_s` is how long a request may wait for its next frame before it is cancelled and `TimedOut` raised; None
    waits as long as the daemon does.
    """

    def __init__(self, sock: socket.socket, *, silence_s: float | None = None) -> None:
        self._sock = sock
        self._sock.settimeout(silence_s)
        self._frames = FrameBuffer()
        self._num_requests = 0
        self._current_id = 0

    @classmethod
    def connect(
        cls, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 5.0, silence_s: float | None = None
    ) -> Self:
        """Connect to the socket `path`, by default the user's own daemon's or the system's, within `timeout_s`.

        Raises `NoDaemon`, `SocketForbidden`, `ConfigInvalid` (path too long).
        """
        shown = socket_path(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            _connect(sock, shown, give_up_at=time.monotonic() + timeout_s)
        except OSError as exc:
            sock.close()
            raise connect_error(shown, exc) from exc
        return cls(sock, silence_s=silence_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up: whatever is in flight is cancelled by the daemon."""
        self._sock.close()

    # Answers.

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        """Answer a conversation, or one message of the user; with `session` it is what is new in that."""
        return answer_of(self.request("chat", **chat_members(messages, options)))

    def chat_stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> AnswerStream:
        """The same, piece by piece."""
        return AnswerStream(self, "chat", chat_members(messages, options))

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """Continue a raw prompt, text or token ids; no template is applied."""
        return answer_of(self.request("generate", **generate_members(prompt, options)))

    def generate_stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AnswerStream:
        """The same, piece by piece."""
        return AnswerStream(self, "generate", generate_members(prompt, options))

    def batch(
        self, items: Iterable[Mapping[str, Any]], *, each: str = "chat", common: Mapping[str, Any] | None = None
    ) -> Iterator[BatchResult]:
        """Answer many, a line of at most 64 after another; results come as items end. `items` are members of `each`."""
        first = 0
        for line in lines_of(items):
            for frame in self.stream("batch", items=line, each=each, common=common):
                if not frame["done"]:
                    error = error_of(frame) if "error" in frame else None
                    yield BatchResult(first + frame["item"], frame, error)
            first += len(line)

    def embed(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, pooling: str | None = None, **options: Any
    ) -> Embeddings:
        """A vector for each text (or list of token ids), of which there may be any number: what one line or reply has
        no room for goes by several requests, and `options` are members of each.
        """
        job = EmbedJob(texts, pooling)
        while (members := job.next_members()) is not None:
            with job.numbered():
                job.add(self.request("embed", **members, **options))
            if job.needs_limits:
                job.limits = self.request("hello")["limits"]
        return job.embeddings

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids; with `special` the texts of added tokens become their ids."""
        tokens: list[int] = self.request("tokenize", text=text, special=special)["tokens"]
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The exact bytes of tokens, which need not be whole characters."""
        return text_bytes(self.request("detokenize", tokens=tokens))

    # Sessions: conversations that the daemon keeps, by id or as `@name`. What is returned is the final frame.

    def session_create(self, name: str | None = None, **members: Any) -> str:
        """The id of a new one; `system`, `ttl_s` and `overflow` may be given."""
        return str(self.request("session.create", name=name, **members)["session"])

    def session_get(self, session: str, *, messages: bool = False) -> dict[str, Any]:
        """What it is, and with `messages` all that was said."""
        return self.request("session.get", session=session, messages=messages)

    def session_list(self) -> list[dict[str, Any]]:
        """The caller's, the one used last coming first."""
        sessions: list[dict[str, Any]] = self.request("session.list")["sessions"]
        return sessions

    def session_fork(self, session: str, *, at: int | None = None, name: str | None = None) -> str:
        """The id of a new one that is as `session` was at the revision `at`, or as it is."""
        return str(self.request("session.fork", session=session, at=at, name=name)["session"])

    def session_reset(self, session: str, *, keep_system: bool = True) -> int:
        """Forget the turns; returns the revision."""
        return int(self.request("session.reset", session=session, keep_system=keep_system)["rev"])

    def session_delete(self, session: str) -> None:
        """Forget all of it."""
        self.request("session.delete", session=session)

    # The daemon.

    def hello(self) -> dict[str, Any]:
        """Versions, features and limits."""
        return self.request("hello")

    def health(self) -> dict[str, Any]:
        """Whether it answers, and how far the model is loaded."""
        return self.request("health")

    def ready(self) -> dict[str, Any]:
        """The model. Raises `TryAgain` until it is loaded."""
        return self.request("ready")

    def stats(self) -> dict[str, Any]:
        return self.request("stats")

    def metrics(self) -> str:
        """What is measured of everybody, as Prometheus reads it."""
        return str(self.request("metrics")["text"])

    def shutdown(self, *, drain_s: float | None = None) -> dict[str, Any]:
        """Have it finish what runs, and stop."""
        return self.request("shutdown", drain_s=drain_s)

    def reload(self) -> dict[str, Any]:
        """Have it read its configuration again: which keys `changed`, and which need a `restart`."""
        return self.request("reload")

    def cancel_rid(self, rid: str) -> bool:
        """End a request of any connection of this user; False if it had ended."""
        return bool(self.request("cancel", rid=rid)["cancelled"])

    # Any operation, with frames as they are.

    def request(self, op: str, **members: Any) -> dict[str, Any]:
        """The final frame of `op`."""
        for frame in self.stream(op, **members):
            if frame["done"]:
                return frame
        raise AssertionError("a stream ends with a final frame or an error")

    def stream(self, op: str, **members: Any) -> Iterator[dict[str, Any]]:
        """The frames of `op` as they come, the final one included. Members that are None are left out.

        The request is sent at the first step of the iterator, which raises `BadRequest` if no frame can carry it.
        Leaving it early leaves frames to come, which the next request passes over: `cancel` first.
        """
        self._num_requests += 1
        request_id = self._current_id = self._num_requests
        self._send(encode_request(op, request_id, members))
        while True:
            frame = self._read_frame()
            if "error" in frame and frame["done"] and frame.get("id", request_id) == request_id:
                raise error_of(frame)
            if frame.get("id") != request_id:
                continue
            yield frame
            if frame["done"]:
                return

    def cancel(self) -> None:
        """Ask for the end of the request in flight; its final frame still comes."""
        self._num_requests += 1
        self._send(encode_request("cancel", self._num_requests, {"target": self._current_id}))

    def _send(self, data: bytes) -> None:
        # A daemon that turns a connection away closes at once; its reason is then still there to be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(data)

    def _read_frame(self) -> dict[str, Any]:
        while (frame := self._frames.take()) is None:
            try:
                data = self._sock.recv(READ_BYTES)
            except ConnectionResetError:
                data = b""
            except TimeoutError as exc:
                self.cancel()
                raise TimedOut(f"nothing came for {self._sock.gettimeout():g} s") from exc
            if not data:
                raise CutOff("the connection ended before the answer did")
            self._frames.feed(data)
        return frame


class AnswerStream:
    """Pieces of an answer as they come; `answer` is all of it once they have. Leaving a `with` early cancels it."""

    def __init__(self, client: Client, op: str, members: Mapping[str, Any]) -> None:
        self._client = client
        self._frames = client.stream(op, stream=True, **members)
        self._collector = Collector()
        self._answer: Answer | None = None
        self._has_begun = False
        self.rid = ""

    def __iter__(self) -> Iterator[Delta]:
        for frame in self._frames:
            self._has_begun = True
            self.rid = frame.get("rid", self.rid)
            if frame["done"]:
                self._answer = self._collector.answer(frame)
                return
            if (delta := self._collector.take(frame)) is not None:
                yield delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._has_begun and self._answer is None and kind is not CutOff:
            self.cancel()

    def cancel(self) -> None:
        """Ask for the end: what has come until then is the answer, `cancelled` its `finish`."""
        self._client.cancel()

    @property
    def answer(self) -> Answer:
        """All of it; what has not been read yet is read first."""
        for _ in self:
            pass
        assert self._answer is not None
        return self._answer


def text_bytes(frame: Mapping[str, Any]) -> bytes:
    """The bytes in the final frame of `detokenize`."""
    if "b64" not in frame:
        return str(frame["text"]).encode()
    import base64

    return base64.b64decode(frame["b64"])

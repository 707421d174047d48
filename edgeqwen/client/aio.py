"""The asynchronous client: any number of requests at once over one connection, told apart by their ids."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, Unpack, cast

from edgeqwen.client.embedding import EmbedJob
from edgeqwen.client.failures import CutOff, TimedOut, connect_error, error_of
from edgeqwen.client.link import Link, open_link
from edgeqwen.client.requests import Messages, Prompt, chat_members, generate_members, socket_path
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
from edgeqwen.client.sync import text_bytes
from edgeqwen.errors import EdgeqwenError

INFLIGHT: Final = 8
LONG_OPS: Final = frozenset({"chat", "generate", "embed", "batch"})
"""What the daemon has at most `INFLIGHT` of in flight on a connection. One more, and it reads nothing else until one
has ended, not even a cancel; so here it waits on our side.
"""


class AsyncClient:
    """`Client`'s methods as coroutines. Tasks of one loop may share it; the frames of a request that nobody reads wait
    in memory. A task that is cancelled cancels its request.

    At most `max_inflight` requests that take time are sent at once, the others wait for their turn. `silence_s` is as
    `Client`'s.
    """

    def __init__(self, link: Link, *, max_inflight: int = INFLIGHT, silence_s: float | None = None) -> None:
        self._link = link
        self._places = asyncio.Semaphore(max_inflight)
        self._max_inflight = max_inflight
        self._silence_s = silence_s

    @classmethod
    async def connect(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 5.0,
        max_inflight: int = INFLIGHT,
        silence_s: float | None = None,
    ) -> Self:
        """As `Client.connect`."""
        shown = socket_path(path)
        try:
            async with asyncio.timeout(timeout_s):
                link = await open_link(shown)
        except OSError as exc:
            raise connect_error(shown, exc) from exc
        return cls(link, max_inflight=max_inflight, silence_s=silence_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up: whatever is in flight is cancelled by the daemon."""
        self._link.close()

    # Answers.

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        return answer_of(await self.request("chat", **chat_members(messages, options)))

    def chat_stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncAnswerStream:
        return AsyncAnswerStream(self, "chat", chat_members(messages, options))

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        return answer_of(await self.request("generate", **generate_members(prompt, options)))

    def generate_stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncAnswerStream:
        return AsyncAnswerStream(self, "generate", generate_members(prompt, options))

    async def batch(
        self, items: Iterable[Mapping[str, Any]], *, each: str = "chat", common: Mapping[str, Any] | None = None
    ) -> AsyncIterator[BatchResult]:
        """Answer any number of items, each a request of its own; results come as they end. No more of `items` are taken
        than are in flight.
        """
        left = enumerate(items)
        running: set[asyncio.Task[BatchResult]] = set()
        try:
            while True:
                while len(running) < self._max_inflight and (entry := next(left, None)) is not None:
                    number, item = entry
                    running.add(asyncio.create_task(self._item(number, each, {**(common or {}), **item})))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()

    async def _item(self, number: int, each: str, members: Mapping[str, Any]) -> BatchResult:
        try:
            return BatchResult(number, await self.request(each, **members))
        except CutOff:
            raise
        except EdgeqwenError as exc:
            return BatchResult(number, {}, exc)

    async def embed(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, pooling: str | None = None, **options: Any
    ) -> Embeddings:
        """As `Client.embed`."""
        job = EmbedJob(texts, pooling)
        while (members := job.next_members()) is not None:
            with job.numbered():
                job.add(await self.request("embed", **members, **options))
            if job.needs_limits:
                job.limits = (await self.request("hello"))["limits"]
        return job.embeddings

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        tokens: list[int] = (await self.request("tokenize", text=text, special=special))["tokens"]
        return tokens

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        return text_bytes(await self.request("detokenize", tokens=tokens))

    # Sessions.

    async def session_create(self, name: str | None = None, **members: Any) -> str:
        return str((await self.request("session.create", name=name, **members))["session"])

    async def session_get(self, session: str, *, messages: bool = False) -> dict[str, Any]:
        return await self.request("session.get", session=session, messages=messages)

    async def session_list(self) -> list[dict[str, Any]]:
        sessions: list[dict[str, Any]] = (await self.request("session.list"))["sessions"]
        return sessions

    async def session_fork(self, session: str, *, at: int | None = None, name: str | None = None) -> str:
        return str((await self.request("session.fork", session=session, at=at, name=name))["session"])

    async def session_reset(self, session: str, *, keep_system: bool = True) -> int:
        return int((await self.request("session.reset", session=session, keep_system=keep_system))["rev"])

    async def session_delete(self, session: str) -> None:
        await self.request("session.delete", session=session)

    # The daemon.

    async def hello(self) -> dict[str, Any]:
        return await self.request("hello")

    async def health(self) -> dict[str, Any]:
        return await self.request("health")

    async def ready(self) -> dict[str, Any]:
        return await self.request("ready")

    async def stats(self) -> dict[str, Any]:
        return await self.request("stats")

    async def metrics(self) -> str:
        return str((await self.request("metrics"))["text"])

    async def shutdown(self, *, drain_s: float | None = None) -> dict[str, Any]:
        return await self.request("shutdown", drain_s=drain_s)

    async def reload(self) -> dict[str, Any]:
        return await self.request("reload")

    async def cancel_rid(self, rid: str) -> bool:
        return bool((await self.request("cancel", rid=rid))["cancelled"])

    # Any operation, with frames as they are.

    async def request(self, op: str, **members: Any) -> dict[str, Any]:
        """The final frame of `op`."""
        async with aclosing(self.stream(op, **members)) as frames:
            async for frame in frames:
                if frame["done"]:
                    return frame
        raise AssertionError("a stream ends with a final frame or an error")

    async def stream(self, op: str, **members: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The frames of `op` as they come, the final one included; closing the generator early cancels the request."""
        async with self._place(op):
            request_id, queue = await self._link.begin(op, members)
            is_over = False
            try:
                while not is_over:
                    frame = await self._next(queue)
                    is_over = frame["done"]
                    if is_over and "error" in frame:
                        raise error_of(frame)
                    yield frame
            finally:
                self._link.end(request_id, is_over=is_over)

    async def _next(self, queue: asyncio.Queue[Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._silence_s):
                found = await queue.get()
        except TimeoutError as exc:
            raise TimedOut(f"nothing came for {self._silence_s:g} s") from exc
        if isinstance(found, EdgeqwenError):
            raise found
        return cast(dict[str, Any], found)

    @asynccontextmanager
    async def _place(self, op: str) -> AsyncIterator[None]:
        if op not in LONG_OPS:
            yield
            return
        async with self._places:
            yield


class AsyncAnswerStream:
    """Pieces of an answer as they come; `answer()` is all of it once they have. Leaving an `async with` early, or
    `aclose`, cancels it.
    """

    def __init__(self, client: AsyncClient, op: str, members: Mapping[str, Any]) -> None:
        self._frames = client.stream(op, stream=True, **members)
        self._collector = Collector()
        self._answer: Answer | None = None
        self.rid = ""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for frame in self._frames:
            self.rid = frame.get("rid", self.rid)
            if frame["done"]:
                self._answer = self._collector.answer(frame)
            elif (delta := self._collector.take(frame)) is not None:
                yield delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End it, if it has not ended."""
        await self._frames.aclose()

    async def answer(self) -> Answer:
        """All of it; what has not been read yet is read first."""
        async for _ in self:
            pass
        assert self._answer is not None
        return self._answer

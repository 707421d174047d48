"""`POST /v1/chat/completions`: one generation, answered in one piece or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from edgeqwen.core.request import Delta, Done, Event, Failed, Started, TokenLogprob
from edgeqwen.engine.generation import Sink
from edgeqwen.engine.inference import Generation, Inference
from edgeqwen.errors import EdgeqwenError
from edgeqwen.http.openai_reply import END, ChoiceText, Chunks, Head, completion, event, logprob_object
from edgeqwen.http.openai_request import ChatRequest, read_chat
from edgeqwen.http.replies import error_members, json_response
from edgeqwen.protocol.answers import Backlog
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import split_text
from edgeqwen.sessions.sessions import Sessions
from edgeqwen.sessions.turns import TurnRequest

MAX_CACHED_TEXTS: Final = 1 << 18
CHUNK_OVERHEAD: Final = 1024


class Mailbox:
    """A generation's events, waited for one at a time; deltas that pile up are joined."""

    def __init__(self) -> None:
        self._backlog = Backlog()
        self._has_event = asyncio.Event()

    def push(self, event: Event) -> None:
        self._backlog.push(event)
        self._has_event.set()

    async def next(self) -> Event:
        while not self._backlog:
            self._has_event.clear()
            await self._has_event.wait()
        return self._backlog.pop()


class TokenTexts:
    """Bytes of single tokens, for the alternatives of log-probabilities; asked of the engine once each."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._known: dict[int, bytes] = {}

    async def of(self, token: int) -> bytes:
        data = self._known.get(token)
        if data is None:
            data = await self._inference.detokenize([token])
            if len(self._known) < MAX_CACHED_TEXTS:
                self._known[token] = data
        return data

    async def describe(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [(await self.of(token), value) for token, value in logprob.top]
        return logprob_object(await self.of(logprob.token), logprob.logprob, top)


class ChatCompletions:
    """Serves the route. `remember(rid, owner)` is told of accepted generations; `clock` gives seconds since 1970."""

    def __init__(
        self,
        inference: Inference,
        *,
        limits: WireLimits,
        remember: Callable[[str, str], None],
        sessions: Sessions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._inference = inference
        self._limits = limits
        self._remember = remember
        self._sessions = sessions
        self._clock = clock
        self._texts = TokenTexts(inference)

    async def answer(self, request: web.BaseRequest, members: Mapping[str, Any], peer: Peer) -> web.StreamResponse:
        """Raises `EdgeqwenError` as long as nothing was sent."""
        try:
            return await self._answer(request, read_chat(members), peer)
        except EdgeqwenError as exc:
            raise _in_their_words(exc, members) from exc

    async def _answer(self, request: web.BaseRequest, chat: ChatRequest, peer: Peer) -> web.StreamResponse:
        async with self._generation(chat, peer) as (head, mailbox):
            if chat.is_stream:
                return await self._stream(request, chat, head, mailbox)
            return await self._whole(chat, head, mailbox)

    @asynccontextmanager
    async def _generation(self, chat: ChatRequest, peer: Peer) -> AsyncIterator[tuple[Head, Mailbox]]:
        """The generation lives as long as its response: it ends when the client hangs up."""
        mailbox = Mailbox()
        generation = await self._submit(chat, peer.owner, mailbox.push)
        self._remember(generation.rid, peer.owner)
        try:
            yield Head(generation.rid, self._inference.model_name, int(self._clock())), mailbox
        finally:
            generation.cancel()

    async def _submit(self, chat: ChatRequest, owner: str, sink: Sink) -> Generation:
        if chat.conversation is None:
            return await self._inference.submit(chat.given, owner=owner, sink=sink)
        request = TurnRequest(owner=owner, ref=f"@{chat.conversation}", given=chat.given, may_repeat=True)
        return await self._sessions.turn(request).submit(sink)

    async def _whole(self, chat: ChatRequest, head: Head, mailbox: Mailbox) -> web.Response:
        choices = [ChoiceText() for _ in range(chat.num_choices)]
        while True:
            match await mailbox.next():
                case Delta() as delta:
                    choices[delta.choice].add(delta.channel, delta.text, await self._logprobs(delta))
                case Done() as done:
                    break
                case Failed() as failed:
                    raise failed.error
                case Started():
                    pass
        with_logprobs = bool(chat.given.logprobs)
        objects = [
            choice.to_choice(index, finish, with_reasoning=chat.with_reasoning, with_logprobs=with_logprobs)
            for index, (choice, finish) in enumerate(zip(choices, done.finishes, strict=True))
        ]
        return json_response(completion(head, objects, done))

    async def _stream(
        self, request: web.BaseRequest, chat: ChatRequest, head: Head, mailbox: Mailbox
    ) -> web.StreamResponse:
        chunks = Chunks(head, chat.with_usage_chunk)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(b"".join(chunks.first(index) for index in range(chat.num_choices)))
        while True:
            match await mailbox.next():
                case Delta() as delta:
                    if chat.with_reasoning or delta.channel == "content":
                        await self._write_delta(response, chunks, delta)
                case Done() as done:
                    await response.write(chunks.last(done))
                    return response
                case Failed() as failed:
                    await response.write(event(error_members(failed.error)) + END)
                    return response
                case Started():
                    pass

    async def _write_delta(self, response: web.StreamResponse, chunks: Chunks, delta: Delta) -> None:
        logprobs = await self._logprobs(delta)
        texts = list(split_text(delta.text, self._limits.frame_bytes - CHUNK_OVERHEAD))
        for text in texts or ([""] if logprobs else []):
            await response.write(chunks.text(delta.choice, delta.channel, text, logprobs))
            logprobs = []

    async def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Those of the content; the thought and the end token, which has no text, have no place in OpenAI's format."""
        if delta.channel == "reasoning":
            return []
        return [await self._texts.describe(logprob) for logprob in delta.logprobs if logprob.text]


def _in_their_words(error: EdgeqwenError, members: Mapping[str, Any]) -> EdgeqwenError:
    """The engine knows `max_completion_tokens` by its older name only, and a conversation is a session."""
    if error.field == "session":
        return EdgeqwenError(error.message, code=error.code, field="conversation_id")
    if error.field != "max_tokens" or members.get("max_completion_tokens") is None:
        return error
    message = error.message.replace("max_tokens", "max_completion_tokens")
    return EdgeqwenError(message, code=error.code, field="max_completion_tokens", retry_ms=error.retry_ms)

"""`POST /v1/chat/completions`: one generation, answered in one piece or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgeqwen.core.request import Delta, ToolCall
from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.event_stream import CHUNK_OVERHEAD, event, open_event_stream
from edgeqwen.http.generations import Generations, Head, Piece, Running, is_shown, renamed
from edgeqwen.http.openai_reply import END, ChoiceText, Chunks, completion, logprob_object
from edgeqwen.http.openai_request import NAMES, ChatRequest, read_chat
from edgeqwen.http.replies import error_members, json_response
from edgeqwen.http.requests import read_object
from edgeqwen.http.token_texts import TokenTexts
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import side_by_side, split_text


class ChatCompletions:
    """Serves the route."""

    def __init__(self, generations: Generations, texts: TokenTexts, limits: WireLimits) -> None:
        self._generations = generations
        self._texts = texts
        self._limits = limits

    async def answer(self, request: web.BaseRequest, _: str, peer: Peer) -> web.StreamResponse:
        """Raises `EdgeqwenError` as long as nothing was sent."""
        members = await read_object(request, self._limits)
        chat = read_chat(members)
        try:
            return await self._answer(request, chat, peer)
        except EdgeqwenError as exc:
            raise _in_their_words(exc, members) from exc

    async def _answer(self, request: web.BaseRequest, chat: ChatRequest, peer: Peer) -> web.StreamResponse:
        async with self._generations.open([chat.given], peer.owner, conversation=chat.conversation) as (head, running):
            if chat.is_stream:
                return await self._stream(request, chat, head, running)
            return await self._whole(chat, head, running)

    async def _whole(self, chat: ChatRequest, head: Head, running: Running) -> web.Response:
        choices = [ChoiceText() for _ in range(chat.num_choices)]
        num_bytes = 0
        async for piece in running.pieces():
            if num_bytes > self._limits.http_reply_bytes:
                running.cancel()
                continue
            num_bytes += choices[piece.choice].add(piece, await self._logprobs(piece))
        ending = running.ending
        with_logprobs = bool(chat.given.logprobs)
        objects = [
            choice.to_choice(index, finish, with_reasoning=chat.with_reasoning, with_logprobs=with_logprobs)
            for index, (choice, finish) in enumerate(zip(choices, ending.finishes, strict=True))
        ]
        return json_response(completion(head, objects, ending.usage))

    async def _stream(
        self, request: web.BaseRequest, chat: ChatRequest, head: Head, running: Running
    ) -> web.StreamResponse:
        chunks = Chunks(head, chat.with_usage_chunk)
        response = await open_event_stream(request)
        await response.write(b"".join(chunks.first(index) for index in range(chat.num_choices)))
        try:
            async for piece in running.pieces():
                if is_shown(piece, with_reasoning=chat.with_reasoning):
                    for data in self._chunks(chunks, piece, await self._logprobs(piece)):
                        await response.write(data)
        except EdgeqwenError as error:
            await response.write(event(error_members(error)) + END)
        else:
            await response.write(chunks.last(running.ending))
        return response

    def _chunks(self, chunks: Chunks, piece: Piece, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        """A piece in chunks of at most the size of a frame."""
        room = self._limits.frame_bytes - CHUNK_OVERHEAD
        if isinstance(piece, ToolCall):
            yield chunks.call(piece)
            for text in split_text(piece.arguments, room):
                yield chunks.arguments(piece, text)
            return
        for text, entries in side_by_side(piece.text, logprobs, room):
            yield chunks.text(piece.choice, piece.channel, text, entries)

    async def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        """Those of the content; the thought and the end token, which has no text, have no place in OpenAI's format."""
        if not isinstance(piece, Delta) or piece.channel == "reasoning":
            return []
        return [
            logprob_object(await self._texts.of(entry.token), entry.logprob, await self._texts.alternatives(entry))
            for entry in piece.logprobs
            if entry.text
        ]


def _in_their_words(error: EdgeqwenError, members: Mapping[str, Any]) -> EdgeqwenError:
    """The engine knows some fields by other names than this format, and a conversation is a session."""
    if error.field == "session":
        return error.reworded(error.message, field="conversation_id")
    if members.get("max_completion_tokens") is not None:
        return renamed(error, {**NAMES, "max_tokens": "max_completion_tokens"})
    return renamed(error, NAMES)

"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's format."""

from __future__ import annotations

import re

from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.anthropic_reply import BlockEvents, BlockList, error_event, message_object, stop_members
from edgeqwen.http.anthropic_request import NAMES, MessagesRequest, read_messages, read_prompt
from edgeqwen.http.event_stream import open_event_stream
from edgeqwen.http.generations import Generations, Head, Running, is_shown, renamed
from edgeqwen.http.replies import json_response
from edgeqwen.http.requests import read_object
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer

_MESSAGE: re.Pattern[str] = re.compile(r"messages\[(\d+)\]")


class Messages:
    """Serves the routes."""

    def __init__(self, generations: Generations, limits: WireLimits) -> None:
        self._generations = generations
        self._limits = limits

    async def answer(self, request: web.BaseRequest, _: str, peer: Peer) -> web.StreamResponse:
        """Raises `EdgeqwenError` as long as nothing was sent."""
        wanted = read_messages(await read_object(request, self._limits))
        try:
            async with self._generations.open([wanted.given], peer.owner) as (head, running):
                if wanted.is_stream:
                    return await self._stream(request, wanted, head, running)
                return await self._whole(wanted, head, running)
        except EdgeqwenError as exc:
            raise _in_their_words(exc, wanted) from exc

    async def count(self, request: web.BaseRequest, _: str, _peer: Peer) -> web.StreamResponse:
        wanted = read_prompt(await read_object(request, self._limits))
        try:
            prompt = await self._generations.inference.prompt(wanted.given)
        except EdgeqwenError as exc:
            raise _in_their_words(exc, wanted) from exc
        return json_response({"input_tokens": len(prompt.ids)})

    async def _whole(self, wanted: MessagesRequest, head: Head, running: Running) -> web.Response:
        blocks = BlockList()
        num_bytes = 0
        async for piece in running.pieces():
            if num_bytes > self._limits.http_reply_bytes:
                running.cancel()
            elif is_shown(piece, with_reasoning=wanted.with_thinking):
                num_bytes += blocks.add(piece)
        ending = running.ending
        return json_response(message_object(head, blocks.to_content(), ending.usage) | stop_members(ending))

    async def _stream(
        self, request: web.BaseRequest, wanted: MessagesRequest, head: Head, running: Running
    ) -> web.StreamResponse:
        events = BlockEvents(head, self._limits.frame_bytes)
        response = await open_event_stream(request)
        await response.write(events.first(running.num_prompt_tokens))
        try:
            async for piece in running.pieces():
                if is_shown(piece, with_reasoning=wanted.with_thinking):
                    for data in events.piece(piece):
                        await response.write(data)
        except EdgeqwenError as error:
            await response.write(error_event(error))
        else:
            await response.write(events.last(running.ending))
        return response


def _in_their_words(error: EdgeqwenError, wanted: MessagesRequest) -> EdgeqwenError:
    """The engine knows some fields by other names, and counts messages that were made of the client's blocks."""

    def theirs(match: re.Match[str]) -> str:
        number = int(match[1])
        origin = wanted.origins[number] if number < len(wanted.origins) else number
        return "system" if origin is None else f"messages[{origin}]"

    found = renamed(error, NAMES)
    field = None if found.field is None else _MESSAGE.sub(theirs, found.field)
    return found.reworded(_MESSAGE.sub(theirs, found.message), field=field)

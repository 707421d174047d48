"""`POST /v1/completions`: prompts without a template, each continued on its own, answered as one."""

from __future__ import annotations

from collections.abc import Sequence

from edgeqwen.core.request import Delta
from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.completion_reply import (
    CompletionText,
    TokenList,
    choice_object,
    completion_object,
    last_events,
    part_event,
)
from edgeqwen.http.completion_request import NAMES, CompletionRequest, read_completion
from edgeqwen.http.event_stream import CHUNK_OVERHEAD, event, open_event_stream
from edgeqwen.http.generations import Generations, Head, Running, renamed
from edgeqwen.http.openai_reply import END
from edgeqwen.http.replies import error_members, json_response
from edgeqwen.http.requests import read_object
from edgeqwen.http.token_texts import TokenTexts
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import side_by_side


class Completions:
    """Serves the route."""

    def __init__(self, generations: Generations, texts: TokenTexts, limits: WireLimits) -> None:
        self._generations = generations
        self._texts = texts
        self._limits = limits

    async def answer(self, request: web.BaseRequest, _: str, peer: Peer) -> web.StreamResponse:
        """Raises `EdgeqwenError` as long as nothing was sent."""
        wanted = read_completion(await read_object(request, self._limits))
        try:
            async with self._generations.open(wanted.given, peer.owner) as (head, running):
                if wanted.is_stream:
                    return await self._stream(request, wanted, head, running)
                return await self._whole(wanted, head, running)
        except EdgeqwenError as exc:
            raise renamed(exc, NAMES) from exc

    async def _whole(self, wanted: CompletionRequest, head: Head, running: Running) -> web.Response:
        choices = [CompletionText() for _ in range(wanted.num_choices * len(wanted.given))]
        num_bytes = 0
        async for piece in running.pieces():
            assert isinstance(piece, Delta), "calls are told for tools only"
            if num_bytes > self._limits.http_reply_bytes:
                running.cancel()
                continue
            choice = choices[piece.choice]
            await self._take_logprobs(choice.tokens, piece)
            num_bytes += choice.add(piece.text, sum(1 + len(entry.top) for entry in piece.logprobs))
        ending = running.ending
        objects = [
            choice.to_choice(index, finish)
            for index, (choice, finish) in enumerate(zip(choices, ending.finishes, strict=True))
        ]
        return json_response(completion_object(head, objects, ending.usage))

    async def _stream(
        self, request: web.BaseRequest, wanted: CompletionRequest, head: Head, running: Running
    ) -> web.StreamResponse:
        lists = [TokenList() for _ in range(wanted.num_choices * len(wanted.given))]
        response = await open_event_stream(request)
        try:
            async for piece in running.pieces():
                assert isinstance(piece, Delta), "calls are told for tools only"
                for data in await self._parts(head, wanted, lists, piece):
                    await response.write(data)
        except EdgeqwenError as error:
            await response.write(event(error_members(error)) + END)
        else:
            await response.write(last_events(head, running.ending, with_usage=wanted.with_usage_chunk))
        return response

    async def _parts(
        self, head: Head, wanted: CompletionRequest, lists: Sequence[TokenList], piece: Delta
    ) -> list[bytes]:
        """A piece in parts of at most the size of a frame."""
        tokens = lists[piece.choice]
        await self._take_logprobs(tokens, piece)
        room = self._limits.frame_bytes - CHUNK_OVERHEAD
        return [
            part_event(head, choice_object(piece.choice, text, entries), with_usage=wanted.with_usage_chunk)
            for text, entries in side_by_side(piece.text, tokens.take(), room)
        ]

    async def _take_logprobs(self, tokens: TokenList, piece: Delta) -> None:
        """Those with a text: the end token has none."""
        for entry in piece.logprobs:
            if entry.text:
                top = await self._texts.alternatives(entry)
                tokens.add(await self._texts.of(entry.token), entry.logprob, top)

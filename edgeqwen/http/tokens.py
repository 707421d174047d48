"""`POST /v1/tokenize` and `/v1/detokenize`, in the form that other servers of open models have them."""

from __future__ import annotations

from typing import Any

import msgspec

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.generations import renamed
from edgeqwen.http.openai_request import NAMES, Turn, read_template_kwargs, read_turns
from edgeqwen.http.replies import json_response
from edgeqwen.http.requests import read_object
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import convert, given_members
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import bytes_members


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, or messages, which the model's template makes a prompt of. With `special`, the texts of added tokens in
    `prompt` become their ids.
    """

    model: str | None = None
    prompt: str | None = None
    special: bool = False
    messages: list[Turn] | None = None
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class Tokens:
    """Serves the routes."""

    def __init__(self, inference: Inference, limits: WireLimits) -> None:
        self._inference = inference
        self._limits = limits

    async def tokenize(self, request: web.BaseRequest, _: str, _peer: Peer) -> web.StreamResponse:
        body: TokenizeBody = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", field="prompt")
        if body.prompt is not None:
            ids = await self._inference.tokenize(body.prompt, special=body.special)
        else:
            ids = await self._prompt_ids(body)
        context = {"max_model_len": self._inference.context} if self._inference.context else {}
        return json_response({"tokens": ids, "count": len(ids), **context})

    async def _prompt_ids(self, body: TokenizeBody) -> list[int]:
        think, template_kwargs = read_template_kwargs(body.chat_template_kwargs, body.enable_thinking)
        given = GenerationInput(
            messages=read_turns(body.messages or []),
            tools=tuple(body.tools or ()),
            think=think,
            template_kwargs=template_kwargs,
        )
        try:
            return list((await self._inference.prompt(given)).ids)
        except EdgeqwenError as exc:
            raise renamed(exc, NAMES) from exc

    async def detokenize(self, request: web.BaseRequest, _: str, _peer: Peer) -> web.StreamResponse:
        """The text as `prompt`; bytes that are no text, in base64, as `b64`."""
        body: DetokenizeBody = await self._read(request, DetokenizeBody)
        return json_response(bytes_members(await self._inference.detokenize(body.tokens), "prompt"))

    async def _read(self, request: web.BaseRequest, kind: type[Any]) -> Any:
        members = await read_object(request, self._limits)
        return convert(given_members(members), kind)

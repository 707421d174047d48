"""The HTTP side of a server: routes, and who answers them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from aiohttp import web

from edgeqwen.engine.inference import Inference
from edgeqwen.errors import EdgeqwenError
from edgeqwen.http.completions import ChatCompletions
from edgeqwen.http.operations import LineOperations, refusal
from edgeqwen.http.replies import error_response, json_response
from edgeqwen.http.requests import check_source, read_object
from edgeqwen.http.seam import Operations
from edgeqwen.http.session import HttpHandler, HttpServer, HttpSession
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import Health, Ready, Stats
from edgeqwen.protocol.operation import Operation
from edgeqwen.protocol.peer import Peer
from edgeqwen.sessions.sessions import Sessions

log = logging.getLogger(__name__)

CHAT_PATH: Final = "/v1/chat/completions"
MODELS_PATH: Final = "/v1/models"
EQP_PREFIX: Final = "/eqp/"
PROBES: Final[dict[str, Operation]] = {"/health": Health(), "/ready": Ready(), "/stats": Stats()}
CLOSING: Final = frozenset({"too_large", "timeout"})
"""Errors after which the rest of the body is not worth reading."""


class HttpFront:
    """Opens HTTP sessions on connections of the socket."""

    def __init__(self, inference: Inference, operations: Operations, limits: WireLimits, *, sessions: Sessions) -> None:
        self._inference = inference
        self._operations = operations
        self._limits = limits
        self._completions = ChatCompletions(inference, limits=limits, remember=operations.remember, sessions=sessions)
        self._lines = LineOperations(operations)
        self._created = int(time.time())

    def open(self, transport: asyncio.Transport, peer: Peer) -> HttpSession:
        """Take over a connection whose first byte was HTTP's; that byte is still to be passed to `data_received`."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            assert isinstance(request.protocol, HttpHandler)
            request.protocol.begin(request)
            return await self._handle(request, peer)

        return HttpSession(transport, HttpServer(handle, limits=self._limits)(), self._limits)

    async def _handle(self, request: web.BaseRequest, peer: Peer) -> web.StreamResponse:
        try:
            check_source(request)
            return await self._route(request, peer)
        except EdgeqwenError as exc:
            response = _refusal(request, exc)
            if exc.code in CLOSING:
                response.force_close()
            return response

    async def _route(self, request: web.BaseRequest, peer: Peer) -> web.StreamResponse:
        path = request.path
        is_post = path == CHAT_PATH or path.startswith(EQP_PREFIX)
        if not is_post and path not in PROBES and path != MODELS_PATH:
            raise EdgeqwenError("there is nothing at this path", code="not_found")
        if request.method != ("POST" if is_post else "GET"):
            error = EdgeqwenError("this path does not take this method", code="bad_request")
            response = _refusal(request, error)
            response.set_status(405)
            response.headers["Allow"] = "POST" if is_post else "GET"
            return response
        if path == CHAT_PATH:
            return await self._completions.answer(request, await read_object(request, self._limits), peer)
        if is_post:
            members = await read_object(request, self._limits, may_be_empty=True)
            return await self._lines.answer(request, path.removeprefix(EQP_PREFIX), members, peer)
        if path == MODELS_PATH:
            return self._models()
        found = self._operations.answer(PROBES[path], peer, cancel_id=lambda _: 0)
        return json_response(found, status=200 if found.get("ok", True) else 500)

    def _models(self) -> web.Response:
        model = {"id": self._inference.model_name, "object": "model", "created": self._created, "owned_by": "edgeqwen"}
        return json_response({"object": "list", "data": [model]})


def _refusal(request: web.BaseRequest, error: EdgeqwenError) -> web.Response:
    """In the form that the path's clients read."""
    return refusal(error) if request.path.startswith(EQP_PREFIX) else error_response(error)

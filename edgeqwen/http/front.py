"""The HTTP side of a server: routes, and who answers them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

from edgeqwen.engine.inference import Inference
from edgeqwen.errors import CODES, EdgeqwenError
from edgeqwen.http import anthropic_reply, web
from edgeqwen.http.access import HttpAccess
from edgeqwen.http.batch import Batches
from edgeqwen.http.chat import ChatCompletions
from edgeqwen.http.completions import Completions
from edgeqwen.http.embeddings import EmbeddingVectors
from edgeqwen.http.generations import Generations
from edgeqwen.http.messages import Messages
from edgeqwen.http.models import Models
from edgeqwen.http.operations import LineOperations, refusal
from edgeqwen.http.page import answer_icon, answer_page
from edgeqwen.http.replies import error_response, json_response
from edgeqwen.http.routes import Answer, Route, Routes
from edgeqwen.http.seam import Operations
from edgeqwen.http.session import HttpHandler, HttpServer, HttpSession, handler_of
from edgeqwen.http.sources import KeyRefused, Sources
from edgeqwen.http.token_texts import TokenTexts
from edgeqwen.http.tokens import Tokens
from edgeqwen.metrics import CONTENT_TYPE
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import Health, Metrics, Ready, Stats
from edgeqwen.protocol.operation import Operation
from edgeqwen.protocol.peer import Peer
from edgeqwen.sessions.sessions import Sessions

PROBES: Final[Mapping[str, Operation]] = {"/health": Health(), "/ready": Ready(), "/stats": Stats()}
CLOSING: Final = frozenset({"too_large", "timeout"})
"""Errors after which the rest of the body is not worth reading."""


class HttpFront:
    """Opens HTTP sessions on connections."""

    def __init__(
        self,
        inference: Inference,
        operations: Operations,
        limits: WireLimits,
        *,
        sessions: Sessions,
        access: HttpAccess | None = None,
    ) -> None:
        self._inference = inference
        self._operations = operations
        self._sessions = sessions
        self._sources = Sources(access or HttpAccess())
        self._owners: dict[HttpHandler, str] = {}  # whose request is being answered on a connection of the network
        self.set_limits(limits)

    def set_limits(self, limits: WireLimits) -> None:
        """For requests that come from now on; each keeps those that it began with."""
        self._limits = limits
        self.routes = self._make_routes(limits)

    def set_access(self, access: HttpAccess) -> None:
        """For requests that come from now on. What runs for a key that is gone is cut off: a batch may run for ever."""
        self._sources.access = access
        for handler, owner in tuple(self._owners.items()):
            if not access.knows(owner) and handler.transport is not None:
                handler.transport.abort()

    def _make_routes(self, limits: WireLimits) -> Routes:
        inference, sessions = self._inference, self._sessions
        generations = Generations(inference, sessions, remember=self._operations.remember)
        texts = TokenTexts(inference)
        tokens, models = Tokens(inference, limits), Models(inference)
        messages = Messages(generations, limits)
        openai = error_response
        anthropic = anthropic_reply.error_response
        return Routes(
            [
                Route("POST", "/v1/chat/completions", ChatCompletions(generations, texts, limits).answer, openai),
                Route("POST", "/v1/completions", Completions(generations, texts, limits).answer, openai),
                Route("POST", "/v1/embeddings", EmbeddingVectors(inference, limits).answer, openai),
                Route("POST", "/v1/tokenize", tokens.tokenize, openai),
                Route("POST", "/v1/detokenize", tokens.detokenize, openai),
                Route("GET", "/v1/models", models.list, openai),
                Route("GET", "/v1/models/{model}", models.one, openai),
                Route("POST", "/v1/messages", messages.answer, anthropic),
                Route("POST", "/v1/messages/count_tokens", messages.count, anthropic),
                Route("POST", "/eqp/batch", Batches(self._operations, limits).answer, refusal),
                Route("POST", "/eqp/{op}", LineOperations(self._operations, limits).answer, refusal),
                Route("GET", "/metrics", self._metrics, openai),
                Route("GET", "/", answer_page, openai),
                Route("GET", "/favicon.ico", answer_icon, openai),
                *(Route("GET", path, self._probe(operation), openai) for path, operation in PROBES.items()),
            ],
            refuse=openai,
        )

    def open(self, transport: asyncio.Transport, peer: Peer) -> HttpSession:
        """Take over a connection whose first byte was HTTP's; that byte is still to be passed to `data_received`."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            handler = handler_of(request)
            handler.begin(request)
            response = await self._handle(request, peer)
            self._operations.note_response(response.status)
            if not response.prepared:
                response.headers.update(handler.common_headers)
            return response

        return HttpSession(transport, HttpServer(handle, limits=self._limits)(), self._limits)

    async def _handle(self, request: web.BaseRequest, peer: Peer) -> web.StreamResponse:
        try:
            asker = self._sources.check(request, peer)
            if self._sources.is_preflight(request):
                return self._sources.preflight(request)
            with self._noted(request, asker):
                return await self._answer(request, asker)
        except EdgeqwenError as exc:
            response = self.routes.refuse(request.path, exc, status=401 if isinstance(exc, KeyRefused) else None)
            if isinstance(exc, KeyRefused):
                response.headers["WWW-Authenticate"] = "Bearer"
            if exc.code in CLOSING:
                response.force_close()
            return response

    @contextlib.contextmanager
    def _noted(self, request: web.BaseRequest, asker: Peer) -> Iterator[None]:
        """While it is answered, it is known whose a request of the network is."""
        handler = handler_of(request)
        if asker.is_remote:
            self._owners[handler] = asker.owner
        try:
            yield
        finally:
            self._owners.pop(handler, None)

    async def _answer(self, request: web.BaseRequest, peer: Peer) -> web.StreamResponse:
        routes, rest = self.routes.find(request.path)
        if not routes:
            raise EdgeqwenError("there is nothing at this path", code="not_found")
        route = routes.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            error = EdgeqwenError("this path does not take this method", code="bad_request")
            response = self.routes.refuse(request.path, error, status=405)
            response.headers["Allow"] = ", ".join(sorted(routes.keys() | ({"HEAD"} if "GET" in routes else set())))
            return response
        return await route.answer(request, rest, peer)

    async def _metrics(self, _request: web.BaseRequest, _: str, peer: Peer) -> web.StreamResponse:
        found = self._operations.answer(Metrics(), peer, cancel_id=lambda _: 0)
        return web.Response(body=found["text"].encode(), headers={"Content-Type": CONTENT_TYPE})

    def _probe(self, operation: Operation) -> Answer:
        async def answer(_request: web.BaseRequest, _: str, peer: Peer) -> web.StreamResponse:
            found = self._operations.answer(operation, peer, cancel_id=lambda _: 0)
            return json_response(found, status=200 if found.get("ok", True) else CODES["engine"].http_status)

        return answer

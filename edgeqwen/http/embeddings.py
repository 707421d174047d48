"""`POST /v1/embeddings`: texts or token ids in, a vector for each out.

Clients of this format send many texts at once (LangChain a thousand). The engine takes them in groups, one after
another, so that others have their turn in between and no more than a group and the reply are held.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from edgeqwen.engine.embeddings import EmbeddingInput, Embeddings
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.generations import renamed
from edgeqwen.http.openai_input import Texts, read_texts
from edgeqwen.http.replies import json_response
from edgeqwen.http.requests import read_object
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import convert, given_members
from edgeqwen.protocol.peer import Peer
from edgeqwen.server.embedding import DECIMALS, NUMBER_BYTES

NAMES: Final[Mapping[str, str]] = {"texts": "input", "tokens": "input", "op": "model"}
"""The engine's name of a field: its name here."""

ENCODINGS: Final = ("float", "base64")

MAX_INPUTS: Final = 2048
"""Texts of one request, as OpenAI has it."""

OBJECT_BYTES: Final = 64
"""What stands around a vector in the reply, at most."""


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The supported fields; `input` is read on its own. `user` is accepted and means nothing."""

    model: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    pooling: str | None = None
    deadline_ms: int | None = None
    user: str | None = None


class EmbeddingVectors:
    """Serves the route."""

    def __init__(self, inference: Inference, limits: WireLimits) -> None:
        self._inference = inference
        self._limits = limits

    async def answer(self, request: web.BaseRequest, _: str, peer: Peer) -> web.StreamResponse:
        """Raises `EdgeqwenError`."""
        members = await read_object(request, self._limits)
        given = given_members(members)
        texts = read_texts(given.pop("input", None), "input")
        body: EmbeddingBody = convert(given, EmbeddingBody)
        if body.encoding_format not in ENCODINGS:
            raise BadRequest(f"encoding_format must be one of {', '.join(ENCODINGS)}", field="encoding_format")
        if len(texts) > MAX_INPUTS:
            raise BadRequest(f"input must hold at most {MAX_INPUTS} texts, not {len(texts)}", field="input")
        self._check_size(len(texts), self._inference.hidden_size, body)
        vectors: list[msgspec.Raw] = []
        num_tokens = 0
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        deadline_ms = self._inference.limits.max_deadline_ms if body.deadline_ms is None else body.deadline_ms
        for group in self._groups(texts):
            left_ms = _left_ms(deadline_ms, loop.time() - began_at)
            found = await self._embed(group, body, peer, deadline_ms=left_ms, num_before=len(vectors))
            self._check_size(len(texts), found.vectors.shape[1], body)  # the model may not have been there before
            vectors += _encoded(found, body.encoding_format)
            num_tokens += found.num_tokens
        return json_response(self._reply(vectors, num_tokens))

    def _groups(self, texts: Texts) -> Iterator[Texts]:
        size = self._inference.limits.texts
        return (texts[start : start + size] for start in range(0, len(texts), size))

    async def _embed(
        self, texts: Texts, body: EmbeddingBody, peer: Peer, *, deadline_ms: int, num_before: int
    ) -> Embeddings:
        source: dict[str, Any] = {"texts" if isinstance(texts[0], str) else "tokens": texts}
        wanted = EmbeddingInput(**source, pooling=body.pooling, deadline_ms=deadline_ms)
        try:
            return await self._inference.embed(wanted, owner=peer.owner)
        except EdgeqwenError as exc:
            raise renamed(exc, NAMES).counted_from(num_before) from exc

    def _check_size(self, count: int, num_dims: int, body: EmbeddingBody) -> None:
        """Raise `BadRequest` for vectors of another length than the model's, or for more than a reply holds."""
        if not num_dims:
            return
        if body.dimensions not in {None, num_dims}:
            raise BadRequest(f"dimensions must be {num_dims}, or be left out", field="dimensions")
        num_bytes = OBJECT_BYTES + (16 * num_dims // 3 if body.encoding_format == "base64" else NUMBER_BYTES * num_dims)
        if count > (most := self._limits.http_reply_bytes // num_bytes):
            message = f"input: {count} vectors of {num_dims} numbers are too long a reply; send at most {most} at once"
            raise BadRequest(message, field="input")

    def _reply(self, vectors: list[msgspec.Raw], num_tokens: int) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
            "model": self._inference.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _left_ms(deadline_ms: int, past_s: float) -> int:
    """What is left of a deadline; as long as no time has passed, what the client gave, right or wrong."""
    past_ms = int(1000 * past_s)
    return max(1, deadline_ms - past_ms) if past_ms else deadline_ms


def _encoded(found: Embeddings, encoding: str) -> list[msgspec.Raw]:
    """The vectors as they stand in the reply; base64 is of their bytes, least significant first."""
    if encoding == "base64":
        rows = found.vectors.astype("<f4")
        return [msgspec.Raw(b'"' + base64.b64encode(row.tobytes()) + b'"') for row in rows]
    numbers = np.round(found.vectors.astype(np.float64), DECIMALS)
    return [msgspec.Raw(msgspec.json.encode(row.tolist())) for row in numbers]

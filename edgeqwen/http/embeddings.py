"""`POST /v1/embeddings`: texts or token ids in, a vector for each out."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from edgeqwen.engine.embeddings import EmbeddingInput, Embeddings
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.generations import renamed
from edgeqwen.http.openai_input import read_texts
from edgeqwen.http.replies import json_response
from edgeqwen.http.requests import read_object
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import convert, given_members
from edgeqwen.protocol.peer import Peer

NAMES: Final[Mapping[str, str]] = {"texts": "input", "tokens": "input", "op": "model"}
"""The engine's name of a field: its name here."""

ENCODINGS: Final = ("float", "base64")


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
        source: dict[str, Any] = {"texts" if isinstance(texts[0], str) else "tokens": texts}
        wanted = EmbeddingInput(**source, pooling=body.pooling, deadline_ms=body.deadline_ms)
        try:
            found = await self._inference.embed(wanted, owner=peer.owner)
        except EdgeqwenError as exc:
            raise renamed(exc, NAMES) from exc
        return json_response(self._reply(found, body))

    def _reply(self, found: Embeddings, body: EmbeddingBody) -> dict[str, Any]:
        num_dims = found.vectors.shape[1]
        if body.dimensions not in {None, num_dims}:
            raise BadRequest(f"dimensions must be {num_dims}, or be left out", field="dimensions")
        rows = found.vectors.astype("<f4")
        vectors = [_in_base64(row) if body.encoding_format == "base64" else row.tolist() for row in rows]
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
            "model": self._inference.model_name,
            "usage": {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens},
        }


def _in_base64(row: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    """The bytes of the numbers, least significant first."""
    return base64.b64encode(row.tobytes()).decode("ascii")

"""`GET /v1/models` and `/v1/models/{id}`: the one model, as OpenAI's and Anthropic's clients read it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from edgeqwen.engine.inference import Inference
from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.replies import json_response
from edgeqwen.protocol.peer import Peer


class Models:
    """Serves the routes. `created`, in seconds since 1970, is when the daemon started."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._created = int(time.time())

    async def list(self, _request: web.BaseRequest, _: str, _peer: Peer) -> web.StreamResponse:
        name = self._inference.model_name
        return json_response({
            "object": "list",
            "data": [self._model()],
            "has_more": False,
            "first_id": name,
            "last_id": name,
        })

    async def one(self, _request: web.BaseRequest, name: str, _peer: Peer) -> web.StreamResponse:
        """Generations take any name for the model's; here a name that it has not is `not_found`."""
        if name != self._inference.model_name:
            raise EdgeqwenError("there is no model of this name; GET /v1/models lists what there is", code="not_found")
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        name = self._inference.model_name
        members = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "edgeqwen",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        context = self._inference.context
        return members | ({"max_model_len": context} if context else {})

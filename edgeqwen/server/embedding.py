"""The answer to an `embed`: vectors as JSON, as many as a reply holds."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from edgeqwen.engine.embeddings import EmbeddingEnded, EmbeddingInput
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import BadRequest
from edgeqwen.protocol.answers import FINAL_BYTES
from edgeqwen.protocol.embed_message import Embed

DECIMALS: Final = 7
"""Of a number in a reply: what is cut off is a thousandth of what 8-bit weights change."""

NUMBER_BYTES: Final = len("-0.1234567,")


async def answer_embed(message: Embed, inference: Inference, owner: str, *, reply_bytes: int) -> dict[str, Any]:
    """Members of the final frame. Raises `EdgeqwenError`; one that is cut short is told by its `finish`."""
    _check_room(message, inference.hidden_size, reply_bytes)
    given = EmbeddingInput(
        texts=None if message.texts is None else tuple(message.texts),
        tokens=None if message.tokens is None else tuple(map(tuple, message.tokens)),
        pooling=message.pooling,
        deadline_ms=message.deadline_ms,
        priority=message.priority,
        wait=message.wait,
    )
    try:
        found = await inference.embed(given, owner=owner)
    except EmbeddingEnded as ended:
        return {"finish": ended.reason, "usage": {"prompt": ended.num_tokens}}
    dims = found.vectors.shape[1]
    _check_room(message, dims, reply_bytes)  # the model may not have been there before
    vectors = np.round(found.vectors.astype(np.float64), DECIMALS).tolist()
    return {"embeddings": vectors, "dims": dims, "usage": {"prompt": found.num_tokens}}


def _check_room(message: Embed, dims: int, reply_bytes: int) -> None:
    field = "texts" if message.tokens is None else "tokens"
    count = len(message.texts or message.tokens or ())
    most = (reply_bytes - FINAL_BYTES) // (NUMBER_BYTES * dims + 1) if dims else count
    if count > most:
        text = f"{count} vectors of {dims} numbers are more than a reply of {reply_bytes} bytes holds"
        raise BadRequest(f"{field}: {text}; send at most {most} at once", field=field)

"""JSON responses, and errors in the form that OpenAI's clients read."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from edgeqwen.errors import CODES, EdgeqwenError
from edgeqwen.http import web

JSON_TYPE: Final = "application/json"


def error_members(error: EdgeqwenError) -> dict[str, Any]:
    """OpenAI's error object; `code` is ours, `param` the field at fault."""
    status = CODES[error.code].http_status
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


def error_body(error: EdgeqwenError) -> bytes:
    return msgspec.json.encode(error_members(error))


def retry_headers(retry_ms: int | None) -> dict[str, str]:
    return {} if retry_ms is None else {"Retry-After": str(max(1, math.ceil(retry_ms / 1000)))}


def error_response(error: EdgeqwenError, status: int | None = None) -> web.Response:
    status = CODES[error.code].http_status if status is None else status
    headers = retry_headers(error.retry_ms)
    return web.Response(body=error_body(error), status=status, content_type=JSON_TYPE, headers=headers)


def json_response(members: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(members), status=status, content_type=JSON_TYPE)

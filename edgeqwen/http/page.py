"""The page at `/`: one file, which asks for nothing from elsewhere.

What it may do is in its Content-Security-Policy: run its own script and style, which are told by their digests, and
talk to this daemon. Text of a model that got into the page as markup would not run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files
from typing import Final

from edgeqwen.http import web
from edgeqwen.protocol.peer import Peer

_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def page() -> bytes:
    return files("edgeqwen.http").joinpath("page.html").read_bytes()


@functools.cache
def page_headers() -> dict[str, str]:
    digests: dict[str, str] = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in _INLINE.findall(page().decode())
    }
    rules = (
        "default-src 'none'",
        f"script-src 'sha256-{digests['script']}'",
        f"style-src 'sha256-{digests['style']}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(page()).hexdigest()[:16]}"',
    }


async def answer_page(request: web.BaseRequest, _: str, _peer: Peer) -> web.StreamResponse:
    """The page, or that the browser has it already."""
    headers = page_headers()
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers={"ETag": headers["ETag"], "Cache-Control": headers["Cache-Control"]})
    return web.Response(body=page(), headers=headers)


async def answer_icon(_request: web.BaseRequest, _: str, _peer: Peer) -> web.StreamResponse:
    """Browsers ask for it before they have read that the page brings its own."""
    return web.Response(status=204, headers={"Cache-Control": "max-age=86400"})

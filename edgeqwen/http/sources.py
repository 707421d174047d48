"""Where a request comes from, and who it is that asks: checked before anything else of it counts.

* A page of another site can make a browser send requests, which then come from this machine. Such requests are refused
  by what browsers say of them (`Origin`, `Sec-Fetch-Site`), unless the page's origin is a configured one.
* A name that resolves to this machine only for a moment (DNS rebinding) makes a foreign page the daemon's own, to the
  browser. So over the network `Host` must be a name that the daemon is known by.
* Over the network a key says who asks, if there are keys.
"""

from __future__ import annotations

import re
from typing import Final

from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.access import HttpAccess
from edgeqwen.http.session import SERVER, handler_of
from edgeqwen.protocol.peer import Peer

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
WITHOUT_KEY: Final = frozenset({"/health", "/", "/favicon.ico"})
"""What a network client may ask without a key; the page asks its user for one."""

PREFLIGHT_S: Final = 600
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@]+)(?::\d{1,5})?")


class KeyRefused(EdgeqwenError):
    """No key, or none of ours: HTTP's 401."""

    code = "forbidden"


class Sources:
    """Checks requests. `access` may be replaced; what it says counts for the next one."""

    def __init__(self, access: HttpAccess) -> None:
        self.access = access

    def check(self, request: web.BaseRequest, peer: Peer) -> Peer:
        """Who asks: `peer`, or who a key says. Raises `forbidden`, `KeyRefused`.

        Programs send neither `Origin` nor `Sec-Fetch-Site`; Node sends other `Sec-Fetch-*` headers, which say nothing.
        """
        host = _host_name(request)
        if peer.is_remote and host not in LOOPBACK | self.access.allowed_hosts:
            message = "this Host is not one that the daemon is known by; http.allowed_hosts names those that are"
            raise EdgeqwenError(message, code="forbidden", field="Host")
        self._check_origin(request, host)
        if not peer.is_remote or self.is_preflight(request) or self.access.keys is None:
            return peer
        return self._owner_of_key(request, peer)

    def _check_origin(self, request: web.BaseRequest, host: str | None) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() in self.access.allowed_origins:
            allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
            handler_of(request).common_headers = {**SERVER, **allowed}
            return
        if request.headers.get("Sec-Fetch-Site") in {"cross-site", "same-site"}:
            raise EdgeqwenError("requests from other sites are refused", code="forbidden", field="Sec-Fetch-Site")
        is_own = host in LOOPBACK | self.access.allowed_hosts and origin == f"http://{request.headers.get('Host')}"
        if origin is not None and not is_own:
            raise EdgeqwenError("requests from this origin are refused", code="forbidden", field="Origin")

    def _owner_of_key(self, request: web.BaseRequest, peer: Peer) -> Peer:
        assert self.access.keys is not None
        if request.path in WITHOUT_KEY:
            return peer
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        owner = self.access.keys.owner_of(key)
        if owner is None:
            raise KeyRefused("a key is needed, as Authorization: Bearer or x-api-key", field="Authorization")
        return Peer(peer.uid, owner, is_admin=False, is_remote=True)

    def is_preflight(self, request: web.BaseRequest) -> bool:
        """Whether a browser asks for a page of a configured origin what that may send; it has no key then."""
        is_trusted = "Access-Control-Allow-Origin" in handler_of(request).common_headers
        return request.method == "OPTIONS" and is_trusted and "Access-Control-Request-Method" in request.headers

    def preflight(self, request: web.BaseRequest) -> web.Response:
        """Whatever the page wants to send: its origin is trusted."""
        asked = request.headers
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": asked.get("Access-Control-Request-Headers", "Content-Type"),
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
        if asked.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)


def _host_name(request: web.BaseRequest) -> str | None:
    """The name in `Host`, lower case and without the port; None if there is none or more than one."""
    given = request.headers.getall("Host", [])
    match = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
    return match[1] if match else None

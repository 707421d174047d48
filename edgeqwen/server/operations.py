"""What each operation of `eqp/1` does, whichever way it came in: as a line or as the body of an HTTP request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import edgeqwen
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.protocol.answers import AnswerForm, Emit
from edgeqwen.protocol.embed_message import Embed
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Detokenize,
    Generation,
    Health,
    Hello,
    Metrics,
    Ready,
    Reload,
    RequestId,
    Shutdown,
    Stats,
    Tokenize,
)
from edgeqwen.protocol.operation import LaterOperation, Operation
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import bytes_members
from edgeqwen.protocol.session_messages import SessionOperation
from edgeqwen.server.embedding import answer_embed
from edgeqwen.server.exporter import Exporter
from edgeqwen.server.requests import read_submission
from edgeqwen.server.statistics import Statistics
from edgeqwen.server.work import Work
from edgeqwen.sessions.sessions import Sessions

FEATURES: Final = ("batch", "embed", "http", "response_format", "session", "think_budget", "tools")
"""What there is beside plain generation."""

OnReload: TypeAlias = Callable[[str], dict[str, Any]]
"""Reads the configuration again for whom it is told of; gives the members of the answer. Raises `EdgeqwenError`."""

NUM_REMEMBERED: Final = 1024
MAX_CHOICES: Final = 8
"""More are refused at submission; an answer is made before that and must not cost what was asked for."""


class Operations:
    """Serves the operations. `statistics` answers `stats`, `exporter` `metrics`; `on_shutdown(drain_s)`
    begins the end (None: within the daemon's own time); `on_reload(who)` reads the configuration again.
    """

    def __init__(
        self,
        inference: Inference,
        sessions: Sessions,
        *,
        limits: WireLimits,
        statistics: Statistics,
        exporter: Exporter,
        on_shutdown: Callable[[float | None], None],
        on_reload: OnReload,
    ) -> None:
        self._inference = inference
        self._sessions = sessions
        self._limits = limits
        self._statistics = statistics
        self._exporter = exporter
        self._on_shutdown = on_shutdown
        self.on_reload = exporter.counting(on_reload)
        self._owners: OrderedDict[str, str] = OrderedDict()  # rid to owner, of the last ones

    def set_limits(self, limits: WireLimits) -> None:
        """For requests that come from now on."""
        self._limits = limits

    def start(self, message: Generation, peer: Peer, *, emit: Emit, is_writable: Callable[[], bool]) -> Work:
        """Make the work of a generation, not yet started. Raises `BadRequest`."""
        num_choices = message.n if message.n is not None and 1 <= message.n <= MAX_CHOICES else 1
        form = AnswerForm(
            is_stream=message.stream,
            is_verbose=message.verbose,
            num_choices=num_choices,
            frame_bytes=self._limits.frame_bytes,
            reply_bytes=self._limits.reply_bytes,
        )
        submission = read_submission(message, peer.owner, self._inference, self._sessions)
        return Work(
            submission.submit,
            form,
            emit=emit,
            is_writable=is_writable,
            on_accepted=lambda rid: self.remember(rid, peer.owner),
            final_members=submission.final_members,
        )

    def note_error(self, code: str) -> None:
        """A line was answered with an error."""
        self._exporter.line_errors[code] += 1

    def note_response(self, status: int) -> None:
        """An HTTP request was answered."""
        self._exporter.http_responses[status] += 1

    def remember(self, rid: str, owner: str) -> None:
        """Keep whose generation `rid` is, so that cancelling it after its end is no error."""
        self._owners[rid] = owner
        if len(self._owners) > NUM_REMEMBERED:
            self._owners.popitem(last=False)

    def answer(self, message: Operation, peer: Peer, *, cancel_id: Callable[[RequestId], int]) -> dict[str, Any]:
        """The final frame of an operation that needs no waiting; `cancel_id` ends work of the caller's connection."""
        match message:
            case Hello():
                return self._hello()
            case Health():
                return self._health()
            case Ready():
                return self._ready()
            case Stats():
                return self._statistics.members(peer)
            case Metrics():
                return {"text": self._exporter.text_for(peer)}
            case Cancel():
                return {"cancelled": self._cancel(message, peer, cancel_id)}
            case Shutdown():
                return self._shutdown(message, peer)
            case Reload():
                return self._reload(peer)
        raise AssertionError(f"{type(message).__name__} is not answered at once")

    async def answer_later(self, message: LaterOperation, peer: Peer) -> dict[str, Any]:
        """The final frame of an operation that another thread works on. Raises `EdgeqwenError`."""
        match message:
            case Embed():
                limit = self._limits.reply_bytes
                return await answer_embed(message, self._inference, peer.owner, reply_bytes=limit)
            case SessionOperation():
                return await self._sessions.answer(message, peer.owner)
            case Tokenize():
                tokens = await self._inference.tokenize(message.text, special=message.special)
                return {"tokens": list(tokens), "n": len(tokens)}
            case Detokenize():
                return bytes_members(await self._inference.detokenize(message.tokens))
        raise AssertionError(f"{type(message).__name__} is not answered later")

    def _hello(self) -> dict[str, Any]:
        limits, engine, sessions = self._limits, self._inference.limits, self._sessions.limits
        return {
            "proto": [PROTOCOL_VERSION],
            "server": f"edgeqwen/{edgeqwen.__version__}",
            "features": FEATURES,
            "limits": {
                "line": limits.line_bytes,
                "frame": limits.frame_bytes,
                "reply": limits.reply_bytes,
                "nesting": limits.nesting,
                "messages": engine.messages,
                "stop": engine.stop_strings,
                "stop_bytes": engine.stop_bytes,
                "n": engine.choices,
                "deadline_ms": engine.max_deadline_ms,
                "texts": engine.texts,
                "batch": limits.batch_items,
                "inflight": limits.inflight,
                "queue": engine.queue,
                "per_uid": engine.per_owner,
                "connections": limits.connections,
                "connections_per_uid": limits.connections_per_uid,
                "sessions": sessions.per_owner,
                "session_ttl_s": sessions.ttl_s,
            },
        }

    def _health(self) -> dict[str, Any]:
        members: dict[str, Any] = {"ok": self._inference.state != "failed", "state": self._inference.state}
        if self._inference.state == "loading":
            members["progress"] = round(self._inference.progress, 3)
        return members

    def _ready(self) -> dict[str, Any]:
        self._inference.check_ready()
        return {"ok": True, "model": self._inference.model_name, "quant": self._inference.quant}

    def _cancel(self, message: Cancel, peer: Peer, cancel_id: Callable[[RequestId], int]) -> int:
        if (message.target is None) == (message.rid is None):
            raise BadRequest("give either target or rid", field="target")
        if message.target is not None:
            return cancel_id(message.target)
        assert message.rid is not None
        if peer.is_remote:
            raise EdgeqwenError("over the network a request is cancelled by hanging up", code="forbidden", field="rid")
        if self._inference.cancel(message.rid, owner=None if peer.is_admin else peer.owner):
            return 1
        owner = self._owners.get(message.rid)
        if owner is None or not (peer.is_admin or owner == peer.owner):
            raise EdgeqwenError("no such request", code="not_found", field="rid")
        return 0

    def _shutdown(self, message: Shutdown, peer: Peer) -> dict[str, Any]:
        _check_admin(peer, "stop it")
        if message.drain_s is not None and not 0 <= message.drain_s <= 86_400:
            raise BadRequest("drain_s must be from 0 to 86400", field="drain_s")
        stats = self._inference.stats()
        self._on_shutdown(message.drain_s)
        return {"draining": stats.running + stats.queued}

    def _reload(self, peer: Peer) -> dict[str, Any]:
        _check_admin(peer, "have its configuration read again")
        return self.on_reload(f"uid {peer.uid}")


def _check_admin(peer: Peer, what: str) -> None:
    if not peer.is_admin:
        message = f"only root, the daemon's own user and group edgeqwen-admin may {what}"
        raise EdgeqwenError(message, code="forbidden")

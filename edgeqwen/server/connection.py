"""One accepted connection: first-byte sniff, timers, back-pressure, end of input.

End of input and a dead peer look the same to a reader: both are an end of file. `is_hung_up` tells them apart. A peer
that only stopped sending gets its answers.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

from edgeqwen.errors import EdgeqwenError
from edgeqwen.protocol.frames import BLANK, Wire, not_an_object, sniff
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import encode_frame, error_members
from edgeqwen.server.lines import LineSession
from edgeqwen.server.operations import Operations
from edgeqwen.server.peers import is_hung_up, peer_of
from edgeqwen.server.timers import PeerWatch, ReasonTimer, StallWatch

FLOOD_FACTOR: Final = 4
"""Replies may pile up to this many times the high water before requests are no longer read."""


class HttpSession(Protocol):
    """A connection that speaks HTTP, once the first byte said so; it is told what `asyncio.Protocol` is told."""

    @property
    def is_idle(self) -> bool: ...

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class House(Protocol):
    """What a connection needs of the server it belongs to."""

    limits: WireLimits
    operations: Operations

    def admit(self, connection: Connection, peer: Peer) -> EdgeqwenError | None:
        """Count the connection in, or say why not."""
        ...

    def forget(self, connection: Connection) -> None: ...

    def open_http(self, transport: asyncio.Transport, peer: Peer) -> HttpSession: ...


class Connection(asyncio.Protocol):
    """The protocol object that the event loop talks to."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._limits = house.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._peer: Peer
        self._lines: LineSession | None = None
        self._http: HttpSession | None = None
        self._timer = ReasonTimer()
        self._stall: StallWatch
        self._watch: PeerWatch
        self._is_writable = True
        self._is_reading = True
        self._is_eof = False
        self._is_over = False
        self._is_refreshing = False

    @property
    def peer(self) -> Peer:
        return self._peer

    @property
    def is_idle(self) -> bool:
        """Whether nothing is owed to the client."""
        if self._http is not None:
            return self._http.is_idle
        return self._lines is None or not self._lines.is_busy

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._transport.set_write_buffer_limits(high=self._limits.high_water_bytes)
        self._stall = StallWatch(self._transport, stall_s=self._limits.stall_s, on_stall=self.abort)
        self._watch = PeerWatch(
            self._transport,
            period_s=self._limits.probe_s,
            is_needed=lambda: not self._is_over and (self._is_eof or not self._is_reading),
            needs_sign=lambda: self._is_eof and self._lines is not None and self._is_writable,
            give_sign=lambda: self._write(b"\n"),
            on_gone=self.abort,
        )
        peer = self._identify()
        if peer is None:
            self._turn_away(EdgeqwenError("this user is not served", code="forbidden"))
            return
        self._peer = peer
        refusal = self._house.admit(self, peer)
        if refusal is not None:
            self._turn_away(refusal)
            return
        self._timer.start(("first", 0), self._limits.first_byte_s, self.close)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._http is not None:
            self._http.data_received(data)
        elif self._lines is not None:
            self._lines.feed(data)
            self._refresh()
        else:
            self._begin(data)

    def eof_received(self) -> bool:
        self._is_eof = True
        if is_hung_up(self._transport):
            self.abort()
        elif self._is_over:
            self.close()
        elif self._http is not None:
            self._http.eof_received()
            self._watch.begin()
        elif self._lines is None:
            self.close()
        else:
            self._lines.feed_eof()
            self._watch.note_sign()
            self._refresh()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._house.forget(self)
        self._timer.clear()
        self._stall.end()
        self._watch.end()
        if self._lines is not None:
            self._lines.cancel()
            self._lines.pump()
        if self._http is not None:
            self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._is_writable = False
        self._stall.begin()
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._stall.end()
        if self._http is not None:
            self._http.resume_writing()
        if self._lines is not None:
            self._lines.pump()
            self._refresh()

    # What the server calls.

    def close(self) -> None:
        """Close after what was written has gone out, or could not within `stall_s`."""
        self._is_over = True
        self._transport.close()
        if self._transport.get_write_buffer_size() > 0:
            self._timer.start(("flush", 0), self._limits.stall_s, self._transport.abort)

    def abort(self) -> None:
        """Close now; what was not sent is lost."""
        self._is_over = True
        self._transport.abort()

    def set_limits(self, limits: WireLimits) -> None:
        """For lines that begin from now on; one that speaks HTTP asks its front."""
        self._limits = limits
        if self._lines is not None:
            self._lines.set_limits(limits)

    def close_if_idle(self) -> None:
        if self.is_idle:
            self.close()

    # Reading, writing, ending.

    def _identify(self) -> Peer | None:
        """Who is at the other end; None if it is nobody who is served."""
        return peer_of(self._transport)

    def _turn_away(self, error: EdgeqwenError) -> None:
        self._transport.write(encode_frame(error_members(error), done=True))
        self.close()

    def _begin(self, data: bytes) -> None:
        """Choose the protocol by the first byte that is not blank."""
        data = data.lstrip(BLANK)
        wire = sniff(data)
        if wire is None:
            return
        self._timer.clear()
        if wire == "http":
            self._http = self._house.open_http(self._transport, self._peer)
            self._http.data_received(data)
        else:
            self._begin_lines(wire, data)

    def _begin_lines(self, wire: Wire, data: bytes) -> None:
        self._lines = LineSession(
            self._house.operations,
            self._peer,
            self._limits,
            write=self._write,
            is_writable=lambda: self._is_writable or self._is_over,
            is_flooded=self._is_flooded,
            on_change=self._refresh_soon,
        )
        if wire == "json":
            self._lines.feed(data)
        else:
            self._lines.fail(not_an_object(1))
        self._refresh()

    def _write(self, data: bytes) -> None:
        if not self._is_over and not self._transport.is_closing():
            self._transport.write(data)
            self._watch.note_sign()

    def _is_flooded(self) -> bool:
        limit = FLOOD_FACTOR * self._limits.high_water_bytes
        return not self._is_writable and self._transport.get_write_buffer_size() > limit

    def _refresh(self) -> None:
        """Take lines, then bring reading, timers and the end of the connection in line with what is left."""
        lines = self._lines
        if lines is None or self._is_over:
            return
        has_more = lines.take_lines()
        if lines.has_failed or (lines.is_closing and not lines.is_busy):
            self._finish()
            return
        if has_more:
            self._refresh_soon()
        self._set_reading(not (has_more or lines.is_blocked or lines.is_closing))
        self._arm(lines)
        if not self._is_reading or self._is_eof:
            self._watch.begin()

    def _refresh_soon(self) -> None:
        if not self._is_refreshing:
            self._is_refreshing = True
            self._loop.call_soon(self._refresh_again)

    def _refresh_again(self) -> None:
        self._is_refreshing = False
        self._refresh()

    def _finish(self) -> None:
        if self._is_eof:
            self.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Shut down our side and drop what still comes in: closing with unread input would lose the last reply."""
        self._is_over = True
        self._timer.clear()
        self._set_reading(True)
        self._transport.write_eof()
        self._timer.start(("linger", 0), self._limits.linger_s, self.close)

    def _set_reading(self, is_reading: bool) -> None:
        if is_reading == self._is_reading or self._is_eof:
            return
        self._is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # Timers.

    def _arm(self, lines: LineSession) -> None:
        """The partial-line or the idle timer, whichever applies; both stand still while nothing is read."""
        limits = self._limits
        if not self._is_reading or self._is_eof:
            self._timer.clear()
        elif lines.is_partial:
            self._timer.start(("partial", lines.num_lines), limits.partial_line_s, self._on_partial)
        elif not lines.is_busy:
            self._timer.start(("idle", lines.num_lines), limits.idle_s, self.close)
        else:
            self._timer.clear()

    def _on_partial(self) -> None:
        assert self._lines is not None
        number = self._lines.num_lines + 1
        message = f"line {number} was not completed within {self._limits.partial_line_s:g} s"
        self._lines.fail(EdgeqwenError(message, code="timeout"))
        self._linger()

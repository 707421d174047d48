"""Limits of the wire. The configuration sets some; `hello` shows those that a client can run into."""

from __future__ import annotations

from dataclasses import dataclass

MIN_FRAME_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Sizes in bytes, times in seconds. `frame_bytes` bounds a streamed frame, `reply_bytes` an answer in one piece,
    `http_reply_bytes` about one in another format, whose log-probabilities take far more.
    """

    line_bytes: int = 1 << 20
    nesting: int = 32
    frame_bytes: int = 32 << 10
    reply_bytes: int = 256 << 10
    inflight: int = 8
    batch_items: int = 64
    connections: int = 128
    connections_per_uid: int = 64
    high_water_bytes: int = 64 << 10
    first_byte_s: float = 30.0
    partial_line_s: float = 10.0
    idle_s: float = 600.0
    stall_s: float = 30.0
    probe_s: float = 0.25
    linger_s: float = 1.0
    header_bytes: int = 8 << 10
    header_s: float = 5.0
    body_s: float = 30.0
    http_keepalive_s: float = 75.0
    http_reply_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        assert self.frame_bytes >= MIN_FRAME_BYTES, "a frame must hold its envelope and some text"
        assert self.inflight >= 1

"""What each part of the daemon is told of the configuration."""

from __future__ import annotations

import grp
import logging
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeqwen.config import Config
from edgeqwen.engine.settings import EngineLimits, KvSettings
from edgeqwen.errors import ConfigInvalid
from edgeqwen.http.access import ApiKeys, HttpAccess
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.server.network import check_keys, parse_address
from edgeqwen.sessions.sessions import SessionLimits

OWN_DESCRIPTORS: Final = 32
"""Left to the daemon beside its connections: it holds some 20, and opens files of sessions, the cache and /proc."""

LEAST_CONNECTIONS: Final = 2
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """The configuration as the parts see it, each its own share."""

    engine: EngineLimits
    kv: KvSettings
    sessions: SessionLimits
    wire: WireLimits
    access: HttpAccess
    drain_s: float
    idle_unload_s: float
    log_level: str


def part_settings(config: Config, cache_dir: Path) -> PartSettings:
    """Read what it names, too: the file of keys. Raises `ConfigInvalid`."""
    check_places(config)
    return PartSettings(
        access=http_access(config),
        engine=engine_limits(config),
        kv=kv_settings(config, cache_dir),
        sessions=SessionLimits(per_owner=config.sessions.per_uid, ttl_s=config.sessions.ttl_s),
        wire=wire_limits(config),
        drain_s=config.service.drain_s,
        idle_unload_s=config.service.idle_unload_s,
        log_level=config.service.log_level.upper(),
    )


def check_places(config: Config) -> None:
    """Raise `ConfigInvalid` for a group that there is not, and for an address that must not be listened on."""
    socket_group(config)
    socket_mode(config)
    if config.http.listen:
        check_keys(parse_address(config.http.listen), has_keys=bool(config.http.api_key_file))


def engine_limits(config: Config) -> EngineLimits:
    """What the engine is told of the configuration."""
    limits = config.limits
    return EngineLimits(
        queue=limits.queue,
        per_owner=limits.per_uid,
        max_deadline_ms=limits.max_deadline_ms,
        default_max_tokens=limits.default_max_tokens,
        messages=limits.messages,
        stop_strings=limits.stop_strings,
        stop_bytes=limits.stop_bytes,
    )


def http_access(config: Config) -> HttpAccess:
    """What the configuration says of who may use HTTP. Raises `ConfigInvalid`."""
    http = config.http
    hosts = {host.lower() for host in http.allowed_hosts}
    if http.listen:
        hosts.add(parse_address(http.listen).host_name)
    return HttpAccess(
        allowed_hosts=frozenset(hosts),
        allowed_origins=frozenset(origin.lower().rstrip("/") for origin in http.allowed_origins),
        keys=ApiKeys.read(Path(http.api_key_file)) if http.api_key_file else None,
        has_open_metrics=http.metrics == "all",
    )


def kv_settings(config: Config, cache_dir: Path) -> KvSettings:
    """What the engine is told of the cache of keys and values."""
    kv = config.kv
    return KvSettings(
        memory_bytes=kv.memory_mb << 20,
        folder=cache_dir / "kv" if kv.disk_mb and kv.daily_writes_mb else None,
        disk_bytes=kv.disk_mb << 20,
        daily_write_bytes=kv.daily_writes_mb << 20,
        settles=kv.settle,
        system_prompts=kv.system_prompts,
    )


def wire_limits(config: Config) -> WireLimits:
    """What the socket is told of the configuration, and of the descriptors that the process may have."""
    limits = config.limits
    return WireLimits(
        line_bytes=limits.line_bytes,
        nesting=limits.nesting,
        inflight=limits.inflight,
        batch_items=limits.batch_items,
        connections=_allowed_connections(limits.connections),
        connections_per_uid=limits.connections_per_uid,
    )


def _allowed_connections(wanted: int) -> int:
    """As many as wanted, or as there are descriptors for: those without one would be closed without a word, and session
    files could not be written. The soft limit of the process is raised if it may be.
    """
    needed = wanted + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(LEAST_CONNECTIONS, soft - OWN_DESCRIPTORS)
    log.warning("limits.connections: %d allowed of %d, for the process may open %d files only", allowed, wanted, soft)
    return allowed


def socket_mode(config: Config) -> int:
    """Who may connect. Raises `ConfigInvalid` for a mode of a group without one."""
    socket = config.socket
    if socket.mode == "0660" and not socket.group:
        raise ConfigInvalid("socket.mode: 0660 lets a group connect; name it in socket.group")
    return (0o660 if socket.group else 0o600) if socket.mode == "auto" else int(socket.mode, 8)


def socket_group(config: Config) -> int | None:
    """The group whose members may connect; None if it is the daemon's own user only. Raises `ConfigInvalid`."""
    name = config.socket.group
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigInvalid(f"socket.group: there is no group {name!r}") from None

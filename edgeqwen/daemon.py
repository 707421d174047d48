"""The daemon: puts the parts together, and lives their life in order.

    listen -> build -> load -> ready -> wait -> drain (with a deadline) -> stop

Clients may connect as soon as the socket listens; what they ask waits for the model. The first SIGTERM, SIGINT or
SIGHUP (the terminal has closed), or an admin's `shutdown`, lets running answers end within the drain time; a second
signal cuts them off; a third ends the process at once. Logs go to stderr as `event key=value ...` and never hold the
text of a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgeqwen.config import Config
from edgeqwen.cpu import share_heaps, trim_heap
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.settings import EngineLimits, KvSettings
from edgeqwen.errors import EXIT_INTERRUPTED, CannotWrite, ConfigInvalid, EdgeqwenError, RuntimeFailed
from edgeqwen.http.access import ApiKeys, HttpAccess
from edgeqwen.loading import DaemonOptions, open_model
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.server import BoundSocket, SocketServer, bind_socket
from edgeqwen.server.network import bind_network, bound_address, parse_address
from edgeqwen.service import Notifier
from edgeqwen.sessions.files import SessionFolder
from edgeqwen.sessions.sessions import SessionLimits, Sessions
from edgeqwen.sessions.store import SessionStore

SEED_BITS: Final = 63
OWN_DESCRIPTORS: Final = 32
"""Left to the daemon beside its connections: it holds some 20, and opens files of sessions, the cache and /proc."""

LEAST_CONNECTIONS: Final = 2
log = logging.getLogger(__name__)


class StopRequest:
    """Why and how the daemon ends. `ask` and `fail` may be called any number of times; the first call decides."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.exit_code = 0
        self.error: EdgeqwenError | None = None
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self, drain_s: float | None = None) -> None:
        """End after running answers, within `drain_s` (None: what it was made with)."""
        if not self.asked.is_set():
            if drain_s is not None:
                self.drain_s = drain_s
            self.asked.set()

    def fail(self, error: EdgeqwenError) -> None:
        """End at once, with the exit code of `error`."""
        if not self.asked.is_set():
            self.error, self.drain_s = error, 0.0
            self.asked.set()

    def on_signal(self, number: signal.Signals) -> None:
        """First: drain. Second: cut off. Third: end without ceremony."""
        log.info("stopping signal=%s", number.name)
        if self.hurried.is_set():
            os._exit(128 + number)
        if self.asked.is_set():
            self.hurried.set()
        elif number is signal.SIGINT:
            self.exit_code = EXIT_INTERRUPTED
        self.ask()


async def serve(options: DaemonOptions, notifier: Notifier) -> int:
    """Run until stopped; returns the exit code. Raises `EdgeqwenError` for what keeps the daemon from serving."""
    config = options.config
    stop = StopRequest(config.service.drain_s)
    share_heaps()
    with _signals(stop):
        bound = bind_socket(options.socket_path, group=_group_id(config.socket.group))
        network: socket.socket | None = None
        try:  # the weights begin to load here: a second daemon of this socket must not get so far
            access = http_access(config)
            if config.http.listen:
                network = bind_network(parse_address(config.http.listen), has_keys=access.keys is not None)
            inference, server = _build(options, stop, access)
        except BaseException:
            bound.close()
            if network is not None:
                network.close()
            raise
        await _listen(server, options, bound, network)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.sessions.load())
            loading = tasks.create_task(_load(inference, stop, notifier))
            await stop.asked.wait()
            notifier.stopping()
            await _wind_down(server, inference, stop)
            loading.cancel()
    log.info("stopped")
    if stop.error is not None:
        raise stop.error
    return stop.exit_code


async def _listen(
    server: SocketServer, options: DaemonOptions, bound: BoundSocket, network: socket.socket | None
) -> None:
    """Accept connections, and say where."""
    await server.start(bound)
    log.info("listening socket=%s pid=%d", options.socket_path, os.getpid())
    if network is not None:
        log.info(
            "listening http=%s keys=%s", bound_address(network), "yes" if options.config.http.api_key_file else "no"
        )
        await server.start_network(network)
    log.info("threads %s", " ".join(f"{key}={value}" for key, value in options.threads.to_dict().items()))
    for warning in options.threads.warnings:
        log.warning("threads: %s", warning)


def _build(options: DaemonOptions, stop: StopRequest, access: HttpAccess) -> tuple[Inference, SocketServer]:
    """The engine, whose model has begun to load, and the server in front of it."""
    config = options.config
    model = open_model(options)
    trim_heap()  # so that the tokenizer's pieces are gone when memory is at its fullest, at the end of loading
    store = SessionStore(_session_folder(options.state_dir / "sessions"))
    inference = Inference(
        runtime_factory=model.runtime_factory,
        model=model.files,
        limits=engine_limits(config),
        kv=kv_settings(config, options.cache_dir),
        speculates=config.engine.speculation and not config.engine.deterministic,
        clock=time.monotonic,
        seed_source=lambda: secrets.randbits(SEED_BITS),
    )
    sessions = Sessions(
        inference,
        store,
        random_bits=secrets.randbits,
        limits=SessionLimits(per_owner=config.sessions.per_uid, ttl_s=config.sessions.ttl_s),
        default_max_tokens=config.limits.default_max_tokens,
    )
    limits, threads = wire_limits(config), options.threads.to_dict()
    server = SocketServer(inference, sessions, limits=limits, on_shutdown=stop.ask, threads=threads, access=access)
    return inference, server


def _session_folder(path: Path) -> SessionFolder | None:
    """Where sessions are kept; None, and a warning, if they cannot be."""
    try:
        return SessionFolder.open(path)
    except CannotWrite as error:
        log.warning("%s: sessions are kept in memory only, and forgotten when the daemon ends", error.message)
        return None


async def _load(inference: Inference, stop: StopRequest, notifier: Notifier) -> None:
    """Load the model and say so; end the daemon if that fails, or if the engine breaks later."""
    began_at = time.monotonic()
    notifier.status("loading the model")
    try:
        await inference.start()
    except EdgeqwenError as error:
        stop.fail(error)
        return
    except Exception as error:  # a library's own, or no memory: nothing serves without a model
        log.exception("loading failed")
        stop.fail(RuntimeFailed(f"the model could not be loaded: {type(error).__name__}"))
        return
    log.info(
        "ready model=%s quant=%s context=%d load_s=%.2f",
        inference.model_name,
        inference.quant,
        inference.context,
        time.monotonic() - began_at,
    )
    notifier.ready(f"serving {inference.model_name}")
    stop.fail(await inference.wait_until_broken())


async def _wind_down(server: SocketServer, inference: Inference, stop: StopRequest) -> None:
    """Refuse new work, let running answers end in time or until a second signal, then close everything."""
    server.stop_accepting()
    draining = asyncio.ensure_future(inference.drain(stop.drain_s))
    hurried = asyncio.ensure_future(stop.hurried.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurried):
        task.cancel()
    await asyncio.gather(draining, hurried, return_exceptions=True)
    await inference.close()
    await server.sessions.close()
    await server.close()


@contextlib.contextmanager
def _signals(stop: StopRequest) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup(1) has it ignored
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


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


def _group_id(name: str) -> int | None:
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigInvalid(f"socket.group: there is no group {name!r}") from None

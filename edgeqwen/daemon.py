"""The daemon: puts the parts together, and lives their life in order.

    listen -> build -> load -> ready -> wait -> drain (with a deadline) -> stop

Clients may connect as soon as the socket listens; what they ask waits for the model. The first SIGTERM or SIGINT, an
admin's `shutdown`, or the end of the terminal, lets running answers end within the drain time; a second signal cuts
them off; a third ends the process at once. SIGHUP has the configuration read again (`reload`, `hangup`). Logs go to
stderr as `event key=value ...` and never hold the text of a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgeqwen.cpu import share_heaps, trim_heap
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import EXIT_INTERRUPTED, CannotWrite, EdgeqwenError, RuntimeFailed
from edgeqwen.hangup import Hangup
from edgeqwen.loading import DaemonOptions, open_model
from edgeqwen.part_settings import PartSettings, part_settings, socket_group
from edgeqwen.reload import Reloader
from edgeqwen.server import BoundSocket, SocketServer, bind_socket
from edgeqwen.server.network import bind_network, bound_address, parse_address
from edgeqwen.server.peers import forget_admin_group
from edgeqwen.service import Notifier
from edgeqwen.sessions.files import SessionFolder
from edgeqwen.sessions.sessions import Sessions
from edgeqwen.sessions.store import SessionStore
from edgeqwen.sleeper import Sleeper

SEED_BITS: Final = 63
log = logging.getLogger(__name__)
PACKAGE_LOG: Final = logging.getLogger("edgeqwen")
"""Whose level all modules have."""


class StopRequest:
    """Why and how the daemon ends. `ask` and `fail` may be called any number of times; the first call decides."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.exit_code = 0
        self.error: EdgeqwenError | None = None
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def check_running(self) -> None:
        """Raise `draining` if the end has begun."""
        if self.asked.is_set():
            raise EdgeqwenError("the daemon is shutting down", code="draining")

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
    hangup = Hangup(lambda: stop.on_signal(signal.SIGHUP))
    PACKAGE_LOG.setLevel(config.service.log_level.upper())
    share_heaps()
    with _signals(stop, hangup):
        bound = bind_socket(options.socket_path, group=socket_group(config))
        network: socket.socket | None = None
        try:  # the weights begin to load here: a second daemon of this socket must not get so far
            settings = part_settings(config, options.cache_dir)
            if config.http.listen:
                network = bind_network(parse_address(config.http.listen), has_keys=settings.access.keys is not None)
            inference, server, sleeper = _build(options, settings, stop, notifier)
        except BaseException:
            bound.close()
            if network is not None:
                network.close()
            raise
        hangup.begin(server.operations.on_reload)
        await _listen(server, options, bound, network)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.sessions.load())
            loading = tasks.create_task(_load(inference, stop, notifier))
            sleeping = tasks.create_task(sleeper.run())
            await stop.asked.wait()
            notifier.stopping()
            await _wind_down(server, inference, stop)
            loading.cancel()
            sleeping.cancel()
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


def _build(
    options: DaemonOptions, settings: PartSettings, stop: StopRequest, notifier: Notifier
) -> tuple[Inference, SocketServer, Sleeper]:
    """The engine, whose model has begun to load, the server in front of it, and who puts the model to sleep."""
    config = options.config
    model = open_model(options)
    trim_heap()  # so that the tokenizer's pieces are gone when memory is at its fullest, at the end of loading
    store = SessionStore(_session_folder(options.state_dir / "sessions"))
    inference = Inference(
        runtime_factory=model.runtime_factory,
        model=model.files,
        limits=settings.engine,
        kv=settings.kv,
        speculates=config.engine.speculation and not config.engine.deterministic,
        clock=time.monotonic,
        seed_source=lambda: secrets.randbits(SEED_BITS),
    )
    sessions = Sessions(
        inference,
        store,
        random_bits=secrets.randbits,
        limits=settings.sessions,
        default_max_tokens=settings.engine.default_max_tokens,
    )

    sleeper = Sleeper(inference, settings.idle_unload_s, clock=time.monotonic)

    def apply(new: PartSettings) -> None:
        _apply(new, inference, server, sleeper, stop)

    reloader = Reloader(
        options.sources,
        config,
        settings,
        cache_dir=options.cache_dir,
        check=stop.check_running,
        apply=apply,
        notifier=notifier,
    )
    server = SocketServer(
        inference,
        sessions,
        limits=settings.wire,
        on_shutdown=stop.ask,
        on_reload=reloader.reload,
        threads=options.threads.to_dict(),
        access=settings.access,
    )
    return inference, server, sleeper


def _apply(
    settings: PartSettings, inference: Inference, server: SocketServer, sleeper: Sleeper, stop: StopRequest
) -> None:
    """Tell every part what has changed of its settings."""
    inference.set_limits(settings.engine)
    inference.set_kv(settings.kv)
    server.sessions.set_limits(settings.sessions, default_max_tokens=settings.engine.default_max_tokens)
    server.set_limits(settings.wire)
    server.set_access(settings.access)
    sleeper.set_after(settings.idle_unload_s)
    stop.drain_s = settings.drain_s
    PACKAGE_LOG.setLevel(settings.log_level)
    forget_admin_group()


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
def _signals(stop: StopRequest, hangup: Hangup) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    for number in numbers:
        loop.add_signal_handler(number, stop.on_signal, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup(1) has it ignored
        numbers.append(signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, hangup.on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

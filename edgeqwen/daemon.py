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
import secrets
import signal
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgeqwen.config import Config
from edgeqwen.cpu import ThreadPlan, share_heaps, trim_heap
from edgeqwen.doors import Doors
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import CannotWrite, EdgeqwenError, RuntimeFailed
from edgeqwen.hangup import Hangup
from edgeqwen.idle import IdleTimer, exit_timer, sleep_timer
from edgeqwen.loading import DaemonOptions, open_model
from edgeqwen.logs import Event
from edgeqwen.part_settings import PartSettings, part_settings
from edgeqwen.reload import Reloader
from edgeqwen.request_log import RequestLog
from edgeqwen.server import SocketServer
from edgeqwen.server.peers import forget_admin_group
from edgeqwen.service import Manager, Watchdog
from edgeqwen.sessions.files import SessionFolder
from edgeqwen.sessions.sessions import Sessions
from edgeqwen.sessions.store import SessionStore
from edgeqwen.stop import StopRequest

SEED_BITS: Final = 63
log = logging.getLogger(__name__)
PACKAGE_LOG: Final = logging.getLogger("edgeqwen")
"""Whose level all modules have."""


async def serve(options: DaemonOptions, manager: Manager) -> int:
    """Run until stopped; returns the exit code. Raises `EdgeqwenError` for what keeps the daemon from serving."""
    config = options.config
    stop = StopRequest(config.service.drain_s)
    hangup = Hangup(lambda: stop.on_signal(signal.SIGHUP))
    PACKAGE_LOG.setLevel(config.service.log_level.upper())
    share_heaps()
    with _signals(stop, hangup):
        doors = Doors.open(config, options.socket_path, manager.inheritance)
        try:  # the weights begin to load here: a second daemon of this socket must not get so far
            settings = part_settings(config, options.cache_dir)
            parts = _build(options, settings, stop, manager)
        except BaseException:
            doors.close()
            raise
        hangup.begin(parts.server.operations.on_reload)
        await doors.serve(parts.server, has_keys=settings.access.keys is not None)
        _tell_of_threads(options.threads)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(parts.server.sessions.load())
            watching = [tasks.create_task(work) for work in (_load(parts.inference, stop, manager), *parts.watchers())]
            await stop.asked.wait()
            manager.notifier.stopping()
            await _wind_down(parts.server, parts.inference, stop)
            for task in watching:
                task.cancel()
    log.info(Event("stopped"))
    if stop.error is not None:
        raise stop.error
    return stop.exit_code


def _tell_of_threads(threads: ThreadPlan) -> None:
    log.info(Event("threads", **{key: str(value) for key, value in threads.to_dict().items()}))
    for warning in threads.warnings:
        log.warning("threads: %s", warning)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon consists of. The model has begun to load."""

    inference: Inference
    server: SocketServer
    sleep: IdleTimer
    leaving: IdleTimer
    watchdog: Watchdog

    def watchers(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What goes on beside the serving, until it is cancelled."""
        return self.sleep.run(), self.leaving.run(), self.watchdog.run()

    def apply(self, settings: PartSettings) -> None:
        """Tell every part what has changed of its settings."""
        self.inference.set_limits(settings.engine)
        self.inference.set_kv(settings.kv)
        self.server.sessions.set_limits(settings.sessions, default_max_tokens=settings.engine.default_max_tokens)
        self.server.set_limits(settings.wire)
        self.server.set_access(settings.access)
        self.sleep.set_after(settings.idle_unload_s)


def _build(options: DaemonOptions, settings: PartSettings, stop: StopRequest, manager: Manager) -> Parts:
    config = options.config
    inference = _make_inference(options, settings, longest_step_s=manager.longest_step_s)
    RequestLog(clock=time.monotonic).listen_to(inference.meters.outcomes)
    sessions = Sessions(
        inference,
        SessionStore(_session_folder(options.state_dir / "sessions")),
        random_bits=secrets.randbits,
        limits=settings.sessions,
        default_max_tokens=settings.engine.default_max_tokens,
    )

    def apply(new: PartSettings) -> None:
        parts.apply(new)
        stop.drain_s = new.drain_s
        PACKAGE_LOG.setLevel(new.log_level)
        forget_admin_group()

    reloader = Reloader(
        options.sources,
        config,
        settings,
        cache_dir=options.cache_dir,
        check=stop.check_running,
        apply=apply,
        notifier=manager.notifier,
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
    clock = time.monotonic
    parts = Parts(
        inference,
        server,
        sleep_timer(inference, settings.idle_unload_s, clock=clock),
        exit_timer(
            inference, server, sessions, _idle_exit_s(config, manager), leave=lambda: stop.ask(0.0), clock=clock
        ),
        manager.watchdog(inference),
    )
    return parts


def _make_inference(options: DaemonOptions, settings: PartSettings, *, longest_step_s: float | None) -> Inference:
    """The engine, whose model has begun to load."""
    engine = options.config.engine
    model = open_model(options)
    trim_heap()  # so that the tokenizer's pieces are gone when memory is at its fullest, at the end of loading
    return Inference(
        runtime_factory=model.runtime_factory,
        model=model.files,
        limits=settings.engine,
        kv=settings.kv,
        speculates=engine.speculation and not engine.deterministic,
        longest_step_s=longest_step_s,
        clock=time.monotonic,
        seed_source=lambda: secrets.randbits(SEED_BITS),
    )


def _idle_exit_s(config: Config, manager: Manager) -> float:
    """0 without somebody who starts the daemon again when a client comes."""
    after_s = config.service.idle_exit_s
    if after_s and not manager.inheritance.unix:
        log.warning("service.idle_exit_s: not without a socket of a service manager, which starts the daemon again")
        return 0.0
    if after_s and config.http.listen:
        log.warning("service.idle_exit_s: nobody holds the port of http.listen while the daemon is away")
    return after_s


def _session_folder(path: Path) -> SessionFolder | None:
    """Where sessions are kept; None, and a warning, if they cannot be."""
    try:
        return SessionFolder.open(path)
    except CannotWrite as error:
        log.warning("%s: sessions are kept in memory only, and forgotten when the daemon ends", error.message)
        return None


async def _load(inference: Inference, stop: StopRequest, manager: Manager) -> None:
    """Load the model and say so; end the daemon if that fails, or if the engine breaks later."""
    began_at = time.monotonic()
    manager.notifier.status("loading the model")
    reporting = asyncio.create_task(manager.report(inference).run())
    try:
        await inference.start()
    except EdgeqwenError as error:
        stop.fail(error)
        return
    except Exception as error:  # a library's own, or no memory: nothing serves without a model
        log.exception("loading failed")
        stop.fail(RuntimeFailed(f"the model could not be loaded: {type(error).__name__}"))
        return
    finally:
        reporting.cancel()
    log.info(
        Event(
            "ready",
            model=inference.model_name,
            quant=inference.quant,
            context=inference.context,
            load_s=round(time.monotonic() - began_at, 2),
        )
    )
    manager.notifier.ready(f"serving {inference.model_name}")
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

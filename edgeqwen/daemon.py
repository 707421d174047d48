"""The daemon: puts the parts together, and lives their life in order.

    build -> listen -> load -> ready -> wait -> drain (with a deadline) -> stop

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
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from edgeqwen.config import MAX_DEFAULT_CONTEXT, Config, KvTable
from edgeqwen.core.fit import choose_kv_type
from edgeqwen.core.model import KVType, Manifest
from edgeqwen.core.package import TOKENIZER, Package, open_package, read_text_files, verify_digests
from edgeqwen.core.state import writable_folder
from edgeqwen.core.step import Runtime
from edgeqwen.cpu import ThreadPlan, fingerprint, place_calling_thread, read_memory, read_processor
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.settings import EngineLimits, ModelFiles
from edgeqwen.errors import EXIT_INTERRUPTED, ConfigInvalid, EdgeqwenError, ModelInvalid, RuntimeFailed
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.server import SocketServer, bind_socket
from edgeqwen.service import Notifier
from edgeqwen.text import ChatTemplate, Tokenizer

SEED_BITS: Final = 63
END_MARKS: Final = ("<|im_end|>", "<|endoftext|>", "</s>")
"""What ends an answer of a scripted runtime whose folder does not say."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """`package_path` is a package folder; for a fake runtime it needs the text files only. `threads` compute the steps.
    `state_dir`, where what is measured of this machine is kept, and `cache_dir` may not exist yet.
    """

    config: Config
    package_path: Path
    socket_path: Path
    threads: ThreadPlan
    state_dir: Path
    cache_dir: Path


@dataclass(frozen=True, slots=True)
class Model:
    """What `Inference` needs of a model: the files that concern text, and how to make its runtime."""

    files: ModelFiles
    runtime_factory: Callable[[Callable[[float], None]], Runtime]


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
    model = open_model(options)
    inference = Inference(
        runtime_factory=model.runtime_factory,
        model=model.files,
        limits=engine_limits(config),
        speculates=config.engine.speculation and not config.engine.deterministic,
        clock=time.monotonic,
        seed_source=lambda: secrets.randbits(SEED_BITS),
    )
    stop = StopRequest(config.service.drain_s)
    threads = options.threads.to_dict()
    server = SocketServer(inference, limits=wire_limits(config), on_shutdown=stop.ask, threads=threads)
    with _signals(stop):
        await server.start(bind_socket(options.socket_path, group=_group_id(config.socket.group)))
        log.info("listening socket=%s pid=%d", options.socket_path, os.getpid())
        log.info("threads %s", " ".join(f"{key}={value}" for key, value in threads.items()))
        for warning in options.threads.warnings:
            log.warning("threads: %s", warning)
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(_load(inference, stop, notifier))
            await stop.asked.wait()
            notifier.stopping()
            await _wind_down(server, inference, stop)
            loading.cancel()
    log.info("stopped")
    if stop.error is not None:
        raise stop.error
    return stop.exit_code


async def _load(inference: Inference, stop: StopRequest, notifier: Notifier) -> None:
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


def open_model(options: DaemonOptions) -> Model:
    """Open what the configuration names: a package with onnxruntime, or text files with a scripted runtime."""
    runtime = options.config.engine.runtime
    if runtime == "onnx":
        return _open_package_model(options)
    if runtime.startswith("fake:"):
        return _open_fake_model(options)
    raise ConfigInvalid(f"engine.runtime: {runtime!r} is unknown; there are onnx and fake:SCRIPT")


def _open_package_model(options: DaemonOptions) -> Model:
    package = open_package(options.package_path)
    verify_digests(package, with_weights=False)
    manifest = package.manifest
    tokenizer = Tokenizer.from_file(package.tokenizer_path)
    if tokenizer.num_tokens != manifest.spec.num_tokens:
        raise ModelInvalid(
            f"{package.tokenizer_path}: {tokenizer.num_tokens} tokens, but the model has {manifest.spec.num_tokens}; "
            "they do not belong together, import the model again"
        )
    files = ModelFiles(
        name=manifest.name,
        quant=manifest.quant,
        tokenizer=tokenizer,
        template=_template(package.read_template()),
        generation_defaults=package.generation_config,
        eos_token_ids=package.eos_token_ids,
    )
    return Model(files, lambda progress: _load_onnx(package, options, progress))


def _template(source: str | None) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source)


def _load_onnx(package: Package, options: DaemonOptions, progress: Callable[[float], None]) -> Runtime:
    """On the engine thread, where the native library is imported too: the socket listens before that."""
    from edgeqwen.fitting import fitting_package
    from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime

    kv, most = options.config.kv, package.manifest.spec.max_position
    if kv.context > most:
        raise ConfigInvalid(f"kv.context: {kv.context} is above what the model can do, {most}")
    package = fitting_package(package, read_processor(), options.cache_dir)
    wanted = OnnxOptions.planned(
        options.threads,
        num_slots=kv.slots,
        capacity=kv.context_of(most),
        kv_type=_kv_type(package, kv),
        is_single=options.config.engine.deterministic,
        profile_path=_profile_place(options),
    )
    runtime = OnnxRuntime.load(package, wanted, progress)
    place_calling_thread(options.threads.decode.calling_cpus)
    return runtime


def _kv_type(package: Package, kv: KvTable) -> KVType:
    """The type of cache that the configuration names; for `auto`, what suits package and memory."""
    if kv.type != "auto":
        return cast(KVType, kv.type)
    manifest = package.manifest
    num_tokens = kv.slots * kv.context_of(manifest.spec.max_position)
    free_bytes = read_memory().free
    picked, reason = choose_kv_type(manifest.spec, manifest.kv_types, num_tokens=num_tokens, free_bytes=free_bytes)
    log.info("cache %s: %s", picked, reason)
    return picked


def _profile_place(options: DaemonOptions) -> Callable[[Manifest, KVType], Path]:
    """Where what is measured of this machine is kept; a folder that cannot be written has been warned of."""
    import onnxruntime

    from edgeqwen.runtime.profile import profile_path

    folder = writable_folder(options.state_dir) or options.state_dir
    machine = fingerprint(
        read_processor(), thread_counts=options.threads.counts, runtime_version=onnxruntime.__version__
    )
    return lambda manifest, kv_type: profile_path(folder, machine, manifest, kv_type)


def _open_fake_model(options: DaemonOptions) -> Model:
    """A folder with tokenizer.json, and template and generation config if it has them; no weights."""
    from edgeqwen.runtime.fake import load_fake, parse_fake

    folder, kv = options.package_path, options.config.kv
    script = parse_fake(options.config.engine.runtime)
    text = read_text_files(folder)
    tokenizer = Tokenizer.from_file(folder / TOKENIZER)
    marks = (tokenizer.added_token_id(mark) for mark in END_MARKS)
    files = ModelFiles(
        name="fake",
        quant="fp32",
        tokenizer=tokenizer,
        template=_template(text.template),
        generation_defaults=text.generation_config,
        eos_token_ids=text.eos_token_ids or tuple(mark for mark in marks if mark is not None),
    )

    def load(progress: Callable[[float], None]) -> Runtime:
        return load_fake(
            script,
            progress,
            vocab_size=tokenizer.num_tokens,
            num_tokens=tokenizer.num_tokens,
            num_slots=kv.slots,
            capacity=kv.context or MAX_DEFAULT_CONTEXT,
            eos=next(iter(files.eos_token_ids), None),
        )

    return Model(files, load)


def engine_limits(config: Config) -> EngineLimits:
    """What the engine is told of the configuration."""
    limits = config.limits
    return EngineLimits(
        queue=limits.queue,
        per_owner=limits.per_uid,
        max_deadline_ms=limits.max_deadline_ms,
        default_max_tokens=limits.default_max_tokens,
    )


def wire_limits(config: Config) -> WireLimits:
    """What the socket is told of the configuration."""
    limits = config.limits
    return WireLimits(
        line_bytes=limits.line_bytes,
        inflight=limits.inflight,
        connections=limits.connections,
        connections_per_uid=limits.connections_per_uid,
    )


def _group_id(name: str) -> int | None:
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigInvalid(f"socket.group: there is no group {name!r}") from None

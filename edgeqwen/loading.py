"""What a daemon serves: its options, and the opening and loading of the model that they name.

Opening reads what concerns text, before anything is promised to anybody. Large weights are loaded meanwhile, in a
thread of their own: both take their time in native code, and a second processor would be idle. Whether that went well
is told where the runtime is asked for, on the engine thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast

from edgeqwen.config import MAX_DEFAULT_CONTEXT, Config, ConfigSources, KvTable
from edgeqwen.core.fit import choose_kv_type
from edgeqwen.core.model import KVType, Manifest
from edgeqwen.core.package import TOKENIZER, WEIGHTS, Package, open_package, read_text_files, verify_digests
from edgeqwen.core.state import writable_folder
from edgeqwen.core.step import Runtime
from edgeqwen.cpu import Processor, ThreadPlan, fingerprint, place_calling_thread, read_memory, read_processor
from edgeqwen.engine.life import RuntimeFactory
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.errors import ConfigInvalid, ModelInvalid, ModelReplaced
from edgeqwen.text import ChatTemplate, Tokenizer

END_MARKS: Final = ("<|im_end|>", "<|endoftext|>", "</s>")
"""What ends an answer of a scripted runtime whose folder does not say."""

EARLY_FROM_BYTES: Final = 256 << 20
"""Smaller weights load about as fast as a tokenizer is read, and what either takes in passing would add up."""

MOST_PATIENCE_S: Final = 1.0  # a package may have to be remade first, and the socket is to listen before that
HEAD_START_S: Final = 0.02
"""What the threads that open the graphs need to leave the interpreter."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """`config` was read from `sources`. `package_path` is a package folder; for a fake runtime it needs the text files
    only. `threads` compute the steps. `state_dir`, where what is measured of this machine is kept, and `cache_dir` may
    not exist yet.
    """

    config: Config
    sources: ConfigSources
    package_path: Path
    socket_path: Path
    threads: ThreadPlan
    state_dir: Path
    cache_dir: Path


@dataclass(frozen=True, slots=True)
class Model:
    """What `Inference` needs of a model: the files that concern text, and how to make its runtime."""

    files: ModelFiles
    runtime_factory: RuntimeFactory


class EarlyRuntime:
    """A runtime whose loading begins at once; call it like `Model.runtime_factory` to wait for the result. Called once
    more, it loads another.
    """

    def __init__(self, load: RuntimeFactory) -> None:
        self._load = load
        self._progress: Callable[[float], None] = lambda _: None
        self._is_native = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="loading")
        self._result: Future[Runtime] | None = self._executor.submit(load, self._report)
        self._result.add_done_callback(lambda _: self._is_native.set())

    def let_begin(self) -> None:
        """Wait until the loading is in native code: what holds the interpreter (reading a tokenizer does, for a third
        of a second) would keep it from getting there.
        """
        self._is_native.wait(MOST_PATIENCE_S)
        time.sleep(HEAD_START_S)

    def __call__(self, progress: Callable[[float], None]) -> Runtime:
        result, self._result = self._result, None  # whoever has it frees it
        if result is None:
            return self._load(progress)
        self._progress = progress
        try:
            return result.result()
        finally:
            self._executor.shutdown(wait=False)

    def _report(self, fraction: float) -> None:
        self._is_native.set()
        self._progress(fraction)


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
    load: RuntimeFactory = partial(_load_onnx, package, options)
    if manifest.sizes[WEIGHTS] >= EARLY_FROM_BYTES:
        early = EarlyRuntime(load)
        early.let_begin()
        load = early
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
        pooling=manifest.pooling,
    )

    def runtime_factory(progress: Callable[[float], None]) -> Runtime:
        check_unchanged(package)
        runtime = load(progress)
        place_calling_thread(options.threads.decode.calling_cpus)
        return runtime

    return Model(files, runtime_factory)


def check_unchanged(package: Package) -> None:
    """Raise `ModelReplaced` if another model has come to the place of `package`, and what `open_package` raises."""
    if open_package(package.path).manifest != package.manifest:
        raise ModelReplaced(
            f"{package.path}: is another model now; the daemon ends, and serves it from its next start on"
        )


def _template(source: str | None) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source)


def _load_onnx(package: Package, options: DaemonOptions, progress: Callable[[float], None]) -> Runtime:
    """The package's runtime, measured and warm."""
    from edgeqwen.fitting import fitting_package
    from edgeqwen.runtime.onnx import OnnxOptions
    from edgeqwen.runtime.packages import load_package

    kv, most = options.config.kv, package.manifest.spec.max_position
    check_context(kv, most)
    processor = read_processor()
    if processor.is_x86 and not processor.flags:
        log.warning("/proc/cpuinfo cannot be read: what this processor can do is not known (in a unit: ProcSubset=all)")
    package = fitting_package(package, processor, options.cache_dir)
    wanted = OnnxOptions.planned(
        options.threads,
        num_slots=kv.slots,
        capacity=kv.context_of(most),
        kv_type=_kv_type(package, kv),
        is_single=options.config.engine.deterministic,
        profile_path=_profile_place(options, processor),
    )
    return load_package(package, wanted, progress)


def check_context(kv: KvTable, most: int) -> None:
    """Raise `ConfigInvalid` for a context that is longer than `most`, the positions that a model knows."""
    if kv.context > most:
        raise ConfigInvalid(f"kv.context: {kv.context} is above what the model can do, {most}")


def _kv_type(package: Package, kv: KvTable) -> KVType | None:
    """The type of cache that the configuration names, or (`auto`) that memory asks for; None: the runtime's choice."""
    if kv.type != "auto":
        return cast(KVType, kv.type)
    manifest = package.manifest
    num_tokens = kv.slots * kv.context_of(manifest.spec.max_position)
    free_bytes = read_memory().free
    picked, reason = choose_kv_type(manifest.spec, manifest.kv_types, num_tokens=num_tokens, free_bytes=free_bytes)
    log.info("cache %s: %s", picked, reason)
    return None if picked == manifest.kv_types[0] else picked


def _profile_place(options: DaemonOptions, processor: Processor) -> Callable[[Manifest, KVType], Path]:
    """Where what is measured of this machine is kept; a folder that cannot be written has been warned of."""
    import onnxruntime

    from edgeqwen.runtime.profile import profile_path

    folder = writable_folder(options.state_dir) or options.state_dir
    machine = fingerprint(processor, thread_counts=options.threads.counts, runtime_version=onnxruntime.__version__)
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

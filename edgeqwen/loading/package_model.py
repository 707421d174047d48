"""A package with onnxruntime.

Opening reads what concerns text, before anything is promised to anybody; large weights are loaded meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, cast

from edgeqwen.config import KvTable
from edgeqwen.core.fit import choose_kv_type
from edgeqwen.core.model import KVType, Manifest
from edgeqwen.core.package import WEIGHTS, Package, open_package, verify_digests
from edgeqwen.core.state import writable_folder
from edgeqwen.core.step import Runtime
from edgeqwen.cpu import Processor, fingerprint, place_calling_thread, read_memory, read_processor
from edgeqwen.engine.life import RuntimeFactory
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.errors import ModelInvalid, ModelReplaced
from edgeqwen.loading.early import EarlyRuntime
from edgeqwen.loading.options import DaemonOptions, Model, chat_template, check_context
from edgeqwen.text import Tokenizer

EARLY_FROM_BYTES: Final = 256 << 20
"""Smaller weights load about as fast as a tokenizer is read, and what either takes in passing would add up."""

log = logging.getLogger(__name__)


def open_package_model(options: DaemonOptions) -> Model:
    """Raises what `open_package` raises, and `ModelInvalid` if tokenizer and model do not belong together."""
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
        template=chat_template(package.read_template()),
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

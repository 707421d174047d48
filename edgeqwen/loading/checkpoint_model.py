"""A checkpoint with torch: a safetensors folder, a GGUF file, or what a package was made of.

What concerns text is read at once; torch and the weights come on the engine thread, since the threads that compute
belong to the one that starts them. The tokenizer's file is kept in the cache directory: it may be made of a GGUF file,
and is read again after sleep.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from edgeqwen.config import Config, KvTable
from edgeqwen.core.model import model_name
from edgeqwen.core.package import is_package, listed_eos, open_package
from edgeqwen.core.state import writable_folder, write_whole
from edgeqwen.core.step import Runtime
from edgeqwen.cpu import Processor, ThreadPlan, fingerprint, place_calling_thread, read_processor
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.errors import ConfigInvalid, ModelReplaced
from edgeqwen.loading.options import DaemonOptions, Model, chat_template, check_context
from edgeqwen.runtime.torch.options import TorchOptions, WeightType, check_kv_type, installed_version
from edgeqwen.text import Tokenizer

if TYPE_CHECKING:
    from edgeqwen.convert.checkpoint import Checkpoint
    from edgeqwen.runtime.torch.runtime import TorchRuntime

TEXT_FOLDER: Final = "checkpoints"
CODE_FOLDER: Final = "torch-code"
BF16_ISAS: Final = ("auto", "avx512_core_bf16", "avx512_core_fp16", "avx512_core_amx", "avx512_core_amx_fp16")
"""Values of `torch.max_isa` with which oneDNN multiplies bf16 in hardware."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint on disk. `identity` changes when its files do."""

    path: Path
    name: str
    identity: str


def open_checkpoint_model(options: DaemonOptions, runtime: str) -> Model:
    """`runtime` is `torch` or `ipex`. Raises `ConfigInvalid` if that is not installed, and what reading the checkpoint
    raises.
    """
    check_installed(runtime)
    origin = find_origin(options.package_path)
    from edgeqwen.convert.sources import open_checkpoint

    if options.config.engine.deterministic:
        log.warning("engine.deterministic: with %s the last bits of an answer still depend on what else runs", runtime)
    checkpoint = open_checkpoint(origin.path)
    try:
        check_kv(options.config.kv, checkpoint.spec.max_position)
        files = _model_files(checkpoint, origin, options)
    finally:
        checkpoint.close()

    def runtime_factory(progress: Callable[[float], None]) -> Runtime:
        if find_origin(options.package_path) != origin:
            raise ModelReplaced(f"{origin.path}: has changed; the daemon ends, and serves it from its next start on")
        wanted = torch_options(options, origin, max_position=checkpoint.spec.max_position, runtime=runtime)
        made = load_checkpoint(origin, wanted, runtime, progress)
        place_calling_thread(options.threads.decode.calling_cpus)
        return made

    return Model(files, runtime_factory)


def check_checkpoint(path: Path, config: Config, runtime: str) -> None:
    """Raise what keeps `runtime` from serving what is at `path`, as far as that shows without loading it."""
    check_installed(runtime)
    from edgeqwen.convert.sources import open_checkpoint

    checkpoint = open_checkpoint(find_origin(path).path)
    checkpoint.close()
    check_kv(config.kv, checkpoint.spec.max_position)


def check_kv(kv: KvTable, most: int) -> None:
    """Raise `ConfigInvalid` for a cache that torch does not keep, or a context longer than `most`."""
    if kv.type != "auto":
        check_kv_type(kv.type)
    check_context(kv, most)


def check_installed(runtime: str) -> None:
    """Raise `ConfigInvalid` if what `runtime` needs is not installed."""
    if runtime == "ipex":
        from edgeqwen.runtime.ipex.versions import check_versions

        check_versions()
    elif installed_version("torch") is None:
        raise ConfigInvalid(
            "engine.runtime: torch is not installed: `pip install torch` beside edgeqwen (its build for CPUs will do), "
            "or take --runtime onnx"
        )


def find_origin(path: Path) -> Origin:
    """The checkpoint at `path`, or that of the package there. Raises `ModelMissing`."""
    if not is_package(path):
        return Origin(path, model_name(path.name), checkpoint_identity(path))
    from edgeqwen.convert.hub import HubSettings
    from edgeqwen.convert.origin import find_checkpoint

    manifest = open_package(path).manifest
    found = find_checkpoint(path, manifest.source, HubSettings.from_environment(os.environ))
    return Origin(found, manifest.name, checkpoint_identity(found))


def checkpoint_identity(path: Path) -> str:
    """Names, sizes and times of the files that a model is read from: what it is made of, without reading it all."""
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    facts = []
    for file in files:
        if file.suffix in {".json", ".safetensors", ".gguf", ".jinja"}:
            with contextlib.suppress(OSError):
                status = file.stat()
                facts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def load_checkpoint(
    origin: Origin, wanted: TorchOptions, runtime: str, progress: Callable[[float], None]
) -> TorchRuntime:
    """The runtime, measured and warm; to be called on the thread that will run it."""
    from edgeqwen.convert.sources import open_checkpoint

    checkpoint = open_checkpoint(origin.path)
    try:
        source = spread_out(checkpoint, wanted.weights)
        if runtime == "ipex":
            from edgeqwen.runtime.ipex import load_ipex

            return load_ipex(source, wanted, progress)
        from edgeqwen.runtime.torch.library import load_torch

        return load_torch(source, wanted, progress)
    finally:
        checkpoint.close()


def spread_out(checkpoint: Checkpoint, weights: WeightType) -> Checkpoint:
    """What the weights are made of: where activations are rounded too, a copy of the model without outliers."""
    if weights != "int8":
        return checkpoint
    from edgeqwen.convert.rotation import RotatedCheckpoint

    return RotatedCheckpoint(checkpoint)


def torch_options(options: DaemonOptions, origin: Origin, *, max_position: int, runtime: str) -> TorchOptions:
    """What the configuration asks of torch, for this processor."""
    processor, kv, given = read_processor(), options.config.kv, options.config.torch
    version = f"{runtime} {installed_version('torch')} {given.mode} {given.weights} {given.max_isa} {kv.type}"
    machine = fingerprint(processor, thread_counts=options.threads.counts, runtime_version=version)
    state = writable_folder(options.state_dir)
    return TorchOptions(
        num_slots=kv.slots,
        capacity=kv.context_of(max_position),
        threads=options.threads,
        mode=cast(Any, given.mode),
        weights=chosen_weights(given.weights, processor, given.max_isa),
        computes_bf16=computes_bf16(processor, given.max_isa),
        max_isa=given.max_isa,
        kv_type=None if kv.type == "auto" else cast(Any, kv.type),
        identity=origin.identity,
        code_dir=code_folder(options.cache_dir / CODE_FOLDER, processor, options.threads),
        profile_path=state and state / f"{machine}-{origin.identity}.json",
    )


def code_folder(parent: Path, processor: Processor, threads: ThreadPlan) -> Path:
    """Where compiled code is kept: the processor's instructions and the number of threads are written into it, and
    neither is looked at when it is read again.
    """
    return parent / fingerprint(
        processor, thread_counts=threads.counts, runtime_version=f"torch {installed_version('torch')}"
    )


def computes_bf16(processor: Processor, max_isa: str) -> bool:
    """Whether oneDNN multiplies bf16 in hardware: the processor can, and `torch.max_isa` lets it."""
    return processor.computes_bf16 and (not processor.is_x86 or max_isa in BF16_ISAS)


def chosen_weights(configured: str, processor: Processor, max_isa: str = "auto") -> WeightType:
    """`auto` is bf16 where it is computed in, else fp32."""
    if configured == "auto":
        return "bf16" if computes_bf16(processor, max_isa) else "fp32"
    return cast(WeightType, configured)


def _model_files(checkpoint: Checkpoint, origin: Origin, options: DaemonOptions) -> ModelFiles:
    spec, side = checkpoint.spec, checkpoint.side_files
    eos = [*spec.eos_token_ids, *listed_eos(side.generation_config)]
    return ModelFiles(
        name=origin.name,
        quant=chosen_weights(options.config.torch.weights, read_processor(), options.config.torch.max_isa),
        tokenizer=_tokenizer(side.tokenizer_json, options.cache_dir / TEXT_FOLDER / f"{origin.identity}.json"),
        template=chat_template(side.chat_template or None),
        generation_defaults=side.generation_config,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        pooling=side.pooling,
    )


def _tokenizer(content: bytes, path: Path) -> Tokenizer:
    """From a file, if it can be kept: that can be read again, and need not stay in memory."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            write_whole(path, content)
    except OSError as error:
        log.warning("%s: %s: the tokenizer stays in memory", path.parent, error.strerror)
        return Tokenizer.from_bytes(content)
    return Tokenizer.from_file(path)

"""What is measured: a package with onnxruntime, or a checkpoint with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgeqwen.core.fit import loaded_bytes, weights_bytes
from edgeqwen.core.model import KVType
from edgeqwen.core.package import Package, open_package
from edgeqwen.core.step import Runtime
from edgeqwen.cpu import Processor, ThreadPlan
from edgeqwen.errors import BadRequest
from edgeqwen.runtime.torch.options import BYTES_PER_WEIGHT, Mode, TorchOptions

if TYPE_CHECKING:
    from edgeqwen.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Tokens of a prompt, tokens generated after it, and by how many at once. `runtime` is `onnx`, `torch` or `ipex`;
    `torch_mode` and `torch_weights` are as in the configuration, and what is compiled is kept in `code_dir`.
    """

    num_prompt: int = 128
    num_decode: int = 64
    num_streams: int = 1
    kv_type: KVType | Literal["auto"] = "auto"
    runtime: str = "onnx"
    torch_mode: Mode = "eager"
    torch_weights: str = "auto"
    code_dir: Path | None = None

    @property
    def num_tokens(self) -> int:
        """Of one stream, in all."""
        return self.num_prompt + self.num_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A loaded runtime, and what a report says of it. `weights_bytes` are those that a token reads."""

    runtime: Runtime
    name: str
    quant: str
    weight_form: str
    kv_type: str
    weights_bytes: int
    make_tokenizer: Callable[[], Tokenizer]


def load_subject(path: Path, options: BenchOptions, *, processor: Processor, threads: ThreadPlan) -> Subject:
    """Raises what loading raises, and `BadRequest` for more tokens than the model has positions."""
    if options.runtime == "onnx":
        return _load_package(open_package(path), options, threads)
    return _load_checkpoint(path, options, processor, threads)


def _load_package(package: Package, options: BenchOptions, threads: ThreadPlan) -> Subject:
    from edgeqwen.runtime.onnx import OnnxOptions
    from edgeqwen.runtime.packages import load_package
    from edgeqwen.text import Tokenizer

    manifest = package.manifest
    _check_length(options, manifest.spec.max_position)
    kv_type = None if options.kv_type == "auto" else options.kv_type
    wanted = OnnxOptions.planned(threads, num_slots=options.num_streams, capacity=options.num_tokens, kv_type=kv_type)
    runtime = load_package(package, wanted)
    return Subject(
        runtime=runtime,
        name=manifest.name,
        quant=manifest.quant,
        weight_form=manifest.weight_form,
        kv_type=runtime.kv_type,
        weights_bytes=weights_bytes(manifest.spec, "int4") if manifest.quant == "hybrid" else loaded_bytes(manifest),
        make_tokenizer=lambda: Tokenizer.from_file(package.tokenizer_path),
    )


def _load_checkpoint(path: Path, options: BenchOptions, processor: Processor, threads: ThreadPlan) -> Subject:
    from edgeqwen.convert.sources import open_checkpoint
    from edgeqwen.loading.checkpoint_model import (
        check_installed,
        chosen_weights,
        code_folder,
        find_origin,
        load_checkpoint,
    )
    from edgeqwen.text import Tokenizer

    check_installed(options.runtime)
    origin = find_origin(path)
    checkpoint = open_checkpoint(origin.path)
    checkpoint.close()
    spec, tokenizer_json = checkpoint.spec, checkpoint.side_files.tokenizer_json
    _check_length(options, spec.max_position)
    weights = chosen_weights(options.torch_weights, processor)
    wanted = TorchOptions(
        threads=threads,
        num_slots=options.num_streams,
        capacity=options.num_tokens,
        mode=options.torch_mode,
        weights=weights,
        computes_bf16=processor.computes_bf16,
        kv_type=None if options.kv_type == "auto" else options.kv_type,
        identity=origin.identity,
        code_dir=options.code_dir and code_folder(options.code_dir, processor, threads),
    )
    runtime = load_checkpoint(origin, wanted, options.runtime, lambda _: None)
    return Subject(
        runtime=runtime,
        name=origin.name,
        quant=weights,
        weight_form=options.torch_mode,
        kv_type=runtime.kv_type,
        weights_bytes=BYTES_PER_WEIGHT[weights] * (spec.num_layer_weights + spec.vocab_size * spec.hidden_size),
        make_tokenizer=lambda: Tokenizer.from_bytes(tokenizer_json),
    )


def _check_length(options: BenchOptions, most: int) -> None:
    if options.num_tokens > most:
        raise BadRequest(f"--prompt and --decode need {options.num_tokens} tokens of context, the model has {most}")

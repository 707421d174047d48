"""Runtimes of every kind over one tiny random model, for what all of them promise alike."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from edgeqwen.convert.rotation import RotatedCheckpoint
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.package import open_package
from edgeqwen.core.step import Runtime
from edgeqwen.cpu import ThreadGroup, ThreadPlan
from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.runtime.fake import FakeRuntime, FakeScript
from edgeqwen.runtime.ipex.versions import check_versions
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from edgeqwen.runtime.torch.options import TorchOptions
from tests.checkpoints import write_safetensors_model
from tests.exported_graphs import exported_package, exported_runtime
from tests.models import scratch, tiny_package

SLOTS: Final = 4
CAPACITY: Final = 128
ONE_THREAD: Final = ThreadPlan(ThreadGroup(1), ThreadGroup(1))


def needs_torch() -> None:
    """Skips the test where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (scripts/install --torch)")


@functools.cache
def tiny_checkpoint(family: Any = "qwen3", **shape: Any) -> Path:
    """A folder of safetensors (made once)."""
    folder = scratch() / ("-".join(["checkpoint", family, *(f"{name}{value}" for name, value in shape.items())]))
    write_safetensors_model(folder, family=family, **shape)
    return folder


def torch_runtime(folder: Path, **options: Any) -> Any:
    """The checkpoint loaded with torch and one thread."""
    needs_torch()
    from edgeqwen.runtime.torch.library import load_torch

    return _loaded(load_torch, folder, **options)


def has_ipex() -> bool:
    """Whether IPEX is installed, with the torch that goes with it."""
    try:
        check_versions()
    except ConfigInvalid:
        return False
    return True


def ipex_runtime(folder: Path, **options: Any) -> Any:
    """The checkpoint loaded with IPEX and one thread."""
    from edgeqwen.runtime.ipex import load_ipex

    return _loaded(load_ipex, folder, **options)


def _loaded(load: Callable[..., Any], folder: Path, **options: Any) -> Any:
    given = {"threads": ONE_THREAD, "num_slots": SLOTS, "capacity": CAPACITY, "identity": folder.name, **options}
    wanted = TorchOptions(**given)
    checkpoint: Any = open_checkpoint(folder)
    try:
        source = RotatedCheckpoint(checkpoint) if wanted.weights == "int8" else checkpoint
        return load(source, wanted, lambda _: None)
    finally:
        checkpoint.close()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of runtime. `tolerance` is how far logits may lie apart, in standard deviations of theirs, that are
    computed in another company or another chunking; 0: they are the same bits.
    """

    name: str
    make: Callable[[], Runtime]
    tolerance: float

    def __str__(self) -> str:
        return self.name


def _fake() -> Runtime:
    return FakeRuntime(FakeScript(), vocab_size=512, num_slots=SLOTS, capacity=CAPACITY, sleep=lambda _: None)


def _onnx(quant: Any) -> Callable[[], Runtime]:
    def make() -> Runtime:
        package = open_package(tiny_package("qwen3", quant))
        return OnnxRuntime.load(package, OnnxOptions(num_slots=SLOTS, capacity=CAPACITY, num_threads=1))

    return make


def _exported(case: str) -> Callable[[], Runtime]:
    return lambda: exported_runtime(exported_package(case), num_slots=SLOTS, capacity=CAPACITY)


def _torch(**options: Any) -> Callable[[], Runtime]:
    def make() -> Runtime:
        runtime: Runtime = torch_runtime(tiny_checkpoint(), **options)
        return runtime

    return make


def _ipex(**options: Any) -> Callable[[], Runtime]:
    def make() -> Runtime:
        runtime: Runtime = ipex_runtime(tiny_checkpoint(), **options)
        return runtime

    return make


IPEX_KINDS: Final = (
    Kind("ipex-fp32", _ipex(weights="fp32", computes_bf16=True), 1e-4),
    Kind("ipex-bf16", _ipex(weights="bf16", computes_bf16=True), 0.2),
    Kind("ipex-int8", _ipex(weights="int8"), 0.3),
    Kind("ipex-int8-bf16", _ipex(weights="int8", computes_bf16=True), 0.3),
    Kind("ipex-woq8", _ipex(weights="woq8", computes_bf16=True), 0.3),
    Kind("ipex-fp32-bf16-cache", _ipex(weights="fp32", kv_type="bf16"), 0.2),
)
"""In an environment of their own (scripts/extras/ipex) and there alone."""

KINDS: Final = (
    Kind("fake", _fake, 0),
    Kind("onnx-fp32", _onnx("fp32"), 1e-4),
    Kind("onnx-int8", _onnx("int8"), 0.3),
    Kind("onnx-int4", _onnx("int4"), 0.3),
    Kind("exported-fp32", _exported("qwen3"), 1e-4),
    Kind("exported-fp16", _exported("qwen3-fp16"), 0.05),
    Kind("torch-fp32", _torch(weights="fp32"), 1e-4),
    Kind("torch-bf16", _torch(weights="bf16", computes_bf16=True), 0.2),
    Kind("torch-int8", _torch(weights="int8"), 0.3),
    Kind("torch-int8-bf16", _torch(weights="int8", computes_bf16=True), 0.3),
    Kind("torch-woq8", _torch(weights="woq8", computes_bf16=True), 0.3),
    Kind("torch-fp32-bf16-cache", _torch(weights="fp32", kv_type="bf16"), 0.2),
    Kind("torch-compiled", _torch(weights="fp32", mode="compile"), 1e-4),
    Kind("torch-int8-compiled", _torch(weights="int8", computes_bf16=True, mode="compile"), 0.3),
    *(IPEX_KINDS if has_ipex() else ()),
)
"""Weights and activations of 8 bits are rounded at thresholds, so last bits that differ become steps that differ."""


@contextmanager
def runtime_of(kind: Kind) -> Iterator[Runtime]:
    """Loaded, and closed afterwards. Skips the test if what it needs is not installed, no compiler is at hand, or the
    processor cannot have it.
    """
    try:
        runtime = kind.make()
    except EdgeqwenError as error:
        if any(lack in error.message for lack in ("compiler", "VNNI")):
            pytest.skip(error.message)
        raise
    try:
        yield runtime
    finally:
        runtime.close()

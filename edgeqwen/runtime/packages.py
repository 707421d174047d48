"""The runtime of a package on onnxruntime, whoever has made its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from edgeqwen.core.package import Package
from edgeqwen.runtime.exported import ExportedRuntime
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime

PackageRuntime: TypeAlias = OnnxRuntime | ExportedRuntime


def load_package(
    package: Package, options: OnnxOptions, progress: Callable[[float], None] = lambda _: None
) -> PackageRuntime:
    """Load a package; raises `ModelInvalid` if its graphs cannot be run (rightly) on this machine, `ConfigInvalid` if
    it has none for the type of cache.
    """
    kind = OnnxRuntime if package.manifest.graph == "own" else ExportedRuntime
    return kind.load(package, options, progress)

"""The opening and loading of the model that the configuration names, with the runtime that it names."""

from __future__ import annotations

from edgeqwen.errors import ConfigInvalid
from edgeqwen.loading.choice import choose_runtime
from edgeqwen.loading.early import EarlyRuntime
from edgeqwen.loading.options import DaemonOptions, Model, check_context
from edgeqwen.loading.package_model import check_unchanged, open_package_model

__all__ = [
    "DaemonOptions",
    "EarlyRuntime",
    "Model",
    "check_context",
    "check_unchanged",
    "open_model",
    "unknown_runtime",
]


def open_model(options: DaemonOptions) -> Model:
    """Open what the configuration names: a package with onnxruntime, a checkpoint with torch, or text files with a
    scripted runtime.
    """
    runtime = options.config.engine.runtime
    if runtime == "auto":
        runtime = choose_runtime(options)
    if runtime == "onnx":
        return open_package_model(options)
    if runtime in {"torch", "ipex"}:
        from edgeqwen.loading.checkpoint_model import open_checkpoint_model

        return open_checkpoint_model(options, runtime)
    if runtime.startswith("fake:"):
        from edgeqwen.loading.scripted_model import open_scripted_model

        return open_scripted_model(options)
    raise unknown_runtime(runtime)


def unknown_runtime(name: str) -> ConfigInvalid:
    """What to say of an `engine.runtime` that there is not."""
    return ConfigInvalid(f"engine.runtime: {name!r} is unknown; there are onnx, torch, ipex, auto and fake:SCRIPT")

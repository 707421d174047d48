"""IPEX itself: what is checked before it is imported, how it is imported, and the loading of a model with it.

When IPEX is imported, it and torch print what does not concern who runs a daemon (operators that are registered twice,
no CUDA), and it takes the process's logging for its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Final

from edgeqwen.errors import ConfigInvalid
from edgeqwen.runtime.ipex.versions import check_versions
from edgeqwen.runtime.torch.library import check_library, first_line, prepare_environment, processor_has_avx2
from edgeqwen.runtime.torch.options import TorchOptions

if TYPE_CHECKING:
    from edgeqwen.runtime.torch.runtime import TorchRuntime
    from edgeqwen.runtime.torch.weights import WeightSource

MODULE: Final = "intel_extension_for_pytorch"
TALKATIVE: Final = "torch.utils.cpp_extension"


def load_ipex(source: WeightSource, options: TorchOptions, progress: Callable[[float], None]) -> TorchRuntime:
    """Import torch and IPEX as `options` ask for it, check them, and load the model. Raises `ConfigInvalid` in one line
    that names the package or setting at fault.
    """
    check_versions()
    check_options(options)
    prepare_environment(options)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    check_library(options)
    import_ipex()
    progress(0.05)
    from edgeqwen.runtime.ipex.decoder import IpexRuntime

    check_products(options)
    return IpexRuntime.load(source, dataclasses.replace(options, identity=f"ipex {options.identity}"), progress)


def check_options(options: TorchOptions) -> None:
    """Raise `ConfigInvalid` for what IPEX does not do here."""
    if options.mode == "compile":
        raise ConfigInvalid("torch.mode: ipex has fused operators of its own and is not compiled; take eager")
    if not processor_has_avx2():
        raise ConfigInvalid("engine.runtime: ipex needs a processor with AVX2; take --runtime onnx")


def import_ipex() -> None:
    """Import IPEX. Raises `ConfigInvalid` if that fails."""
    logging.getLogger(TALKATIVE).setLevel(logging.ERROR)
    try:
        with _logging_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(MODULE)
    except (ImportError, OSError, AttributeError, SystemExit) as error:
        raise ConfigInvalid(
            f"engine.runtime: {MODULE} cannot be imported ({first_line(error)}): install it again, or take "
            "--runtime onnx"
        ) from error


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """Whatever is done to the process's logging inside is undone: IPEX has all loggers of later modules be its own."""
    logger_class, handlers = logging.getLoggerClass(), list(logging.root.handlers)
    try:
        yield
    finally:
        logging.setLoggerClass(logger_class)
        logging.root.handlers[:] = handlers


def check_products(options: TorchOptions) -> None:
    """Try one product with weights as they are asked for. Raises `ConfigInvalid` if this processor has none."""
    import torch

    from edgeqwen.runtime.ipex.matrices import packed

    dtype = torch.bfloat16 if options.is_bf16 else torch.float32
    try:
        with torch.inference_mode():
            packed(torch.zeros(64, 64), torch.ones(64), options.weights, dtype)(torch.zeros(2, 64, dtype=dtype))
    except RuntimeError as error:
        raise ConfigInvalid(
            f"torch.weights: ipex cannot compute with {options.weights} here ({first_line(error)}); take another type "
            "of weights, or --runtime onnx"
        ) from error

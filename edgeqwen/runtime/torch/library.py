"""torch itself: how it is set up before it is imported, and what it needs of the machine and of the unit.

Its libraries read the environment when they are loaded, so threads and instruction sets are said there. Threads that
compute belong to the thread that first runs a product, which has to be the engine's. Workers sleep soon after a step.

oneDNN writes machine code as it runs. Where memory may not be made executable it fails with words that say nothing, so
one product is tried first. torch takes its kernels' instruction sets from /proc/cpuinfo, and without that file computes
everything with its slowest ones. Without VNNI oneDNN adds products of 8 bits up in 16, where they overflow: answers
would be nonsense, so a product of known result is tried.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from edgeqwen.cpu import ThreadPlan
from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.runtime.torch.options import TorchOptions, installed_version

if TYPE_CHECKING:
    from edgeqwen.runtime.torch.runtime import TorchRuntime
    from edgeqwen.runtime.torch.weights import WeightSource

OLDEST: Final = (2, 6)
BLOCK_TIME_MS: Final = 1
SPINS: Final = 20_000
"""Turns that a waiting thread looks around before it sleeps: enough for the time between two products. By default GNU's
make it fifteen times as many, and beside another busy process that time is taken from whom it waits for.
"""

HIGHEST_CODE: Final = 127

JIT_ADVICE: Final = (
    "the unit must allow memory that is written and then executed: MemoryDenyWriteExecute=no "
    "(the drop-in jit.conf), or take torch.weights = fp32, or --runtime onnx"
)

log = logging.getLogger(__name__)


def load_torch(source: WeightSource, options: TorchOptions, progress: Callable[[float], None]) -> TorchRuntime:
    """Import torch as `options` ask for it, check it, and load the model. Raises `ConfigInvalid` in one line that names
    the package or setting at fault.
    """
    prepare_environment(options)
    check_library(options)
    progress(0.05)
    from edgeqwen.runtime.torch.runtime import TorchRuntime

    return TorchRuntime.load(source, options, progress)


def library_environment(threads: ThreadPlan, max_isa: str) -> dict[str, str]:
    """Variables for OpenMP (GNU's and Intel's) and oneDNN."""
    most = max(threads.counts)
    variables = {"OMP_NUM_THREADS": str(most), "GOMP_SPINCOUNT": str(SPINS), "KMP_BLOCKTIME": str(BLOCK_TIME_MS)}
    masks = threads.decode.masks or threads.prefill.masks
    if masks:
        places = ",".join(f"[{','.join(map(str, mask))}]" if len(mask) > 1 else str(mask[0]) for mask in masks)
        variables["KMP_AFFINITY"] = f"granularity=fine,proclist=[{places}],explicit"
    if max_isa != "auto":
        variables["ONEDNN_MAX_CPU_ISA"] = max_isa.upper()
    return variables


def prepare_environment(options: TorchOptions, environ: Any = os.environ) -> None:
    """Set what is not set already: whoever started the daemon comes first."""
    for name, value in library_environment(options.threads, options.max_isa).items():
        if name == "OMP_NUM_THREADS":
            environ[name] = value  # the plan has heeded it
        else:
            environ.setdefault(name, value)
    if options.code_dir is not None:
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.code_dir)


def check_library(options: TorchOptions) -> None:
    """Import torch; raise `ConfigInvalid` if it is too old, or cannot do what is asked for here."""
    found = installed_version("torch") or ""
    if version_of(found) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigInvalid(f"engine.runtime: torch {found} is too old: `pip install 'torch>={oldest}'`")
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ConfigInvalid(
            f"engine.runtime: torch {found} cannot be imported ({first_line(error)}): install its build for CPUs again"
        ) from error
    check_capability(torch.backends.cpu.get_cpu_capability())
    _check_products(torch, options)


def version_of(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13); of what is no version (0,)."""
    numbers = text.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(number) for number in numbers) if all(number.isdigit() for number in numbers) else (0,)


def check_capability(capability: str) -> None:
    """Warn if torch takes the processor for one without vector units although it has them."""
    if capability in {"DEFAULT", "NO AVX"} and processor_has_avx2():
        log.warning(
            "torch computes without vector units, several times slower than it could: it cannot read /proc/cpuinfo; "
            "set ProcSubset=all in the unit"
        )


def processor_has_avx2() -> bool:
    """By the processor's own word, which numpy asks it for, whatever /proc says."""
    features = import_module("numpy._core._multiarray_umath").__cpu_features__
    return bool(features.get("AVX2"))


def _check_products(torch: Any, options: TorchOptions) -> None:
    """Try one product of each kind that will be needed, that of codes with known results."""
    rows, weights = torch.zeros(2, 64), torch.zeros(64, 64)
    try:
        if options.is_bf16:
            torch.nn.functional.linear(rows.bfloat16(), weights.bfloat16())
        sums = _sums_of_codes(torch) if options.weights == "int8" else None
        torch.nn.functional.linear(rows, weights)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise _product_error(error, options) from error
    if sums is not None and bool((sums != 64 * HIGHEST_CODE**2).any()):
        raise ConfigInvalid(
            "torch.weights: torch's oneDNN adds products of int8 up in 16 bits here, which do not hold them (it has no "
            "VNNI to use): take woq8 or fp32, or --runtime onnx"
        )


def _sums_of_codes(torch: Any) -> Any:
    """Sums of 64 products of the highest codes, in each element."""
    codes, zeros = torch.full((64, 64), HIGHEST_CODE, dtype=torch.int8), torch.zeros(64, dtype=torch.int64)
    packed = torch.ops.onednn.qlinear_prepack(codes, [2, 64])
    return torch.ops.onednn.qlinear_pointwise(
        codes[:2], 1.0, 0, packed, torch.ones(64), zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _product_error(error: Exception, options: TorchOptions) -> EdgeqwenError:
    text = first_line(error)
    if "could not create a primitive" in text or "mprotect" in text:
        return ConfigInvalid(f"engine.runtime: torch's oneDNN cannot make its code here: {JIT_ADVICE}")
    return ConfigInvalid(
        f"torch.weights: this build of torch has no {options.weights} products for CPUs ({text}); "
        "take another type of weights, or install torch's own build for CPUs"
    )


def first_line(error: BaseException) -> str:
    """What an error of torch says, without the lines that follow."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0][:300]

"""Which runtime `engine.runtime = "auto"` means: of those that can serve the model, the one that was fastest here.

How fast they are is timed by `edgeqwen doctor --time`, which keeps it in the state directory (`core.speeds`). What was
not timed is not chosen while there is another: a package is served by onnxruntime then, a checkpoint by torch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from edgeqwen.core.package import is_package
from edgeqwen.core.speeds import read_speeds, speeds_path
from edgeqwen.cpu import ThreadPlan, fingerprint, read_memory, read_processor
from edgeqwen.errors import EdgeqwenError
from edgeqwen.loading.options import DaemonOptions
from edgeqwen.runtime.torch.options import BYTES_PER_WEIGHT, installed_version

PACKAGES: Final = {"onnx": "onnxruntime", "torch": "torch", "ipex": "intel-extension-for-pytorch"}
"""Runtime -> the Python package that it needs, the first choice first."""

SHARE: Final = 0.5
"""Of free memory that the weights may take of a runtime that nobody has named."""

log = logging.getLogger(__name__)


def choose_runtime(options: DaemonOptions) -> str:
    """The name of a runtime; the log says why it is that one."""
    possible = [name for name in PACKAGES if _can_serve(name, options)]
    if not possible:
        return "onnx" if is_package(options.package_path) else "torch"  # says what is lacking
    speeds = read_speeds(speeds_path(options.state_dir, machine_of(options.threads)))
    timed = {name: speeds[name].request_s for name in possible if name in speeds}
    if timed:
        chosen = min(timed, key=lambda name: timed[name])
        log.info("runtime %s: the fastest of %s, as timed here", chosen, ", ".join(timed))
    else:
        chosen = possible[0]
        log.info("runtime %s: nothing was timed here yet (`edgeqwen doctor --time` does)", chosen)
    return chosen


def serves_checkpoint(runtime: str, path: Path) -> bool:
    """Whether `engine.runtime` means that a checkpoint is served: of those at `path`, or of the package there."""
    return runtime in {"torch", "ipex"} or (runtime == "auto" and not is_package(path))


def machine_of(threads: ThreadPlan) -> str:
    """What timings are of: processor and threads, with whatever versions of the runtimes there are."""
    versions = " ".join(f"{name} {installed_version(name)}" for name in PACKAGES.values())
    return fingerprint(read_processor(), thread_counts=threads.counts, runtime_version=versions)


def _can_serve(name: str, options: DaemonOptions) -> bool:
    if name == "onnx":
        return is_package(options.package_path)
    from edgeqwen.loading.checkpoint_model import check_installed, find_origin

    try:
        check_installed(name)
        find_origin(options.package_path)
    except EdgeqwenError:
        return False
    return not is_package(options.package_path) or _has_room(options)


def _has_room(options: DaemonOptions) -> bool:
    """Whether the weights fit in half of the memory that is free, in the form that torch would keep them in."""
    from edgeqwen.core.package import open_package
    from edgeqwen.loading.checkpoint_model import chosen_weights

    spec = open_package(options.package_path).manifest.spec
    weights = chosen_weights(options.config.torch.weights, read_processor(), options.config.torch.max_isa)
    count = spec.num_layer_weights + 2 * spec.vocab_size * spec.hidden_size
    free = read_memory().free
    return free <= 0 or count * BYTES_PER_WEIGHT[weights] <= SHARE * free

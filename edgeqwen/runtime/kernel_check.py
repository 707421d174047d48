"""Proof at load that this processor multiplies the package's quantised weights rightly.

On x86 with AVX2 but without VNNI the kernel for signed weights adds products in 16 bits, which saturate: answers are
wrong by a fifth and nothing says so. A package therefore carries a graph with one product of extreme values for each
kernel it uses; here the results are compared with exact arithmetic before the real graphs are loaded.

onnxruntime can be told to turn signed weights into unsigned ones at load (`x64quantprecision`), which mends that, but
only where they are weights: two activations multiplied with each other stay wrong.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgeqwen.core.kernel import (
    ACTIVATIONS,
    CODES,
    SIGNED_WEIGHTS,
    UNSIGNED_WEIGHTS,
    Kernel,
    RowKernel,
    check_codes,
    exact_weights,
    parse_kernel,
    row_weights,
    tolerances,
)
from edgeqwen.errors import ModelInvalid
from edgeqwen.runtime.session import first_line, open_session, session_options

ROWS: Final = (1, 5, 64)
"""One row, few and many: each has a kernel of its own somewhere."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Findings:
    """Kernels of a check graph, and those whose products, of one, few or many rows, are not what they must be."""

    kernels: tuple[Kernel, ...]
    wrong: tuple[Kernel, ...]

    @property
    def wrong_weights(self) -> tuple[Kernel, ...]:
        """Those of `wrong` that no graph of the package can do without."""
        return tuple(kernel for kernel in self.wrong if not _is_of_activations(kernel))


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """How a package is to be run here: `is_precise` with onnxruntime's rewritten weights; and whether graphs that
    multiply quantised activations with each other (integer attention) may be used.
    """

    is_precise: bool = False
    has_integer_attention: bool = True


def choose_kernels(path: Path, *, mending: str = "") -> KernelChoice:
    """What the check graph at `path` shows. A package without one has no quantised products. `mending` says what to do
    about weights that do not suit this processor; by default, to import the package for it.

    Raises `ModelInvalid` if weights are multiplied wrongly whatever is chosen.
    """
    if not path.exists():
        return KernelChoice()
    findings = examine(path)
    is_precise = bool(findings.wrong_weights)
    if is_precise:
        _check_precise(path, mending)
    has_integer_attention = findings.wrong == findings.wrong_weights
    if not has_integer_attention:
        logger.info("%s: no integer attention: this processor would compute it wrongly", path.parent)
    return KernelChoice(is_precise, has_integer_attention)


def _check_precise(path: Path, mending: str) -> None:
    if wrong := examine(path, is_precise=True).wrong_weights:
        names = " and ".join(str(kernel) for kernel in wrong)
        other = "--target any" if all(kernel == RowKernel("signed") for kernel in wrong) else "another --quant"
        advice = mending or f"import the model again with {other}"
        raise ModelInvalid(f"{path.parent}: this processor multiplies {names} wrongly; {advice}")
    logger.warning(
        "%s: made for a processor with VNNI, which this one is not; its weights are rewritten at every load, which "
        "takes time and memory: %s",
        path.parent,
        mending or f"mend it with `edgeqwen import {path.parent} --target any --out {path.parent}`",
    )


def examine(path: Path, *, is_precise: bool = False) -> Findings:
    """Run the check graph at `path`, `is_precise` with onnxruntime's rewritten weights.

    Raises `ModelInvalid` if it is no such graph or does not run.
    """
    session: Any = open_session(path, session_options(1, is_precise=is_precise))
    try:
        kernels = tuple(parse_kernel(output.name) for output in session.get_outputs())
        wanted = [argument.name for argument in session.get_inputs()]
        wrong: dict[Kernel, None] = {}
        for rows in ROWS:
            codes = check_codes(rows)
            values = _inputs(codes)
            results = session.run(None, {name: values[name] for name in wanted})
            for kernel, result in zip(kernels, results, strict=True):
                if not _is_right(kernel, codes, result):
                    wrong[kernel] = None
    except Exception as error:  # onnxruntime raises its own types, RuntimeError and ValueError
        raise ModelInvalid(f"{path}: not a check of kernels: {first_line(error)}; import the model again") from error
    return Findings(kernels, tuple(wrong))


def _inputs(codes: Any) -> dict[str, Any]:
    return {
        CODES: codes,
        ACTIVATIONS: codes.astype(np.float32) - 128,
        SIGNED_WEIGHTS: row_weights("signed"),
        UNSIGNED_WEIGHTS: row_weights("unsigned"),
    }


def _is_of_activations(kernel: Kernel) -> bool:
    return isinstance(kernel, RowKernel) and kernel.is_computed


def _is_right(kernel: Kernel, codes: Any, result: Any) -> bool:
    exact = (codes.astype(np.int64) - 128) @ exact_weights(kernel)
    return result.shape == exact.shape and bool((np.abs(result - exact) <= tolerances(kernel)).all())

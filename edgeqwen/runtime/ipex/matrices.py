"""Matrices packed for IPEX's products.

fp32    as they are: torch's own product is as fast
bf16    in oneDNN's order
int8    codes of 8 bits and a scale for each row of the matrix; the rows they meet are rounded to 8 bits too, in
        blocks with a scale each ("weight only, low precision int8" in IPEX)
woq8    the same codes; what they meet stays in 16 bits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from intel_extension_for_pytorch.quantization import WoqActQuantMode, WoqLowpMode, WoqWeightDtype

from edgeqwen.runtime.torch.options import WeightType
from edgeqwen.runtime.torch.weights import Matrix, PlainMatrix, WeightSource, gathered, quantized_matrix

NO_GROUPS: Final = -1
"""One scale for a row of the matrix."""


class PackedMatrix:
    """bf16 in oneDNN's order."""

    def __init__(self, values: Any) -> None:
        self._width = values.shape[0]
        self._context = torch.ops.ipex_prepack.linear_prepack(values, None, None)
        self._handle = self._context.get_data_handle()
        self._nothing = values.new_empty(0)  # stands where the product expects the matrix, which the context has

    def __call__(self, rows: Any) -> Any:
        return torch.ops.torch_ipex.ipex_linear(rows, self._nothing, None, self._handle, self._width)


class CodedMatrix:
    """Codes of 8 bits with a scale for each row of the matrix."""

    def __init__(self, codes: Any, scales: Any, weight_type: WeightType) -> None:
        rounds_rows = weight_type == "int8"
        self._context = torch.ops.ipex_prepack.weight_only_qlinear_prepack(
            codes,
            WoqWeightDtype.INT8,
            list(codes.shape),
            scales,
            None,  # no zero points: codes lie around 0
            None,
            None,
            None,
            NO_GROUPS,
            int(WoqLowpMode.INT8 if rounds_rows else WoqLowpMode.BF16),
            int(WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM if rounds_rows else WoqActQuantMode.NONE),
        )
        self._handle = self._context.get_data_handle()

    def __call__(self, rows: Any) -> Any:
        return torch.ops.torch_ipex.ipex_woq_linear(rows, self._handle)


def make_matrix(source: WeightSource, names: Sequence[str], weight_type: WeightType, dtype: Any) -> Matrix:
    """The tensors `names`, which multiply the same rows, as one matrix: their outputs stand side by side."""
    if weight_type in {"int8", "woq8"}:
        return packed(*quantized_matrix(source, names), weight_type, dtype)
    return packed(gathered(source, names, dtype), None, weight_type, dtype)


def packed(values: Any, scales: Any, weight_type: WeightType, dtype: Any) -> Matrix:
    """A matrix `[out, in]` of `values`, which are codes where there are `scales` `[out]`."""
    if weight_type in {"int8", "woq8"}:
        return CodedMatrix(values.to(torch.int8), scales, weight_type)
    return PackedMatrix(values.to(dtype)) if weight_type == "bf16" else PlainMatrix(values)

"""Matrices in the form that a step multiplies with, made of a checkpoint's rows.

    fp32    as they are
    bf16    rounded, packed for oneDNN: half the memory, and matrix units where the processor has them
    int8    codes of 8 bits and a scale for each row of the matrix; the rows they meet are rounded to 8 bits too, with a
            scale each, and products are exact integers (oneDNN's quantised linear layer)
    woq8    the same codes, but what they meet stays in 16 or 32 bits ("weight only"): a row at a time by torch's
            kernel for it, more by way of a copy in full

A row's scale is its largest absolute value over 127.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from edgeqwen.core.model import ModelSpec
from edgeqwen.runtime.torch.options import WeightType

ROWS_AT_ONCE: Final = 8192
PACKED_FOR_ROWS: Final = 256
"""Packed for few rows, oneDNN would lay the weights out anew for each product of more."""

WOQ_ROWS: Final = 4
"""torch's weight-only kernel takes rows one by one; from here on a copy in full is the faster way."""

LEVELS: Final = 127


class WeightSource(Protocol):
    """Whatever has a model's tensors by their canonical names (a checkpoint)."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tensors(self) -> Mapping[str, Any]: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Rows `[start, stop)` as float32."""
        ...


class Matrix(Protocol):
    """Multiplies rows `[rows, in]`, giving `[rows, out]`."""

    def __call__(self, rows: Any) -> Any: ...


class PlainMatrix:
    """fp32 or bf16, in torch's own order."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __call__(self, rows: Any) -> Any:
        return torch.nn.functional.linear(rows, self._values)


class PackedMatrix:
    """bf16 in oneDNN's order."""

    def __init__(self, values: Any) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(values, PACKED_FOR_ROWS)

    def __call__(self, rows: Any) -> Any:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, None, "none", [], "")


class IntegerMatrix:
    """Codes in oneDNN's order; takes rows of int8 codes and gives their products times this matrix' scales only."""

    def __init__(self, codes: Any, scales: Any, dtype: Any) -> None:
        self._scales = scales
        self._zeros = torch.zeros(codes.shape[0], dtype=torch.int64)
        self._dtype = dtype
        self._packed = torch.ops.onednn.qlinear_prepack(codes, [PACKED_FOR_ROWS, codes.shape[1]])

    def __call__(self, rows: Any) -> Any:
        return torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, self._packed, self._scales, self._zeros, None, 1.0, 0, self._dtype, "none", [], ""
        )


class WeightOnlyMatrix:
    """Codes in torch's own order, for rows that are not rounded."""

    def __init__(self, codes: Any, scales: Any, dtype: Any) -> None:
        self._codes, self._scales = codes, scales.to(dtype)
        self._dtype = dtype

    def __call__(self, rows: Any) -> Any:
        if rows.shape[0] <= WOQ_ROWS and self._dtype is torch.bfloat16:
            return torch._weight_int8pack_mm(rows, self._codes, self._scales)
        return torch.nn.functional.linear(rows, self._codes.to(self._dtype)) * self._scales


def quantized_rows(rows: Any) -> tuple[Any, Any]:
    """(int8 codes, scales float32 `[rows, 1]`): what `IntegerMatrix` takes, and what its products lack."""
    rows = rows.float()
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(1e-8) / LEVELS
    return (rows / scales).round().to(torch.int8), scales


def make_matrix(source: WeightSource, names: Sequence[str], weight_type: WeightType, dtype: Any) -> Matrix:
    """The tensors `names`, which multiply the same rows, as one matrix: their outputs stand side by side."""
    if weight_type == "fp32":
        return PlainMatrix(gathered(source, names, torch.float32))
    if weight_type == "bf16":
        values = gathered(source, names, torch.bfloat16)
        return PackedMatrix(values) if packs_bf16() else PlainMatrix(values)
    codes, scales = quantized_matrix(source, names)
    form = IntegerMatrix if weight_type == "int8" else WeightOnlyMatrix
    return form(codes, scales, dtype)


def quantized_matrix(source: WeightSource, names: Sequence[str]) -> tuple[Any, Any]:
    """(codes `[out, in]` int8, scales `[out]` float32)."""
    pieces = [_rounded(rows) for rows in _row_pieces(source, names)]
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


def packs_bf16() -> bool:
    """Whether oneDNN computes in bf16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def vector(source: WeightSource, names: Sequence[str]) -> Any:
    """One-dimensional tensors, one after the other."""
    return torch.cat([torch.from_numpy(source.read(name)) for name in names])


def _rounded(rows: Any) -> tuple[Any, Any]:
    scales = rows.abs().amax(1).clamp_min(1e-12) / LEVELS
    return (rows / scales[:, None]).round().to(torch.int8), scales


def gathered(source: WeightSource, names: Sequence[str], dtype: Any) -> Any:
    """The rows of tensors, one below the other."""
    return torch.cat([rows.to(dtype) for rows in _row_pieces(source, names)])


def _row_pieces(source: WeightSource, names: Sequence[str]) -> Iterator[Any]:
    """float32 tensors of at most `ROWS_AT_ONCE` rows: a whole embedding would take gigabytes."""
    for name in names:
        count = source.tensors[name].shape[0]
        for start in range(0, count, ROWS_AT_ONCE):
            yield torch.from_numpy(source.read(name, start, min(count, start + ROWS_AT_ONCE)))

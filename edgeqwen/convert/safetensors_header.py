"""A bounded reader of safetensors headers (format: README of the safetensors project).

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {...}} | data

The data section has no holes and no overlaps, and ends with the file; all of it is checked before any weight is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.convert.files import DataFile, parse_json
from edgeqwen.errors import ModelInvalid

MAX_HEADER_BYTES: Final = 32 << 20
MAX_TENSORS: Final = 1 << 16
MAX_DIMS: Final = 4
READABLE: Final = {"F32": 4, "F16": 2, "BF16": 2}
OTHER_TYPES: Final = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of the types that the format knows and this reader does not."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `offset` from the start of `file`, inside it."""

    file: DataFile
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along the first dimension."""
        row_bytes = READABLE[self.dtype]
        for extent in self.shape[1:]:
            row_bytes *= extent
        return row_bytes


def read_header(file: DataFile) -> dict[str, StoredTensor]:
    """The tensors of `file`, by name; raises `ModelInvalid`."""
    if file.size < 8:
        raise _truncated(file, 8, " or more")
    length = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise _error(
            file,
            f"claims a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read: damaged, or another format",
        )
    start = 8 + length
    if start > file.size:
        raise _truncated(file, start, " or more")
    header = parse_json(file.path, file.read(8, length).tobytes())
    header.pop("__metadata__", None)
    if not 0 < len(header) <= MAX_TENSORS:
        raise _error(file, f"lists {len(header):,} tensors; 1 to {MAX_TENSORS:,} are possible")
    extents = {name: _extent(file, name, info) for name, info in header.items()}
    _check_layout(file, start, extents)
    return {name: _tensor(file, name, info, start) for name, info in header.items()}


def _extent(file: DataFile, name: str, info: Any) -> tuple[int, int]:
    """`data_offsets` of a tensor, which must agree with its shape and type."""
    try:
        dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
    except (TypeError, KeyError, ValueError) as e:
        raise _error(file, f"describes tensor '{name}' without dtype, shape or data_offsets") from e
    bits = (8 * READABLE.get(dtype, 0) or OTHER_TYPES.get(dtype, 0)) if isinstance(dtype, str) else 0
    if not bits:
        raise _error(file, f"stores tensor '{name}' in the unknown type {str(dtype)[:40]!r}")
    if isinstance(shape, list) and not 1 <= len(shape) <= MAX_DIMS:  # before they are multiplied
        shown = shape if len(shape) < 2 * MAX_DIMS else f"of {len(shape):,} dimensions"
        raise _error(file, f"gives tensor '{name}' the shape {shown}; 1 to {MAX_DIMS} dimensions are possible")
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
        raise _error(file, f"describes tensor '{name}' with a shape or offsets that are not whole numbers")
    num_bits = bits
    for extent in shape:
        num_bits *= extent
    if (end - begin) * 8 != num_bits:
        raise _error(file, f"gives tensor '{name}' {end - begin:,} bytes; its shape and type take {num_bits // 8:,}")
    return begin, end


def _check_layout(file: DataFile, start: int, extents: dict[str, tuple[int, int]]) -> None:
    """Tensors cover the data section without hole or overlap, and the file ends where they do."""
    last_name, position = "", 0
    for name, (begin, end) in sorted(extents.items(), key=lambda item: item[1]):
        if begin < position:
            raise _error(file, f"lets tensor '{name}' overlap '{last_name}'")
        if begin > position:
            raise _error(file, f"leaves a hole of {begin - position:,} bytes before tensor '{name}'")
        last_name, position = name, end
    expected = start + position
    if expected > file.size:
        raise _truncated(file, expected)
    if expected < file.size:
        raise _error(
            file,
            f"has {file.size - expected:,} bytes too many: {expected:,} bytes expected, {file.size:,} found",
        )


def _tensor(file: DataFile, name: str, info: dict[str, Any], start: int) -> StoredTensor:
    dtype, shape = info["dtype"], tuple(info["shape"])
    if dtype not in READABLE:
        raise _error(file, f"stores tensor '{name}' in type {dtype}; supported: {', '.join(READABLE)}")
    if 0 in shape:
        raise _error(file, f"gives tensor '{name}' the empty shape {list(shape)}")
    return StoredTensor(file, shape, dtype, start + info["data_offsets"][0])


def _truncated(file: DataFile, expected: int, detail: str = "") -> ModelInvalid:
    return _error(file, f"is truncated: {expected:,} bytes expected{detail}, {file.size:,} found: fetch it again")


def _error(file: DataFile, problem: str) -> ModelInvalid:
    return ModelInvalid(f"{file.path} {problem}")

"""A bounded reader of GGUF headers, versions 2 and 3, little-endian (format: docs/gguf.md of the ggml project).

    magic 'GGUF' | version u32 | tensors u64 | pairs u64 | pairs: key, type, value | tensor infos | padding | data

All that a file says of itself is checked before it is used: counts against fixed limits and the bytes that are left,
positions (Python integers, so nothing wraps) against the size of the file.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from edgeqwen.convert.files import DataFile
from edgeqwen.errors import ModelInvalid

MAGIC: Final = b"GGUF"
MAX_PAIRS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_KEY_BYTES: Final = 1 << 10
MAX_ARRAY_LEN: Final = 1 << 20
MAX_STRING_BYTES: Final = 4 << 20
MAX_ELEMENTS: Final = 3 << 19
MAX_HEADER_BYTES: Final = 64 << 20
MAX_DIMS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20

STRING, ARRAY = 8, 9
BOOL: Final = 7
SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    BOOL: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

Value: TypeAlias = Any  # str, int, float, bool, list[str] or a numpy array


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type that can be read: `block_len` elements take `block_bytes`."""

    name: str
    block_len: int
    block_bytes: int


TENSOR_TYPES: Final = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
"""By type id. Everything else is refused; `OTHER_TYPES` gives the message a name."""

OTHER_TYPES: Final = {
    4: "Q4_2, removed from the format", 5: "Q4_3, removed from the format", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4, removed from the format",
    32: "Q4_0_4_8, removed from the format", 33: "Q4_0_8_8, removed from the format", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4, removed from the format", 37: "IQ4_NL_4_8, removed from the format",
    38: "IQ4_NL_8_8, removed from the format", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` outermost first (rows, columns), `offset` from the start of the file."""

    shape: tuple[int, ...]
    type: BlockType
    offset: int
    num_bytes: int

    @property
    def row_len(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.row_len // self.type.block_len * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a file, in file order."""

    version: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_header(file: DataFile) -> GgufHeader:
    """Parse and check the header of `file`; raises `ModelInvalid`."""
    if file.size < 4 or file.read(0, 4).tobytes() != MAGIC:
        raise ModelInvalid(f"{file.path} is not a GGUF file: it does not start with 'GGUF'")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Parser(file.path, data, file.size).parse()


class _Parser:
    """A cursor over the header; `pos` never passes `size`."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self._data = data
        self._size = size
        self._pos = len(MAGIC)
        self._num_elements = 0

    def parse(self) -> GgufHeader:
        version = self._version()
        num_tensors, num_pairs = self._scalar("<Q"), self._scalar("<Q")
        if num_tensors > MAX_TENSORS:
            raise self._error(f"claims {num_tensors:,} tensors; at most {MAX_TENSORS:,} are read")
        if num_tensors == 0:
            raise self._error("holds no tensors: it is a vocabulary or metadata alone")
        if num_pairs > MAX_PAIRS:
            raise self._error(f"claims {num_pairs:,} metadata pairs; at most {MAX_PAIRS:,} are read")
        metadata: dict[str, Value] = {}
        for _ in range(num_pairs):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._error(f"holds the metadata key '{key}' twice")
            metadata[key] = self._value(key)
        return GgufHeader(version, metadata, self._tensors(num_tensors, metadata))

    def _version(self) -> int:
        version = int(self._scalar("<I"))
        if version in (2, 3):
            return version
        if version and version & 0xFFFF == 0:
            raise self._error("is big-endian; only little-endian GGUF files are supported")
        raise self._error(f"is GGUF version {version}; versions 2 and 3 are supported: convert it anew")

    def _tensors(self, count: int, metadata: dict[str, Value]) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"gives 'general.alignment' as {alignment!r}; it must be a power of two")
        infos: dict[str, GgufTensor] = {}
        for _ in range(count):
            name = self._name("a tensor name")
            if name in infos:
                raise self._error(f"holds the tensor '{name}' twice")
            infos[name] = self._tensor(name)
        start = -(-self._pos // alignment) * alignment
        return self._place(infos, start, alignment)

    def _tensor(self, name: str) -> GgufTensor:
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"gives tensor '{name}' {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(int(self._scalar("<Q")) for _ in range(num_dims))[::-1]
        type_id, offset = int(self._scalar("<I")), int(self._scalar("<Q"))
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            known = f" ({OTHER_TYPES[type_id]})" if type_id in OTHER_TYPES else ""
            supported = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise self._error(f"stores tensor '{name}' in type {type_id}{known}; supported: {supported}")
        num_elements = 1
        for extent in shape:
            num_elements *= extent
        if num_elements == 0:
            raise self._error(f"gives tensor '{name}' the empty shape {list(shape)}")
        if shape[-1] % kind.block_len:
            raise self._error(
                f"gives tensor '{name}' rows of {shape[-1]} elements; {kind.name} needs a multiple of {kind.block_len}"
            )
        return GgufTensor(shape, kind, offset, num_elements // kind.block_len * kind.block_bytes)

    def _place(self, infos: dict[str, GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
        """Offsets from the start of the file; every tensor aligned, inside the file and clear of its neighbours."""
        last_name, end = "", start
        for name, info in sorted(infos.items(), key=lambda item: item[1].offset):
            if info.offset % alignment:
                raise self._error(f"puts tensor '{name}' at offset {info.offset}, no multiple of {alignment}")
            if start + info.offset < end:
                raise self._error(f"lets tensor '{name}' overlap '{last_name}'")
            last_name, end = name, start + info.offset + info.num_bytes
        if end > self._size:
            raise self._truncated(end, f" (tensor '{last_name}' ends there)")
        return {name: GgufTensor(t.shape, t.type, start + t.offset, t.num_bytes) for name, t in infos.items()}

    def _value(self, key: str) -> Value:
        kind = int(self._scalar("<I"))
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise self._error(f"gives '{key}' the unknown value type {kind}")
        return self._scalar(SCALARS[kind])

    def _array(self, key: str) -> Value:
        kind, length = int(self._scalar("<I")), int(self._scalar("<Q"))
        self._num_elements += length
        if length > MAX_ARRAY_LEN or self._num_elements > MAX_ELEMENTS:
            raise self._error(f"gives '{key}' {length:,} elements: more than are read ({MAX_ARRAY_LEN:,} in one array)")
        if kind == STRING:
            return [self._string(key) for _ in range(length)]
        if kind not in SCALARS:
            raise self._error(f"gives '{key}' elements of type {kind}; arrays of numbers and strings are supported")
        dtype = np.dtype(SCALARS[kind])
        start = self._advance(length * dtype.itemsize)
        return np.array(np.frombuffer(self._data, dtype, length, start)) if length else np.empty(0, dtype)

    def _name(self, what: str) -> str:
        return self._text(f"holds {what}", MAX_KEY_BYTES)

    def _string(self, key: str) -> str:
        return self._text(f"gives '{key}' a string", MAX_STRING_BYTES, is_strict=key.startswith("tokenizer."))

    def _text(self, having: str, max_bytes: int, *, is_strict: bool = True) -> str:
        """A length and so many bytes of UTF-8; where that is not strict, what is none becomes U+FFFD."""
        length = int(self._scalar("<Q"))
        if length > max_bytes:
            raise self._error(f"{having} of {length:,} bytes; at most {max_bytes:,} are read")
        start = self._advance(length)
        try:
            return self._data[start : self._pos].decode("utf-8", "strict" if is_strict else "replace")
        except UnicodeDecodeError as e:
            raise self._error(f"{having} that is not UTF-8") from e

    def _scalar(self, form: str) -> Any:
        start = self._advance(struct.calcsize(form))
        return struct.unpack_from(form, self._data, start)[0]

    def _advance(self, length: int) -> int:
        """Move past `length` bytes; returns where they start."""
        start = self._pos
        if start + length > self._size:
            raise self._truncated(start + length, " or more")
        if start + length > MAX_HEADER_BYTES:
            raise self._error(f"has a header of more than {MAX_HEADER_BYTES:,} bytes")
        self._pos = start + length
        return start

    def _truncated(self, expected: int, detail: str) -> ModelInvalid:
        return self._error(f"is truncated: {expected:,} bytes expected{detail}, {self._size:,} found: fetch it again")

    def _error(self, problem: str) -> ModelInvalid:
        return ModelInvalid(f"{self.path} {problem}")

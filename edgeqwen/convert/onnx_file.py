"""A foreign ONNX file, read without its weights: a graph of up to 2 GB has them inside, a larger one in files beside.

The file is a protocol buffer: fields of (number, type, length, bytes), nested. Everything is kept as it is but the raw
data of large initializers, of which only the place is noted; so memory is as large as what is left. Lengths are checked
against what holds them before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import onnx
from onnx import TensorProto

from edgeqwen.convert.files import DataFile
from edgeqwen.convert.store import EXTERNAL_FROM_BYTES
from edgeqwen.errors import ModelInvalid, ModelMissing

MODEL_GRAPH: Final = 7  # numbers of fields, from onnx.proto
GRAPH_INITIALIZER: Final = 5
TENSOR_RAW_DATA: Final = 9

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_HEADER: Final = 20  # two varints of 64 bits
MAX_REST: Final = 256 << 20
"""Bytes that a graph may have beside its initializers' data; a large model has a few million."""


@dataclass(frozen=True, slots=True)
class DataRange:
    """Bytes `[offset, offset + length)` of a file."""

    file: DataFile
    offset: int
    length: int


class OnnxFile:
    """`model` without the data of its large initializers, which `ranges` has by name. Close it after use."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelMissing` if it, or a file of weights beside it, is not there, else `ModelInvalid`."""
        self._files: dict[str, DataFile] = {"": DataFile(path)}
        try:
            self.ranges: dict[str, DataRange] = {}
            self.model = _parsed(self._files[""], self.ranges)
            self._add_external(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _add_external(self, path: Path) -> None:
        """Note the ranges of what lies in files beside. Constants of nodes lie there too where a graph is large; they
        are small, and are taken in.
        """
        for tensor in self.model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                self.ranges[tensor.name] = self._external(path, tensor)
        for tensor in _constants(self.model.graph):
            if tensor.data_location == TensorProto.EXTERNAL:
                place = self._external(path, tensor)
                tensor.raw_data = _content(place.file, place.offset, place.offset + place.length)
                tensor.data_location = TensorProto.DEFAULT
                del tensor.external_data[:]

    def _external(self, path: Path, tensor: onnx.TensorProto) -> DataRange:
        """Where the data of a tensor lies beside the graph."""
        place = {entry.key: entry.value for entry in tensor.external_data}
        file = self._beside(path, place.get("location", ""))
        try:
            offset = int(place.get("offset", 0))
            length = int(place.get("length", file.size - offset))
        except ValueError as error:
            raise ModelInvalid(f"{path}: '{tensor.name}' has no place in {file.path.name}: {error}") from error
        if not 0 <= offset <= offset + length <= file.size:
            raise ModelInvalid(
                f"{file.path}: '{tensor.name}' lies outside of the file, which has {file.size:,} bytes: it is cut "
                "short, or of another graph; copy the whole folder again"
            )
        return DataRange(file, offset, length)

    def _beside(self, path: Path, location: str) -> DataFile:
        if not location or Path(location).name != location:
            raise ModelInvalid(f"{path}: names {location!r} as its weights, which lies outside of the folder")
        if location not in self._files:
            try:
                self._files[location] = DataFile(path.with_name(location))
            except ModelMissing as error:
                raise ModelMissing(
                    f"{path}: its weights are in {location}, which is not in the folder; copy it there too"
                ) from error
        return self._files[location]


def _constants(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Tensors that are attributes of nodes, those of graphs inside of nodes too."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in [attribute.g, *attribute.graphs] if attribute.HasField("g") or attribute.graphs else ():
                yield from _constants(inner)


class _Field(NamedTuple):
    """A field of a message: where it begins, where its content does, and where it ends."""

    number: int
    kind: int
    head: int
    body: int
    end: int


def _parsed(file: DataFile, ranges: dict[str, DataRange]) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(_join(_model_parts(file, ranges)))
    except Exception as error:  # protobuf's DecodeError
        raise _broken(file) from error
    if not model.graph.node:
        raise ModelInvalid(f"{file.path}: not an ONNX graph: it has no nodes")
    return model


def _model_parts(file: DataFile, ranges: dict[str, DataRange]) -> Iterator[bytes]:
    for field in _fields(file, 0, file.size):
        if (field.number, field.kind) != (MODEL_GRAPH, BYTES):
            yield _content(file, field.head, field.end)
        else:
            graph = _join(_graph_parts(file, field, ranges))
            yield _header(MODEL_GRAPH, len(graph)) + graph


def _graph_parts(file: DataFile, graph: _Field, ranges: dict[str, DataRange]) -> Iterator[bytes]:
    for field in _fields(file, graph.body, graph.end):
        is_large = field.end - field.body >= EXTERNAL_FROM_BYTES
        if (field.number, field.kind) != (GRAPH_INITIALIZER, BYTES) or not is_large:
            yield _content(file, field.head, field.end)
        else:
            tensor = _join(_tensor_parts(file, field, ranges))
            yield _header(GRAPH_INITIALIZER, len(tensor)) + tensor


def _tensor_parts(file: DataFile, tensor: _Field, ranges: dict[str, DataRange]) -> Iterator[bytes]:
    kept: list[bytes] = []
    data: DataRange | None = None
    for field in _fields(file, tensor.body, tensor.end):
        if field.number == TENSOR_RAW_DATA and field.kind == BYTES:
            data = DataRange(file, field.body, field.end - field.body)
        else:
            kept.append(_content(file, field.head, field.end))
    if data is not None:
        ranges[TensorProto.FromString(_join(kept)).name] = data
    yield from kept


def _fields(file: DataFile, start: int, stop: int) -> Iterator[_Field]:
    """Fields of the message in `[start, stop)`; raises `ModelInvalid` for what is none."""
    while start < stop:
        header = file.read(start, min(MAX_HEADER, stop - start)).tobytes()
        tag, used = _varint(file, header, 0)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            body = start + used
            end = start + _varint(file, header, used)[1]
        elif kind == BYTES:
            length, used = _varint(file, header, used)
            body = start + used
            end = body + length
        elif kind in {FIXED32, FIXED64}:
            body = start + used
            end = body + (4 if kind == FIXED32 else 8)
        else:
            raise _broken(file)
        if end > stop or number == 0:
            raise _broken(file)
        yield _Field(number, kind, start, body, end)
        start = end


def _varint(file: DataFile, data: bytes, start: int) -> tuple[int, int]:
    """A number in groups of seven bits from `start` on, and where it ends."""
    value = 0
    for index, byte in enumerate(data[start : start + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, start + index + 1
    raise _broken(file)


def _header(number: int, length: int) -> bytes:
    """What stands before `length` bytes of a field."""
    return _encoded(number << 3 | BYTES) + _encoded(length)


def _encoded(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _content(file: DataFile, start: int, stop: int) -> bytes:
    if stop - start > MAX_REST:
        raise ModelInvalid(
            f"{file.path}: {stop - start:,} bytes in one part of the graph; at most {MAX_REST:,} are read"
        )
    return file.read(start, stop - start).tobytes()


def _join(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)


def _broken(file: DataFile) -> ModelInvalid:
    return ModelInvalid(f"{file.path}: not an ONNX graph, or cut short ({file.size:,} bytes): export or copy it again")

"""A package remade for another kind of processor: the same numbers, in the form whose kernels are right and fast there.

Signed 8-bit weights and unsigned ones around 128 differ in the highest bit of every byte, and in whether the product is
told a zero point. So nothing is rounded again: the weights file is copied with that bit turned over where the graphs'
row products read, and the graphs are rewritten to match. What is in blocks is the same for every processor.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from edgeqwen import __version__
from edgeqwen.convert.importer import WEIGHT_FORMS, Target, default_kv_types
from edgeqwen.convert.kernel_graph import ROW_PRODUCTS, write_kernel_check
from edgeqwen.convert.manifest import Files, describe_files, write_manifest
from edgeqwen.convert.staging import publish, staging
from edgeqwen.convert.store import external_range
from edgeqwen.core.kernel import KERNEL_CHECK
from edgeqwen.core.model import Manifest, WeightForm
from edgeqwen.core.package import MANIFEST, WEIGHTS, Package, named_digest, open_package, verify_digests
from edgeqwen.errors import ModelInvalid

PIECE_BYTES: Final = 1 << 22
HIGHEST_BIT: Final = 0x80
ELEMENTS: Final = {"signed": TensorProto.INT8, "unsigned": TensorProto.UINT8}
ZERO_POINT_INPUT: Final = {"MatMulIntegerToFloat": 5, "MatMulInteger": 3}
ZERO_POINT: Final = "weight_zero_point"

Ranges = set[tuple[int, int]]
"""(offset, length) of tensors in the weights file."""


def retarget_package(
    path: Path, out: Path, *, target: Target, name: str = "", progress: Callable[[float], None] = lambda _: None
) -> Manifest:
    """Write the package at `path` to the folder `out` (which may be the same), made for `target`.

    `name` empty keeps the model's. `progress` is called with 0 to 1. Raises `ModelMissing`, `ModelInvalid` or
    `CannotWrite`; nothing is left in `out` then that was not there before.
    """
    package = open_package(path)
    if package.manifest.graph != "own":
        raise ModelInvalid(
            f"{path}: holds a graph exported by {package.manifest.graph}, which cannot be remade for other processors; "
            "import the checkpoint it was exported from"
        )
    verify_digests(package, with_weights=False)
    form = WEIGHT_FORMS[target]
    with staging(out) as folder:
        turned = _write_graphs(package, folder, form)
        digest = _write_weights(package, folder, turned, progress)
        for file in package.manifest.sizes:
            if not (folder / file).exists() and file != KERNEL_CHECK:
                shutil.copyfile(path / file, folder / file)
        write_kernel_check(folder)
        files = describe_files(folder, known={WEIGHTS: digest})
        manifest = _manifest(package.manifest, files, target=target, name=name)
        write_manifest(folder, manifest)
        open_package(folder)
        publish(folder, out)
    progress(1.0)
    return manifest


def _write_graphs(package: Package, folder: Path, form: WeightForm) -> Ranges:
    """Rewrite every graph; returns what is to be turned over in the weights file."""
    models = {
        file: onnx.load(str(package.path / file), load_external_data=False)
        for file in package.manifest.sizes
        if file.endswith(".onnx") and file != KERNEL_CHECK
    }
    turned: Ranges = set()
    for model in models.values():
        turned |= turn_weights(model.graph, form)
    for file, model in models.items():
        _check_sharing(package.path / file, model.graph, turned, form)
        onnx.save(model, str(folder / file))
    return turned


def turn_weights(graph: onnx.GraphProto, form: WeightForm) -> Ranges:
    """Bring the weights of the graph's row products into `form`; returns the ranges of those in the weights file.

    Small weights, which stand in the graph, are turned over here.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    turned: Ranges = set()
    names: set[str] = set()
    for node in graph.node:
        weights = constants.get(node.input[1]) if node.op_type in ROW_PRODUCTS else None
        if weights is None or (weights.data_type == ELEMENTS[form] and weights.name not in names):
            continue
        if weights.name not in names:
            names.add(weights.name)
            turned |= _turn_tensor(weights, form)
        _set_zero_point(node, constants, form)
    if names and form == "unsigned" and ZERO_POINT not in constants:
        graph.initializer.append(numpy_helper.from_array(np.array(128, np.uint8), ZERO_POINT))
    _check_users(graph, names)
    return turned


def _turn_tensor(tensor: onnx.TensorProto, form: WeightForm) -> Ranges:
    place = external_range(tensor)
    if place is not None:
        tensor.data_type = ELEMENTS[form]
        return {place}
    codes = numpy_helper.to_array(tensor).view(np.uint8) ^ np.uint8(HIGHEST_BIT)
    tensor.CopyFrom(numpy_helper.from_array(codes if form == "unsigned" else codes.view(np.int8), tensor.name))
    return set()


def _set_zero_point(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto], form: WeightForm) -> None:
    """Name 128 as the weights' zero point, or no longer; another zero point than 128 has no signed counterpart here."""
    index = ZERO_POINT_INPUT[node.op_type]
    inputs = list(node.input) + [""] * (index + 1 - len(node.input))
    if form == "signed":
        given = constants.get(inputs[index])
        if given is None or not (numpy_helper.to_array(given) == HIGHEST_BIT).all():
            raise ModelInvalid(f"product {node.name}: its weights are not around 128; import the checkpoint again")
    inputs[index] = ZERO_POINT if form == "unsigned" else ""
    while not inputs[-1]:
        inputs.pop()
    node.ClearField("input")
    node.input.extend(inputs)


def _check_users(graph: onnx.GraphProto, names: set[str]) -> None:
    """Whoever else reads the turned weights would be wrong without notice."""
    for node in graph.node:
        for index, used in enumerate(node.input):
            if used in names and (index != 1 or node.op_type not in ROW_PRODUCTS):
                message = f"tensor {used}: {node.op_type} reads it too, so it cannot be remade; import the checkpoint"
                raise ModelInvalid(message)


def _check_sharing(path: Path, graph: onnx.GraphProto, turned: Ranges, form: WeightForm) -> None:
    """Every tensor of a graph that lies in a turned range must be one of the new form."""
    offsets = {offset for offset, _ in turned}
    for tensor in graph.initializer:
        place = external_range(tensor)
        if place is not None and place[0] in offsets and tensor.data_type != ELEMENTS[form]:
            raise ModelInvalid(f"{path}: {tensor.name} shares weights that would change; import the checkpoint again")


def _write_weights(package: Package, folder: Path, turned: Ranges, progress: Callable[[float], None]) -> str:
    """Copy the weights file, `turned` ranges changed; returns its digest. The source's digest is checked on the way."""
    before, after = hashlib.sha256(), hashlib.sha256()
    size, done = package.manifest.sizes[WEIGHTS], 0
    with (package.path / WEIGHTS).open("rb") as source, (folder / WEIGHTS).open("wb") as sink:
        for length, is_turned in _pieces(size, turned):
            piece = source.read(length)
            before.update(piece)
            if is_turned:
                piece = (np.frombuffer(piece, np.uint8) ^ np.uint8(HIGHEST_BIT)).tobytes()
            after.update(piece)
            sink.write(piece)
            done += length
            progress(0.99 * done / size)
    if named_digest(before) != package.manifest.digests[WEIGHTS]:
        raise ModelInvalid(f"{package.path / WEIGHTS}: content differs from what {MANIFEST} states; import it again")
    return named_digest(after)


def _pieces(size: int, turned: Ranges) -> Iterator[tuple[int, bool]]:
    """Lengths that cover a file of `size` bytes in order, and whether each lies in a turned range."""
    position = 0
    for offset, length in [*sorted(turned), (size, 0)]:
        for start, stop, is_turned in ((position, offset, False), (offset, offset + length, True)):
            for at in range(start, stop, PIECE_BYTES):
                yield min(PIECE_BYTES, stop - at), is_turned
        position = offset + length


def _manifest(old: Manifest, files: Files, *, target: Target, name: str) -> Manifest:
    form = WEIGHT_FORMS[target]
    return msgspec.structs.replace(
        old,
        name=name or old.name,
        target=target,
        weight_form=form,
        builder_version=__version__,
        sizes=files.sizes,
        digests=files.digests,
        kv_types=default_kv_types(old.quant, form) if len(old.kv_types) > 1 else old.kv_types,
    )

"""What a graph must take and give to be a decoder with past in optimum's layout, and what one is that does not.

Whatever is lacking is named, with the file, and with how to export so that it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import onnx
from onnx import TensorProto

from edgeqwen.convert.files import Fields
from edgeqwen.core.model import KV_KINDS, KVType, Quant
from edgeqwen.errors import ModelInvalid

HOW: Final = "export it again with `optimum-cli export onnx --task text-generation-with-past -m MODEL FOLDER`"
TAKEN: Final = frozenset({"input_ids", "attention_mask", "position_ids"})
ROUNDING: Final = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul"})
CACHE_TYPES: Final[dict[int, KVType]] = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16"}
BLOCK_QUANTS: Final[dict[int, Quant]] = {4: "int4", 8: "int8"}

Values: TypeAlias = Mapping[str, onnx.ValueInfoProto]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the graph says of itself. `num_kv_heads` and `head_dim` are 0 if it leaves them open."""

    quant: Quant
    kv_type: KVType
    num_kv_heads: int
    head_dim: int
    multiplies_integers: bool


def read_layout(path: Path, model: onnx.ModelProto, config: Fields) -> Layout:
    """Raises `ModelInvalid` if the graph of `path` is no decoder with past of the model that `config` describes."""
    inputs = {value.name: value for value in model.graph.input}
    outputs = {value.name: value for value in model.graph.output}
    constants = {tensor.name for tensor in model.graph.initializer}  # old versions list them as inputs too
    _check_kind(path, {name: value for name, value in inputs.items() if name not in constants}, outputs)
    num_layers = config.integer("num_hidden_layers")
    _check_past(path, inputs, outputs, num_layers)
    past = inputs["past_key_values.0.key"]
    kv_type = CACHE_TYPES.get(_element(past))
    if kv_type is None:
        name = TensorProto.DataType.Name(_element(past))
        raise ModelInvalid(
            f"{path}: its cache is of type {name}; there are FLOAT and FLOAT16: export with --dtype fp32"
        )
    _check_logits(path, outputs["logits"], config.integer("vocab_size"))
    dims = [_fixed(past, axis) for axis in range(4)]
    if dims[0] or dims[2]:
        raise ModelInvalid(f"{path}: its axes are fixed, the cache is {dims}; export it without --no-dynamic-axes")
    operators = {node.op_type for node in model.graph.node}
    return Layout(_quant(path, model), kv_type, dims[1], dims[3], bool(operators & ROUNDING))


def check_against(path: Path, layout: Layout, config: Fields) -> None:
    """Raises `ModelInvalid` if the graph's cache is not that of the configuration."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", max(1, config.integer("hidden_size") // num_heads))
    for name, found, expected in (
        ("key heads", layout.num_kv_heads, num_kv_heads),
        ("numbers in each", layout.head_dim, head_dim),
    ):
        if found not in {0, expected}:
            raise ModelInvalid(
                f"{path}: the graph's cache has {found} {name}, {config.path} says {expected}: they belong to "
                "different models"
            )


def _check_kind(path: Path, inputs: Values, outputs: Values) -> None:
    """Tell what the graph is, if it is something else."""
    if "use_cache_branch" in inputs:
        raise ModelInvalid(
            f"{path}: a merged decoder of an old exporter (it takes use_cache_branch), of which only half would be "
            f"used; {HOW}, with optimum 1.14 or later"
        )
    if any(name.startswith(("encoder_", "decoder_input")) for name in inputs) or "last_hidden_state" in outputs:
        raise ModelInvalid(
            f"{path}: the graph of an encoder, or of a decoder that needs one; only models of decoders alone are run"
        )
    for name, values in (("input_ids", inputs), ("attention_mask", inputs), ("logits", outputs)):
        if name not in values:
            raise ModelInvalid(f"{path}: the graph has no {name}, so it is not one for text generation; {HOW}")
    if not any(name.startswith("past_key_values.") for name in inputs):
        raise ModelInvalid(
            f"{path}: the graph keeps nothing of the tokens before (no past_key_values): every token would compute "
            f"the whole text again; {HOW}"
        )
    others = [name for name in inputs if name not in TAKEN and not name.startswith("past_key_values.")]
    if others:
        raise ModelInvalid(f"{path}: the graph takes '{others[0]}', of which nothing is known; {HOW}")
    for name in TAKEN & inputs.keys():
        if _element(inputs[name]) != TensorProto.INT64:
            kind = TensorProto.DataType.Name(_element(inputs[name]))
            raise ModelInvalid(f"{path}: the graph takes {name} of type {kind}, not INT64; {HOW}")


def _check_past(path: Path, inputs: Values, outputs: Values, num_layers: int) -> None:
    """Every layer has key and value, and no more layers are there than the configuration says."""
    for place, values in (("past_key_values", inputs), ("present", outputs)):
        expected = [f"{place}.{layer}.{kind}" for layer in range(num_layers) for kind in KV_KINDS]
        lacking = [name for name in expected if name not in values]
        if lacking:
            raise ModelInvalid(
                f"{path}: the graph has no '{lacking[0]}', but config.json says {num_layers} layers: it belongs to "
                f"another model, or keeps its cache otherwise; {HOW}"
            )
        more = [name for name in values if name.startswith(f"{place}.") and name not in expected]
        if more:
            raise ModelInvalid(
                f"{path}: the graph has '{more[0]}', but config.json says {num_layers} layers: they belong to "
                "different models"
            )
        first = values[expected[0]]
        odd = [name for name in expected if _signature(values[name]) != _signature(first)]
        if odd or len(first.type.tensor_type.shape.dim) != 4:
            raise ModelInvalid(
                f"{path}: '{(odd or expected)[0]}' is not [batch, heads, tokens, size] like that of the others; {HOW}"
            )


def _check_logits(path: Path, logits: onnx.ValueInfoProto, vocab_size: int) -> None:
    found = _fixed(logits, 2)
    if found not in {0, vocab_size}:
        raise ModelInvalid(
            f"{path}: the graph gives logits of {found:,} tokens, config.json says {vocab_size:,}: they belong to "
            "different models"
        )
    if _element(logits) not in CACHE_TYPES:
        name = TensorProto.DataType.Name(_element(logits))
        raise ModelInvalid(
            f"{path}: its logits are of type {name}; there are FLOAT and FLOAT16: export with --dtype fp32"
        )


def _quant(path: Path, model: onnx.ModelProto) -> Quant:
    """The form of the weights: that of the products, else the type that most of the weights have."""
    bits = {
        attribute.i
        for node in model.graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    if bits:
        quant = BLOCK_QUANTS.get(min(bits))
        if quant is None:
            raise ModelInvalid(f"{path}: its weights have {min(bits)} bits; there are 4 and 8")
        return quant
    if any(node.op_type in ROUNDING for node in model.graph.node):
        return "int8"
    sizes: dict[int, int] = {}
    for tensor in model.graph.initializer:
        sizes[tensor.data_type] = sizes.get(tensor.data_type, 0) + _num_elements(tensor.dims)
    most = max(sizes, key=lambda kind: sizes[kind], default=TensorProto.FLOAT)
    if most == TensorProto.BFLOAT16:
        raise ModelInvalid(
            f"{path}: its weights are of type BFLOAT16, for which onnxruntime has no kernels on a CPU: "
            "export with --dtype fp32"
        )
    return (
        "fp16" if most == TensorProto.FLOAT16 else "int8" if most in {TensorProto.INT8, TensorProto.UINT8} else "fp32"
    )


def _num_elements(dims: Iterable[int]) -> int:
    count = 1
    for size in dims:
        count *= size
    return count


def _element(value: onnx.ValueInfoProto) -> int:
    return int(value.type.tensor_type.elem_type)


def _fixed(value: onnx.ValueInfoProto, axis: int) -> int:
    """Size of an axis; 0 if it is open."""
    dims = value.type.tensor_type.shape.dim
    return int(dims[axis].dim_value) if axis < len(dims) else 0


def _signature(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    dims = value.type.tensor_type.shape.dim
    return (_element(value), len(dims), *(int(dim.dim_value) for dim in dims))

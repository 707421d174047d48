"""What `auto` means: the quantisation and the type of cache that suit the memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edgeqwen.core.model import KVType, Manifest, ModelSpec, Quant
from edgeqwen.core.package import WEIGHTS

BITS_PER_WEIGHT: Final[dict[Quant, float]] = {"fp32": 32, "fp16": 32, "int8": 8.1, "int4": 5.0, "hybrid": 13.1}
"""Of the layers, scales included, as the kernels keep them in memory: onnxruntime widens fp16."""
OUTPUT_BITS_PER_WEIGHT: Final = 5.5  # of the output matrix in any but fp32; the embedding's pages come and go
RUNTIME_BYTES: Final = 200 << 20  # libraries, activations, tokenizer
KV_BYTES: Final[dict[KVType, int]] = {"fp32": 4, "int8": 1, "bf16": 2, "fp16": 2}
SHARE: Final = 0.5


def weights_bytes(spec: ModelSpec, quant: Quant) -> int:
    """About how much memory the weights of a model take once they are loaded."""
    matrix = spec.vocab_size * spec.hidden_size
    output_bits = BITS_PER_WEIGHT[quant] if quant in {"fp32", "fp16"} else OUTPUT_BITS_PER_WEIGHT
    return int(spec.num_layer_weights * BITS_PER_WEIGHT[quant] + matrix * output_bits) // 8


def loaded_bytes(manifest: Manifest) -> int:
    """The same of a package: what another tool has exported may hold matrices twice, and onnxruntime widens fp16."""
    if manifest.graph == "own":
        return weights_bytes(manifest.spec, manifest.quant)
    return manifest.sizes[WEIGHTS] * (2 if manifest.quant == "fp16" else 1)


def kv_bytes(spec: ModelSpec, kv_type: KVType, num_tokens: int) -> int:
    """Memory that the cache of some tokens takes."""
    return spec.kv_floats_per_token * KV_BYTES[kv_type] * num_tokens


def choose_quant(spec: ModelSpec, *, free_bytes: int) -> tuple[Quant, str]:
    """`hybrid` if both its sets of weights fit in half of the free memory, else `int8` if that does, else `int4`.

    `free_bytes` 0 means that nobody knows; then it is `int8`.
    """
    if free_bytes <= 0:
        return "int8", "how much memory is free is not known"
    share = int(free_bytes * SHARE) - RUNTIME_BYTES
    order: tuple[Quant, ...] = ("hybrid", "int8")
    for quant in order:
        needed = weights_bytes(spec, quant)
        if needed <= share:
            return quant, f"its weights, {_mb(needed)}, fit in half of the {_mb(free_bytes)} that are free"
    return "int4", f"int8 takes {_mb(weights_bytes(spec, 'int8'))}, more than half of the {_mb(free_bytes)} free"


def choose_kv_type(
    spec: ModelSpec, kv_types: Sequence[KVType], *, num_tokens: int, free_bytes: int
) -> tuple[KVType, str]:
    """The package's default (the first of `kv_types`, by measured speed), unless a cache of `num_tokens` in it does not
    fit in half of the memory that is free (the model itself not counted) and one of int8 is to be had.
    """
    first = kv_types[0]
    needed = kv_bytes(spec, first, num_tokens)
    if first == "fp32" and "int8" in kv_types and 0 < free_bytes * SHARE < needed:
        return "int8", f"{num_tokens} tokens in fp32 would take {_mb(needed)} of the {_mb(free_bytes)} that are free"
    return first, "the faster one for this package"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"

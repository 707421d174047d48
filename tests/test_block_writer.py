"""Matrices in blocks: what multiplies one input is stored and multiplied as one matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgeqwen.convert.block_writer import BlockWriter, StoredBlocks
from edgeqwen.convert.quantize import BlockWeights, pack_nibbles, quantize_blocks
from edgeqwen.convert.store import TensorStore
from edgeqwen.core.package import GRAPH
from tests.models import tiny_package

PREFIX = "model.layers.0."
Q, K, V = (f"{PREFIX}self_attn.{which}_proj.weight" for which in "qkv")
DOWN = f"{PREFIX}mlp.down_proj.weight"


def blocks(rows: int, *, seed: int, size: int = 16) -> BlockWeights:
    values = np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)
    return quantize_blocks(values, bits=4, block_size=size)


def read(store: TensorStore, name: str, folder: Path) -> np.ndarray:
    return numpy_helper.to_array(store[name], base_dir=str(folder))


def test_q_k_and_v_are_one_matrix_whatever_order_they_come_in(tmp_path: Path) -> None:
    stored: dict[str, StoredBlocks] = {}
    parts = {V: blocks(8, seed=1), Q: blocks(24, seed=2), K: blocks(8, seed=3)}
    with TensorStore(tmp_path) as store:
        writer = BlockWriter(store, stored)
        for tensor, weights in parts.items():
            assert not stored
            writer.add(tensor, [weights], 4)
    assert stored[Q] == stored[K] == stored[V]
    assert stored[Q].parts == ((Q, 24), (K, 8), (V, 8))
    codes = np.concatenate([pack_nibbles(parts[name].codes) for name in (Q, K, V)]).reshape(40, 4, 8)
    scales = np.concatenate([parts[name].scales for name in (Q, K, V)])
    assert np.array_equal(read(store, stored[Q].codes, tmp_path), codes)
    assert np.array_equal(read(store, stored[Q].scales, tmp_path), scales)


def test_matrices_whose_blocks_differ_stay_apart(tmp_path: Path) -> None:
    stored: dict[str, StoredBlocks] = {}
    with TensorStore(tmp_path) as store:
        writer = BlockWriter(store, stored)
        for tensor, size in ((Q, 16), (K, 16), (V, 32)):
            writer.add(tensor, [blocks(8, seed=size, size=size)], 4)
    assert [stored[name].block_size for name in (Q, K, V)] == [16, 16, 32]
    assert len({stored[name].codes for name in (Q, K, V)}) == 3
    assert not stored[Q].parts


def test_each_of_differing_matrices_keeps_its_own_bits(tmp_path: Path) -> None:
    stored: dict[str, StoredBlocks] = {}
    wide = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    with TensorStore(tmp_path) as store:
        writer = BlockWriter(store, stored)
        writer.add(V, [quantize_blocks(wide, bits=8, block_size=16)], 8)
        for tensor in (Q, K):
            writer.add(tensor, [blocks(4, seed=2), blocks(4, seed=3)], 4)
    assert [(stored[name].bits, stored[name].rows) for name in (Q, K, V)] == [(4, 8), (4, 8), (8, 8)]


def test_a_layer_with_an_input_of_its_own_stands_alone(tmp_path: Path) -> None:
    stored: dict[str, StoredBlocks] = {}
    with TensorStore(tmp_path) as store:
        BlockWriter(store, stored).add(DOWN, [blocks(8, seed=1)], 4)
    assert not stored[DOWN].parts
    assert stored[DOWN].rows == 8


def test_a_decode_graph_has_four_products_a_layer() -> None:
    package = tiny_package("qwen3", "int4")
    graph = onnx.load(str(package / GRAPH), load_external_data=False).graph
    num_layers = sum(tensor.name.endswith("input_layernorm.weight") for tensor in graph.initializer)
    num_products = sum(node.op_type == "MatMulNBits" for node in graph.node)
    assert num_products == 4 * num_layers + 1  # and the output matrix

"""A rotated checkpoint is the same function, spread out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeqwen.convert.checkpoint import Checkpoint, Float32Array, expected_tensors
from edgeqwen.convert.forward import embed
from edgeqwen.convert.rotation import RotatedCheckpoint, orthogonal
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import Family
from edgeqwen.core.tensor_names import EMBEDDING, HIDDEN_TURN, OUTPUT, OUTPUT_TURN
from tests.checkpoints import write_safetensors_model
from tests.test_forward import run_layers


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 200), seed=st.integers(0, 1000))
def test_the_matrix_is_orthogonal_and_spreads_a_single_channel_over_all(size: int, seed: int) -> None:
    matrix = orthogonal(size, np.random.default_rng(seed)).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)
    assert np.abs(matrix).max() <= np.sqrt(2 / size) + 1e-6


def logits(checkpoint: Checkpoint, windows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Float32Array:
    output = EMBEDDING if checkpoint.spec.tie_embeddings else OUTPUT
    final = run_layers(checkpoint, windows)
    if OUTPUT_TURN in checkpoint.tensors:
        final = final @ checkpoint.read(OUTPUT_TURN).T
    return np.asarray(final @ checkpoint.read(output).T)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_logits_stay_the_same(tmp_path: Path, family: Family, *, tie: bool) -> None:
    write_safetensors_model(tmp_path, family=family, tie=tie)
    plain = open_checkpoint(tmp_path)
    rotated = RotatedCheckpoint(plain)
    windows = np.random.default_rng(8).integers(0, plain.spec.num_tokens, (2, 16))
    expected = logits(plain, windows)
    assert np.abs(logits(rotated, windows) - expected).max() < 1e-3 * expected.std()
    assert rotated.spec == plain.spec
    shapes = {name: info.shape for name, info in rotated.tensors.items()}
    assert (shapes.pop(OUTPUT_TURN, None) is not None) == tie
    assert shapes.pop(HIDDEN_TURN) == (rotated.spec.hidden_size,) * 2
    assert shapes == expected_tensors(rotated.spec)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_some_rows_are_the_same_as_cut_from_all(tmp_path: Path, family: Family) -> None:
    write_safetensors_model(tmp_path, family=family, tie=True)
    rotated = RotatedCheckpoint(open_checkpoint(tmp_path))
    for name in rotated.tensors:
        whole = rotated.read(name)
        assert whole.dtype == np.float32
        np.testing.assert_allclose(rotated.read(name, 1, 5), whole[1:5], rtol=1e-5, atol=1e-6, err_msg=name)
        assert rotated.read_blocks(name) is None


def test_an_outlier_channel_of_the_residual_stream_is_spread(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, family="llama", tie=True)
    plain = open_checkpoint(tmp_path)

    class WithOutlier:
        """The checkpoint with one channel of the embedding a hundred times larger."""

        spec, tensors = plain.spec, plain.tensors

        def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32Array:
            values = plain.read(name, start, stop)
            if name == EMBEDDING:
                values[:, 3] *= 100
            return values

    windows = np.arange(20).reshape(2, 10)
    before = embed(WithOutlier(), windows)  # type: ignore[arg-type]  # no more of a checkpoint is looked at
    after = embed(RotatedCheckpoint(WithOutlier()), windows)  # type: ignore[arg-type]  # no more of a checkpoint is looked at
    np.testing.assert_allclose(np.square(after).sum(1), np.square(before).sum(1), rtol=1e-4)
    assert np.abs(after).max() < 0.5 * np.abs(before).max()


def test_the_same_seed_gives_the_same_tensors(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, family="qwen3", tie=True)
    first, second = (RotatedCheckpoint(open_checkpoint(tmp_path), seed=3) for _ in range(2))
    for name in first.tensors:
        np.testing.assert_array_equal(first.read(name), second.read(name))
    other = RotatedCheckpoint(open_checkpoint(tmp_path), seed=4)
    assert not np.array_equal(first.read(EMBEDDING), other.read(EMBEDDING))

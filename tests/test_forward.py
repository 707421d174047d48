"""The decoder layer in numpy that calibration runs, against the graph that is shipped."""

from __future__ import annotations

import numpy as np
import pytest

from edgeqwen.convert.checkpoint import Checkpoint, Float32Array
from edgeqwen.convert.forward import Attended, LayerForward, Workers, embed, rms_norm
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import Family
from edgeqwen.core.tensor_names import FINAL_NORM, STEP_TENSORS, StepName, layer_prefix
from tests.models import all_logits, scratch, tiny_package, tiny_runtime

WINDOW = 24


def forward_checkpoint(family: Family) -> Checkpoint:
    """The checkpoint that `tiny_package(family)` was imported from."""
    tiny_package(family)
    return open_checkpoint(scratch() / f"{family}-fp32-True-any-source")


def run_layers(
    checkpoint: Checkpoint, windows: np.ndarray[tuple[int, int], np.dtype[np.int64]], *, num_threads: int = 2
) -> Float32Array:
    """Normed output of the last layer, `[tokens, hidden]`."""
    x = embed(checkpoint, windows)
    with Workers(num_threads, windows.shape[1]) as workers:
        for layer in range(checkpoint.spec.num_layers):
            prefix = layer_prefix(layer)

            def multiply(
                step: StepName, activations: Float32Array, _: Float32Array | None, prefix: str = prefix
            ) -> Float32Array:
                weights = np.concatenate([checkpoint.read(prefix + tensor) for tensor in STEP_TENSORS[step]])
                return np.asarray(activations @ weights.T)

            x = LayerForward(checkpoint, layer, workers).run(x, multiply)
    return rms_norm(x, checkpoint.read(FINAL_NORM), checkpoint.spec.rms_norm_eps)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_layer_by_layer_gives_the_logits_of_the_float_package(family: Family) -> None:
    checkpoint = forward_checkpoint(family)
    rng = np.random.default_rng(5)
    windows = rng.integers(0, checkpoint.spec.num_tokens, (2, WINDOW))
    hidden = run_layers(checkpoint, windows)
    logits = hidden @ checkpoint.read("model.embed_tokens.weight").T
    runtime = tiny_runtime(tiny_package(family))
    expected = np.concatenate([all_logits(runtime, window.tolist(), chunk=WINDOW) for window in windows])
    runtime.close()
    assert np.abs(logits - expected).max() < 1e-3 * expected.std()


def test_a_window_does_not_see_its_neighbours() -> None:
    checkpoint = forward_checkpoint("qwen3")
    rng = np.random.default_rng(6)
    windows = rng.integers(0, checkpoint.spec.num_tokens, (3, WINDOW))
    together = run_layers(checkpoint, windows).reshape(3, WINDOW, -1)
    alone = run_layers(checkpoint, windows[1:2])
    np.testing.assert_allclose(together[1], alone, rtol=1e-4, atol=1e-5)


def test_the_number_of_threads_changes_nothing() -> None:
    checkpoint = forward_checkpoint("qwen3")
    windows = np.random.default_rng(7).integers(0, checkpoint.spec.num_tokens, (3, WINDOW))
    one, many = (run_layers(checkpoint, windows, num_threads=count) for count in (1, 5))
    np.testing.assert_array_equal(one, many)


def test_attention_tells_how_much_each_token_is_looked_at() -> None:
    checkpoint = forward_checkpoint("llama")
    windows = np.random.default_rng(9).integers(0, checkpoint.spec.num_tokens, (2, WINDOW))
    seen: list[Attended] = []

    def multiply(step: StepName, activations: Float32Array, _: Float32Array | None) -> Float32Array:
        weights = np.concatenate([checkpoint.read(layer_prefix(0) + tensor) for tensor in STEP_TENSORS[step]])
        return np.asarray(activations @ weights.T)

    with Workers(1, WINDOW) as workers:
        LayerForward(checkpoint, 0, workers).run(embed(checkpoint, windows), multiply, on_attention=seen.append)
    (attended,) = seen
    shares = attended.shares.reshape(2, WINDOW)
    np.testing.assert_allclose(shares.sum(1), WINDOW, rtol=1e-5)  # each query has one share to give
    assert (shares[:, 0] > shares[:, -1]).all()  # the last token is seen by itself alone
    assert attended.keys.shape == (2 * WINDOW, checkpoint.spec.num_kv_heads, checkpoint.spec.head_dim)


def test_embedding_reads_each_run_of_ids_once() -> None:
    checkpoint = forward_checkpoint("llama")
    reads: list[tuple[int, int | None]] = []

    class Counting:
        spec = checkpoint.spec

        def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32Array:
            reads.append((start, stop))
            return checkpoint.read(name, start, stop)

    windows = np.array([[7, 3, 4, 5], [4, 9, 7, 3]])
    rows = embed(Counting(), windows)  # type: ignore[arg-type]  # no more of a checkpoint is looked at
    np.testing.assert_array_equal(rows, checkpoint.read("model.embed_tokens.weight")[windows.ravel()])
    assert reads == [(3, 6), (7, 8), (9, 10)]

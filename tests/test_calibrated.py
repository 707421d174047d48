"""Calibration end to end on tiny models: what comes out, in which order, how good, and the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeqwen.convert.activations import round_blocks, round_rows
from edgeqwen.convert.calibrated import LayerQuantizer
from edgeqwen.convert.calibration import Windows, calibration_windows
from edgeqwen.convert.checkpoint import Checkpoint, Float32Array
from edgeqwen.convert.forward import LayerForward, Workers, embed
from edgeqwen.convert.importer import import_model
from edgeqwen.convert.kv_scales import key_scales, round_cache, value_scales
from edgeqwen.convert.quantize import BlockWeights, Form, QuantizedTensor, RowWeights, quantize_blocks, quantize_rows
from edgeqwen.convert.recipe import Recipe, uniform_recipe
from edgeqwen.convert.rounding import restored
from edgeqwen.convert.smoothing import channel_scales
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import Family
from edgeqwen.core.package import GRAPH, open_package
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.core.tensor_names import EMBEDDING, STEP_TENSORS, StepName, layer_prefix
from edgeqwen.evaluate import built_in_texts
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from tests.checkpoints import write_safetensors_model

CALIBRATION = Path(__file__).parent.parent / "edgeqwen" / "data" / "calibration"


def checkpoint_in(folder: Path, family: Family = "qwen3") -> Checkpoint:
    write_safetensors_model(folder, family=family, tie=True)
    return open_checkpoint(folder)


def windows_of(checkpoint: Checkpoint, *, seed: int = 0, count: int = 12) -> Windows:
    """Random tokens: a random model does not mind."""
    return np.random.default_rng(seed).integers(0, checkpoint.spec.num_tokens, (count, 48))


def outputs(checkpoint: Checkpoint, windows: Windows, weights: dict[str, Float32Array], form: Form) -> Float32Array:
    """The last layer's output with some weights replaced, activations rounded as the form's kernel does."""
    x = embed(checkpoint, windows)
    workers = Workers(1, windows.shape[1])
    for layer in range(checkpoint.spec.num_layers):
        prefix = layer_prefix(layer)

        def multiply(
            step: StepName, activations: Float32Array, _: Float32Array | None, prefix: str = prefix
        ) -> Float32Array:
            names = [prefix + tensor for tensor in STEP_TENSORS[step]]
            if weights:
                activations = round_rows(activations) if form == "rows8" else round_blocks(activations, 16)
            return np.asarray(
                activations @ np.concatenate([weights.get(name, checkpoint.read(name)) for name in names]).T
            )

        x = LayerForward(checkpoint, layer, workers).run(x, multiply)
    return x


def nearest(matrix: Float32Array, form: Form) -> Float32Array:
    if form == "rows8":
        return restored(quantize_rows(matrix), form)
    return restored(quantize_blocks(matrix, bits=4 if form == "blocks4" else 8, block_size=16), form)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("form", ["rows8", "blocks4"])
def test_the_model_is_closer_to_itself_than_after_rounding_to_nearest(
    tmp_path: Path, family: Family, form: Form
) -> None:
    checkpoint = checkpoint_in(tmp_path, family)
    recipe = uniform_recipe(checkpoint, (form,), block_size=16)
    quantizer = LayerQuantizer(checkpoint, recipe, windows_of(checkpoint, count=24))
    calibrated = {each.tensor: restored(each.weights, form) for each in quantizer}
    unseen = windows_of(checkpoint, seed=1)
    exact = outputs(checkpoint, unseen, {}, form)
    error = np.square(outputs(checkpoint, unseen, calibrated, form) - exact).sum()
    plain = {name: nearest(checkpoint.read(name), form) for name in calibrated}
    assert error < 0.95 * np.square(outputs(checkpoint, unseen, plain, form) - exact).sum()


def test_every_tensor_comes_once_in_each_of_its_forms_layer_by_layer(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    recipe = uniform_recipe(checkpoint, ("rows8", "blocks4"), block_size=16)
    shares: list[float] = []
    results = list(LayerQuantizer(checkpoint, recipe, windows_of(checkpoint), progress=shares.append))
    expected = {(name, form) for name, forms in recipe.forms.items() for form in forms}
    assert len(results) == len(expected)
    assert {(each.tensor, each.form) for each in results} == expected
    layers = [int(each.tensor.split(".")[2]) for each in results]
    assert layers == sorted(layers)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    for each in results:
        assert each.weights.codes.shape == checkpoint.tensors[each.tensor].shape
        assert isinstance(each.weights, RowWeights if each.form == "rows8" else BlockWeights)


def test_a_recipe_may_mix_blocks_of_4_and_8_bits(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    forms: dict[str, tuple[Form, ...]] = dict(uniform_recipe(checkpoint, ("blocks4",)).forms)
    finer = [name for name in forms if "v_proj" in name]
    forms |= dict.fromkeys(finer, ("blocks8",))
    results = {each.tensor: each for each in LayerQuantizer(checkpoint, Recipe(forms, 16), windows_of(checkpoint))}
    for name, each in results.items():
        assert each.form == ("blocks8" if name in finer else "blocks4")
    matrix = checkpoint.read(finer[0])
    assert np.abs(restored(results[finer[0]].weights, "blocks8") - matrix).max() < 0.02 * np.abs(matrix).max()


def fingerprint(results: list[QuantizedTensor]) -> list[bytes]:
    return [each.weights.codes.tobytes() + each.weights.scales.tobytes() for each in results]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    recipe = uniform_recipe(checkpoint, ("rows8", "blocks4"), block_size=16)
    first, second = (LayerQuantizer(checkpoint, recipe, windows_of(checkpoint)) for _ in range(2))
    assert fingerprint(list(first)) == fingerprint(list(second))
    np.testing.assert_array_equal(first.kv_scales().key, second.kv_scales().key)


def test_the_output_matrix_is_rounded_for_what_reaches_it(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    quantizer = LayerQuantizer(
        checkpoint, uniform_recipe(checkpoint, ("blocks4",), block_size=16), windows_of(checkpoint)
    )
    for _ in quantizer:
        pass
    matrix = checkpoint.read(EMBEDDING)
    rounder = quantizer.output_rounder(16)
    rounded = rounder.round(matrix, "blocks4")
    assert rounded.codes.shape == matrix.shape
    assert rounder.loss(restored(rounded, "blocks4") - matrix) < 0.9 * rounder.loss(nearest(matrix, "blocks4") - matrix)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_cache_scales_fit_what_calibration_put_into_the_cache(tmp_path: Path, family: Family) -> None:
    checkpoint = checkpoint_in(tmp_path, family)
    spec = checkpoint.spec
    quantizer = LayerQuantizer(checkpoint, uniform_recipe(checkpoint, ("rows8",)), windows_of(checkpoint))
    for _ in quantizer:
        pass
    scales = quantizer.kv_scales()
    shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    assert scales.key.shape == scales.value.shape == shape
    assert scales.key.dtype == scales.value.dtype == np.float32
    np.testing.assert_array_equal(scales.key[..., : spec.head_dim // 2], scales.key[..., spec.head_dim // 2 :])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), heads=st.integers(1, 3), half=st.integers(1, 6))
def test_rounding_the_cache_errs_little_in_every_channel(seed: int, heads: int, half: int) -> None:
    rng = np.random.default_rng(seed)
    size = np.exp(rng.uniform(-5, 5, (heads, 2 * half)))
    cached = (rng.standard_normal((200, heads, 2 * half)) * size).astype(np.float32)
    error = round_cache(cached, value_scales(cached)) - cached
    assert (np.square(error).mean(0) < 5e-4 * np.square(cached).mean(0)).all()
    scales = key_scales(cached)
    np.testing.assert_array_equal(scales[:, :half], scales[:, half:])
    assert (
        np.abs(round_cache(cached, scales) - cached).max(0) <= 0.6 * np.abs(cached).max((0, 2), keepdims=True)
    ).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), silent=st.integers(0, 8))
def test_smoothing_makes_channels_more_even_and_keeps_their_geometric_mean(seed: int, silent: int) -> None:
    rng = np.random.default_rng(seed)
    inner = (rng.standard_normal((50, 16)) * np.exp(rng.uniform(-3, 3, 16))).astype(np.float32)
    inner[:, :silent] = 0
    divisors = channel_scales(inner)
    assert np.isfinite(divisors).all()
    assert abs(np.log(divisors).mean()) < 1e-3
    loud = np.square(inner[:, silent:]).mean(0)
    evened = np.square(inner[:, silent:] / divisors[silent:]).mean(0)
    assert evened.max() / evened.min() <= loud.max() / loud.min() + 1e-3


def test_activations_are_rounded_with_a_scale_for_each_row_or_block() -> None:
    x = np.array([[1.0, 0.3, 100.0, 0.5], [0.0, 0.0, 0.0, 0.0]], np.float32)
    step = 100 / 127
    np.testing.assert_allclose(round_rows(x)[0], np.array([step, 0, 100, step]), rtol=1e-5)
    np.testing.assert_allclose(round_blocks(x, 2)[0], np.array([1, 38 / 127, 100, step]), rtol=1e-5)
    assert not round_rows(x)[1].any()


def test_calibration_text_fills_windows_of_known_tokens(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    windows = calibration_windows(checkpoint, window_len=64, most_windows=10)
    assert windows.shape == (10, 64)
    assert windows.min() >= 0
    assert windows.max() < checkpoint.spec.num_tokens
    np.testing.assert_array_equal(windows, calibration_windows(checkpoint, window_len=64, most_windows=10))


def test_calibration_text_is_none_of_what_quality_is_measured_on() -> None:
    def passages(text: str, length: int = 30) -> set[str]:
        plain = "".join(text.split())
        return {plain[start : start + length] for start in range(len(plain) - length)}

    measured = set().union(*(passages(text) for text in built_in_texts().values()))
    for path in sorted(CALIBRATION.glob("*.txt")):
        assert not passages(path.read_text(encoding="utf-8")) & measured, path.name


@pytest.mark.parametrize("hidden_size", [64, 48])
def test_a_large_vocabulary_is_read_coarsely_in_blocks_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden_size: int
) -> None:
    monkeypatch.setattr("edgeqwen.convert.weights.COARSE_FROM_ROWS", 1)
    write_safetensors_model(tmp_path / "model", hidden_size=hidden_size)
    out = tmp_path / "package"
    import_model(tmp_path / "model", out, quant="int8", target="vnni", name="tiny", calibrates=True)
    graph = onnx.load(str(out / GRAPH), load_external_data=False).graph
    (coarse,) = [node for node in graph.node if node.op_type == "MatMulNBits" and node.output[0] == "logits.coarse"]
    sizes = {attribute.name: attribute.i for attribute in coarse.attribute}
    assert (sizes["bits"], sizes["K"], sizes["block_size"]) == (4, hidden_size, {64: 64, 48: 16}[hidden_size])
    runtime = OnnxRuntime.load(open_package(out), OnnxOptions(num_slots=1, capacity=8))
    assert np.isfinite(runtime.step(Batch((Chunk(0, 0, (1, 2, 3), 3),))).logits[0]).all()
    runtime.close()

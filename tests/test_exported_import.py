"""Folders exported by optimum, imported: what is taken, what is refused and with which words, and served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeqwen.convert.exported import import_exported
from edgeqwen.convert.onnx_file import OnnxFile
from edgeqwen.convert.retarget import retarget_package
from edgeqwen.core.package import open_package, verify_digests
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.errors import FileError, ModelInvalid, ModelMissing
from tests.checkpoints import tiny_num_tokens, write_safetensors_model
from tests.daemons import run_command, running_daemon
from tests.exported_graphs import (
    add_input,
    changed,
    drop_input,
    exported_package,
    exported_runtime,
    imported,
    unpack,
)
from tests.record_exported import case_ids

Change = Callable[[onnx.ModelProto], None]

HOW = "optimum-cli export onnx --task text-generation-with-past"


def refusal(folder: Path) -> str:
    """What an import of the folder says; nothing is left of it."""
    out = folder.parent / "out"
    with pytest.raises(FileError) as caught:
        imported(folder, out)
    assert not out.exists()
    assert not list(folder.parent.glob(".*"))
    return caught.value.message


def drop_outputs(model: onnx.ModelProto, prefix: str) -> None:
    kept = [value for value in model.graph.output if not value.name.startswith(prefix)]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def drop_past(model: onnx.ModelProto) -> None:
    for value in [value for value in model.graph.input if value.name.startswith("past_key_values.")]:
        drop_input(model, value.name)


def set_type(name: str, element: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if value.name.startswith(name):
                value.type.tensor_type.elem_type = element

    return change


def fix_axes(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = dim.dim_value or 2


def save_beside(folder: Path, **settings: Any) -> Path:
    """The graph's weights in a file beside it, as optimum has those of large models."""
    given = {"save_as_external_data": True, "location": "model.onnx_data", "size_threshold": 1024, **settings}
    return changed(folder, lambda _: None, **given)


@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama", "qwen3-fp16", "qwen3-int8"])
def test_a_package_says_what_it_is(case: str) -> None:
    package = open_package(exported_package(case))
    verify_digests(package)
    manifest = package.manifest
    family, _, quant = case.partition("-")
    assert (manifest.graph, manifest.quant, manifest.target) == ("optimum", quant or "fp32", "any")
    assert manifest.kv_types == ("fp16" if quant == "fp16" else "fp32",)
    assert (manifest.source.kind, manifest.spec.family, manifest.spec.head_dim) == ("optimum", family, 16)
    assert "opset 18" in manifest.notes[-1]
    assert package.read_template()
    names = {"decode.onnx", "weights.bin", "tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert set(manifest.sizes) == names | ({"kernel_check.onnx"} if quant == "int8" else set())


@pytest.mark.parametrize("has_constants", [False, True])
def test_weights_inside_and_beside_the_graph_make_the_same_package(tmp_path: Path, has_constants: bool) -> None:
    """optimum writes the constants of nodes there, too, where a graph has more than 2 GB."""
    settings = {"size_threshold": 0, "convert_attribute": True} if has_constants else {}
    folder = save_beside(tmp_path / "beside", **settings)
    assert (folder / "model.onnx_data").stat().st_size > (folder / "model.onnx").stat().st_size
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    constants = [each.t for node in model.graph.node for each in node.attribute if each.HasField("t")]
    assert any(tensor.external_data for tensor in constants) == has_constants
    package = imported(folder, tmp_path / "package")
    one, other = (exported_runtime(path, num_slots=1) for path in (package, exported_package()))
    batch = Batch((Chunk(0, 0, tuple(case_ids()), 1),))
    assert np.array_equal(one.step(batch).logits[0], other.step(batch).logits[0])


def test_a_graph_is_read_without_its_weights(tmp_path: Path) -> None:
    path = unpack(tmp_path) / "model.onnx"
    opened = OnnxFile(path)
    try:
        whole = onnx.load(str(path))
        inside = sum(place.length for place in opened.ranges.values())
        assert opened.model.ByteSize() <= path.stat().st_size - inside
        assert inside > 80_000
        for tensor in whole.graph.initializer:
            if tensor.name in opened.ranges:
                place = opened.ranges[tensor.name]
                assert place.file.read(place.offset, place.length).tobytes() == tensor.raw_data
        assert [node.name for node in opened.model.graph.node] == [node.name for node in whole.graph.node]
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_past, "keeps nothing of the tokens before"),
        (lambda model: add_input(model, "use_cache_branch"), "merged decoder of an old exporter"),
        (lambda model: add_input(model, "encoder_hidden_states"), "decoder that needs one"),
        (lambda model: add_input(model, "cache_position"), "takes 'cache_position', of which nothing is known"),
        (lambda model: drop_input(model, "attention_mask"), "has no attention_mask"),
        (lambda model: drop_input(model, "past_key_values.1.value"), "no 'past_key_values.1.value'"),
        (lambda model: drop_outputs(model, "present.1"), "no 'present.1.key'"),
        (lambda model: drop_outputs(model, "logits"), "has no logits"),
        (set_type("input_ids", onnx.TensorProto.INT32), "takes input_ids of type INT32"),
        (set_type("past_key_values", onnx.TensorProto.BFLOAT16), "cache is of type BFLOAT16"),
        (set_type("logits", onnx.TensorProto.DOUBLE), "logits are of type DOUBLE"),
        (fix_axes, "its axes are fixed"),
    ],
)
def test_a_graph_of_another_kind_is_refused_with_what_is_lacking(tmp_path: Path, change: Change, words: str) -> None:
    message = refusal(changed(tmp_path / "model", change))
    assert "model.onnx" in message
    assert words in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_hidden_layers", 3, "no 'past_key_values.2.key', but config.json says 3 layers"),
        ("num_hidden_layers", 1, "has 'past_key_values.1.key', but config.json says 1 layers"),
        ("num_key_value_heads", 4, "cache has 2 key heads"),
        ("head_dim", 32, "cache has 16 numbers in each"),
        ("vocab_size", 512, "gives logits of 384 tokens, config.json says 512"),
        ("model_type", "gpt2", "'gpt2', which is not supported"),
    ],
)
def test_a_configuration_of_another_model_is_told(tmp_path: Path, name: str, value: Any, words: str) -> None:
    folder = unpack(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("encoder_model.onnx", "decoder_model.onnx"), "holds an encoder"),
        (("decoder_model.onnx", "decoder_with_past_model.onnx"), "a decoder as two graphs"),
        (("model.onnx", "model_quantized.onnx"), "holds 2 graphs (model.onnx, model_quantized.onnx): give one"),
    ],
)
def test_folders_of_several_graphs_are_refused_unless_one_is_named(
    tmp_path: Path, names: tuple[str, str], words: str
) -> None:
    folder = unpack(tmp_path / "model")
    (folder / "model.onnx").rename(folder / "graph")
    for name in names:
        shutil.copy(folder / "graph", folder / name)
    assert words in refusal(folder)
    manifest = import_exported(folder / names[0], tmp_path / "out", name="one", trial=lambda _: None)
    assert manifest.source.id == "model"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = unpack(tmp_path / "model")
    (folder / name).unlink()
    assert f"{folder / name} does not exist" in (message := refusal(folder))
    assert HOW in message


def test_weights_that_are_not_there_or_cut_short_are_told(tmp_path: Path) -> None:
    folder = save_beside(tmp_path / "model")
    data = folder / "model.onnx_data"
    whole = data.read_bytes()
    data.write_bytes(whole[:-4096])
    assert "lies outside of the file, which has" in refusal(folder)
    data.unlink()
    assert "its weights are in model.onnx_data, which is not in the folder" in refusal(folder)


def test_weights_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = save_beside(tmp_path / "model")
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../model.onnx_data"
    onnx.save(model, str(folder / "model.onnx"))
    assert "lies outside of the folder" in refusal(folder)


def test_a_graph_cut_anywhere_is_told_by_name(tmp_path: Path) -> None:
    folder = unpack(tmp_path / "model")
    whole = (folder / "model.onnx").read_bytes()
    for length in (1, 20, 1000, len(whole) // 2, len(whole) - 10):
        (folder / "model.onnx").write_bytes(whole[:length])
        assert f"{folder / 'model.onnx'}: not an ONNX graph" in refusal(folder)
    (folder / "model.onnx").write_bytes(np.random.default_rng(0).bytes(5000))
    assert f"{folder / 'model.onnx'}: not an ONNX graph" in refusal(folder)


def test_a_trial_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def trial(folder: Path) -> None:
        raise ModelInvalid(f"{folder.name}: no")

    with pytest.raises(ModelInvalid, match="no"):
        import_exported(unpack(tmp_path / "model"), tmp_path / "out", name="x", trial=trial)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_such_a_package_is_not_remade_for_other_processors(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="exported by optimum, which cannot be remade"):
        retarget_package(exported_package(), tmp_path / "out", target="vnni")


@pytest.mark.parametrize("flags", [["--quant", "int8"], ["--target", "any"], ["--fast"]])
def test_the_command_refuses_flags_that_would_change_the_graph(tmp_path: Path, flags: list[str]) -> None:
    folder = unpack(tmp_path / "model")
    done = run_command("import", str(folder), "--out", str(tmp_path / "out"), *flags)
    assert done.returncode == 64
    assert f"{flags[0]}: {folder} holds a graph exported by optimum".encode() in done.stderr


def test_the_command_names_an_operator_that_there_is_not(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[-1].op_type = "NoSuchOperator"

    done = run_command("import", str(changed(tmp_path / "model", change)), "--out", str(tmp_path / "out"))
    assert done.returncode == 65
    assert b"NoSuchOperator" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_checkpoint_is_imported_from_that(tmp_path: Path) -> None:
    folder = unpack(tmp_path / "model")
    write_safetensors_model(folder)
    done = run_command("import", str(folder), "--fast", "--json", "--out", str(tmp_path / "out"))
    assert json.loads(done.stdout)["quant"] == "int8"
    assert open_package(tmp_path / "out").manifest.graph == "own"


def test_a_daemon_serves_an_exported_graph(tmp_path: Path) -> None:
    done = run_command("import", str(unpack(tmp_path / "tiny")), "--json", "--out", str(tmp_path / "package"))
    assert json.loads(done.stdout)["quant"] == "fp32", done.stderr
    with running_daemon("onnx", "--threads", "1", model=tmp_path / "package") as daemon, daemon.client() as client:
        daemon.wait_until_ready()
        prompt = "hello world " * 20
        first = client.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True)
        assert first.usage.completion == 20
        again = client.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True, n=3, logprobs=True)
        assert [choice.text for choice in again.choices] == [first.text] * 3
        assert again.usage.cached > 0
        session = client.session_create()
        for rev in (1, 2):
            answer = client.chat("hello", session=session, max_tokens=8)
            assert answer.finish in {"length", "stop"}
            assert len(client.session_get(session, messages=True)["messages"]) == 2 * rev
        stream = client.stream("chat", prompt="hello", stream=True, max_tokens=4000, ignore_eos=True)
        rid = next(frame["rid"] for frame in stream if "rid" in frame)
        assert "delta" in next(stream)
        with daemon.client() as other:
            assert other.request("cancel", rid=rid)["cancelled"] == 1
        assert [*stream][-1]["finish"] == "cancelled"
        assert client.stats()["kv"]["cached"] > 0


def test_the_tokenizer_of_the_recorded_folders_is_the_tests_own() -> None:
    assert open_package(exported_package()).manifest.spec.num_tokens == tiny_num_tokens()


def test_a_missing_path_is_no_graph(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing):
        import_exported(tmp_path / "none.onnx", tmp_path / "out", name="x", trial=lambda _: None)

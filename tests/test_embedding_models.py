"""Embedding models as the hub has them: the decoder alone, how it pools, and the token at a text's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeqwen.convert.embedding_model import POOLING_FILE
from edgeqwen.convert.hub import choose_files, parse_id
from edgeqwen.convert.importer import import_model
from edgeqwen.convert.retarget import retarget_package
from edgeqwen.core.package import open_package
from edgeqwen.errors import ModelInvalid
from edgeqwen.text import Tokenizer
from tests.checkpoints import (
    config_json,
    random_tensors,
    safetensors_bytes,
    tiny_spec,
    tiny_tokenizer_json,
    write_gguf_model,
    write_json,
)
from tests.models import tiny_package, tiny_runtime
from tests.test_hidden_states import states

LAST = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
END = "<|endoftext|>"


def write_embedding_model(folder: Path, *, pooling: dict[str, Any], tie: bool = True) -> None:
    """As the sentence-transformers library saves one: no `model.` before the names, no output matrix."""
    spec = tiny_spec("qwen3", tie=tie)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in random_tensors(spec).items()
        if not name.startswith("lm_head.")
    }
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    write_json(folder / "config.json", {**config_json(spec), "architectures": ["Qwen3Model"]})
    tokenizer = tiny_tokenizer_json()
    end = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == END)
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": END, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [end], "tokens": [END]}},
    }
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [tokenizer["post_processor"], template]}
    write_json(folder / "tokenizer.json", tokenizer)
    (folder / POOLING_FILE).parent.mkdir()
    write_json(folder / POOLING_FILE, pooling)


@pytest.mark.parametrize("tie", [True, False])
def test_it_is_imported_and_gives_the_states_of_its_decoder(tmp_path: Path, tie: bool) -> None:
    write_embedding_model(tmp_path / "source", pooling=LAST, tie=tie)
    import_model(tmp_path / "source", tmp_path / "out", quant="fp32", target="any", name="embedding")
    package = open_package(tmp_path / "out")
    assert package.manifest.pooling == "last"
    assert any("embedding model" in note for note in package.manifest.notes)
    ids = range(40)
    plain = states(tiny_runtime(tiny_package("qwen3", "fp32", tie=tie)), ids)
    assert np.array_equal(states(tiny_runtime(tmp_path / "out"), ids), plain)
    before, after = Tokenizer.from_file(package.tokenizer_path).affixes
    assert (len(before), len(after)) == (0, 1)


def test_it_stays_one_on_another_processor(tmp_path: Path) -> None:
    write_embedding_model(tmp_path / "source", pooling=LAST)
    import_model(tmp_path / "source", tmp_path / "out", quant="int8", target="any", name="embedding")
    assert retarget_package(tmp_path / "out", tmp_path / "other", target="vnni").pooling == "last"


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
    ],
)
def test_both_spellings_of_pooling_are_read(tmp_path: Path, pooling: dict[str, Any], wanted: str) -> None:
    write_embedding_model(tmp_path / "source", pooling=pooling)
    assert import_model(tmp_path / "source", tmp_path / "o", quant="fp32", target="any", name="x").pooling == wanted


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        {"pooling_mode": "max"},
        {},
    ],
)
def test_other_pooling_is_refused_by_name(tmp_path: Path, pooling: dict[str, Any]) -> None:
    write_embedding_model(tmp_path / "source", pooling=pooling)
    with pytest.raises(ModelInvalid, match=r"1_Pooling/config\.json: 'pooling_mode'"):
        import_model(tmp_path / "source", tmp_path / "out", quant="fp32", target="any", name="x")


def test_a_decoder_alone_that_says_nothing_of_pooling_lacks_its_output_matrix(tmp_path: Path) -> None:
    write_embedding_model(tmp_path / "source", pooling=LAST, tie=False)
    (tmp_path / "source" / POOLING_FILE).unlink()
    with pytest.raises(ModelInvalid, match=r"'lm_head\.weight' is missing"):
        import_model(tmp_path / "source", tmp_path / "out", quant="fp32", target="any", name="x")


@pytest.mark.parametrize(("kind", "wanted"), [(None, None), (0, None), (1, "mean"), (3, "last"), (4, None)])
def test_a_gguf_file_says_it_by_a_number(tmp_path: Path, kind: int | None, wanted: str | None) -> None:
    members = {} if kind is None else {"qwen3.pooling_type": kind}
    write_gguf_model(tmp_path / "x.gguf", family="qwen3", metadata=members)
    assert import_model(tmp_path / "x.gguf", tmp_path / "out", quant="fp32", target="any", name="x").pooling == wanted


def test_a_gguf_file_that_wants_tokens_at_both_ends_gets_them_and_prompts_do_not(tmp_path: Path) -> None:
    members = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    write_gguf_model(tmp_path / "x.gguf", family="qwen3", metadata=members)  # which adds the other token anyway
    import_model(tmp_path / "x.gguf", tmp_path / "out", quant="fp32", target="any", name="x")
    tokenizer = Tokenizer.from_file(tmp_path / "out" / "tokenizer.json")
    assert tokenizer.affixes == ((tokenizer.token_id(END),), (tokenizer.token_id("<|im_end|>"),))
    assert len(tokenizer.encode("hello", special=True)) == 1


def test_a_pull_takes_what_says_how_to_pool() -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors", "modules.json", POOLING_FILE, "2_Normalize/x.json"]
    chosen = [POOLING_FILE, "config.json", "tokenizer.json", "model.safetensors"]
    assert choose_files(parse_id("org/name"), names) == chosen

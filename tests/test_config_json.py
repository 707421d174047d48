"""`config.json` in its forms, and what stands beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import ModelSpec, RopeScaling
from edgeqwen.errors import ModelInvalid
from tests.checkpoints import CHAT_TEMPLATE, tiny_spec, tiny_tokenizer_json, write_json, write_safetensors_model

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
LLAMA3_JSON = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def edit(path: Path, **changes: Any) -> None:
    """Set members of a JSON file; `...` removes one."""
    values = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: value for key, value in values.items() if value is not ...})


def opened(folder: Path) -> tuple[ModelSpec, str]:
    checkpoint = open_checkpoint(folder)
    checkpoint.close()
    return checkpoint.spec, checkpoint.side_files.chat_template


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 2.0), LLAMA3])
@pytest.mark.parametrize("is_new_form", [False, True])
def test_both_forms_give_the_same_shape(family: Any, scaling: Any, is_new_form: bool, tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path, family=family, is_new_form=is_new_form, rope_scaling=scaling)
    assert opened(tmp_path)[0] == spec == tiny_spec(family, rope_scaling=scaling)


THETA_PLACES: dict[str, dict[str, Any]] = {
    "top": {"rope_theta": 5000.0, "rope_parameters": ...},
    "parameters": {"rope_theta": ..., "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
    "both": {"rope_theta": 5000.0, "rope_parameters": {"rope_theta": 5000, "rope_type": "default"}},
    "scaling": {"rope_theta": ..., "rope_scaling": {"rope_theta": 5000.0, "rope_type": "default"}},
}
TEMPLATE_PLACES: dict[str, tuple[Any, str | None]] = {
    "config": ("from config", None),
    "jinja": (..., "from jinja"),
    "both": ("from config", "from jinja"),
    "list": ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "from list"}], None),
    "list of one": ([{"name": "chat", "template": "from list"}], None),
    "list and jinja": ([{"name": "default", "template": "from list"}], "from jinja"),
    "none": (..., None),
    "null": (None, None),
}


@pytest.mark.parametrize("theta", list(THETA_PLACES))
@pytest.mark.parametrize("template", list(TEMPLATE_PLACES))
def test_rope_values_and_template_are_found_wherever_they_stand(theta: str, template: str, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    in_config, in_file = TEMPLATE_PLACES[template]
    edit(tmp_path / "config.json", **THETA_PLACES[theta])
    edit(tmp_path / "tokenizer_config.json", chat_template=in_config)
    if in_file is not None:
        (tmp_path / "chat_template.jinja").write_text(in_file)
    spec, found = opened(tmp_path)
    assert spec.rope_theta == 5000.0
    expected = in_file or {"config": "from config", "list": "from list", "list of one": "from list"}.get(template, "")
    assert found == expected


def test_scaling_in_old_and_new_place_with_the_old_key(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    old = {"type" if key == "rope_type" else key: value for key, value in LLAMA3_JSON.items()}
    edit(tmp_path / "config.json", rope_scaling=old)
    assert opened(tmp_path)[0].rope_scaling == LLAMA3
    edit(tmp_path / "config.json", rope_parameters={**LLAMA3_JSON, "rope_theta": 1000000.0})
    assert opened(tmp_path)[0].rope_scaling == LLAMA3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "'model_type' is 'gemma', which is not supported; supported: qwen3, qwen2, llama"),
        ({"model_type": ...}, "'model_type' is missing"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; supported: silu"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'rope_type' is 'yarn'; supported: default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'rope_type' is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "'factor' must be a finite number above 0, not '4'"),
        ({"rope_scaling": [1]}, r"'rope_scaling' must be an object, not \[1\]"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "'rope_theta' contradicts 'rope_parameters'"),
        (
            {"rope_parameters": LLAMA3_JSON, "rope_scaling": {**LLAMA3_JSON, "factor": 9.0}},
            "'rope_scaling' contradicts 'rope_parameters'",
        ),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is not 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"'quantization_config' is present \(gptq\)"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types' holds 'sliding_attention'"),
        ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}, "'use_sliding_window' is true"),
        ({"hidden_size": ...}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' must be an integer from 1 to .*, not '64'"),
        ({"hidden_size": True}, "'hidden_size' must be an integer"),
        ({"num_hidden_layers": 1 << 40}, "'num_hidden_layers' must be an integer from 1 to 1,024"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be an integer"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3, no divisor of 4 heads"),
        ({"rms_norm_eps": -1e-6}, "'rms_norm_eps' must be a finite number above 0"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false, not 'yes'"),
        ({"head_dim": 16}, "4 heads, 2 for keys, of size 16 do not fit .*q_proj.weight' with 128 rows"),
        ({"num_attention_heads": 8, "head_dim": ...}, "8 heads, 2 for keys, of size 16 do not fit"),
        ({"vocab_size": 100}, r"tokenizer.json has \d+ tokens, but config.json a vocabulary of 100"),
        ({"hidden_size": 128}, "belong to different models"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ModelInvalid, match=message) as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in error.value.message
    assert "\n" not in error.value.message


def test_a_window_that_no_layer_uses_is_fine(tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path)
    unused = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": spec.num_layers}
    edit(tmp_path / "config.json", **unused)
    assert opened(tmp_path)[0] == spec
    edit(tmp_path / "config.json", use_sliding_window=False, max_window_layers=1)
    assert opened(tmp_path)[0] == spec


@pytest.mark.parametrize("absent", [..., None])
def test_head_dim_follows_from_the_tensors(absent: Any, tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path, family="llama")
    edit(tmp_path / "config.json", head_dim=absent)
    assert opened(tmp_path)[0] == spec
    assert spec.head_dim != spec.hidden_size // spec.num_heads


def test_absent_members_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, family="llama", num_kv_heads=4, rms_norm_eps=1e-5)
    edit(tmp_path / "config.json", num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., rope_scaling=...)
    spec = opened(tmp_path)[0]
    assert (spec.num_kv_heads, spec.rms_norm_eps, spec.rope_theta, spec.rope_scaling) == (4, 1e-6, 10000.0, None)


FIRST = len(tiny_tokenizer_json()["model"]["vocab"])


@pytest.mark.parametrize(
    ("generation", "config", "family", "expected"),
    [
        ([FIRST + 2, FIRST], FIRST, "qwen3", (FIRST + 2, FIRST)),
        (FIRST, FIRST + 2, "qwen3", (FIRST, FIRST + 2)),
        (FIRST, FIRST + 2, "llama", (FIRST,)),
        (..., FIRST, "llama", (FIRST,)),
        (..., [FIRST, 3], "llama", (FIRST, 3)),
        (None, None, "llama", (FIRST + 2,)),
        (..., ..., "qwen2", (FIRST + 2, FIRST)),
    ],
)
def test_end_tokens(generation: Any, config: Any, family: Any, expected: tuple[int, ...], tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, family=family)
    edit(tmp_path / "generation_config.json", eos_token_id=generation)
    edit(tmp_path / "config.json", eos_token_id=config)
    assert opened(tmp_path)[0].eos_token_ids == expected


@pytest.mark.parametrize("value", ["x", 1.5, [True], -1, {"a": 1}])
def test_an_end_token_that_is_none_is_refused(value: Any, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelInvalid, match=r"generation_config.json: 'eos_token_id' must be a token id or a list"):
        open_checkpoint(tmp_path)


def test_a_missing_generation_config_is_noted(tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.side_files.generation_config == {}
    assert checkpoint.side_files.notes == ("generation_config.json is missing: no defaults",)
    assert checkpoint.spec == spec
    checkpoint.close()


def test_a_missing_tokenizer_config_leaves_the_model_without_template(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.side_files.chat_template == ""
    assert "no chat template found" in checkpoint.side_files.notes[0]
    checkpoint.close()


@pytest.mark.parametrize("template", [7, [], [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], [1]])
def test_a_template_of_another_kind_is_refused(template: Any, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    edit(tmp_path / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelInvalid, match="'chat_template' must be a string or a list of templates"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
def test_tokens_that_the_template_names_go_with_it(bos: Any, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    edit(tmp_path / "tokenizer_config.json", bos_token=bos, chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
    assert opened(tmp_path)[1] == '{% set bos_token = "<s>" %}\n{{ bos_token }}' + CHAT_TEMPLATE


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    content = tiny_tokenizer_json()
    content["added_tokens"] = []
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(
        ModelInvalid, match=r"tokenizer.json has \d+ tokens, but generation_config.json names the end token"
    ):
        open_checkpoint(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=5)
    with pytest.raises(ModelInvalid, match=r"tokenizer.json lacks the token '<\|im_end\|>'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelInvalid, match=r"tokenizer\.json is (empty|not a tokenizer file)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_damaged_json_file_is_named(name: str, content: str, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelInvalid, match=name.replace(".", r"\.")):
        open_checkpoint(tmp_path)


def test_a_tokenizer_that_makes_the_library_panic_is_named(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    tokenizer = tiny_tokenizer_json()
    tokenizer["model"]["continuing_subword_prefix"] = "é"
    write_json(tmp_path / "tokenizer.json", tokenizer)
    with pytest.raises(ModelInvalid, match=r"tokenizer\.json is not a tokenizer file"):
        open_checkpoint(tmp_path)

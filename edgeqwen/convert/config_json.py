"""`config.json` and the files beside it: the model's shape, end tokens, template and tokenizer.

Two forms are read, and any mixture: `rope_theta`, `rope_scaling` and `torch_dtype` at top level, as most of the hub has
them, and `rope_parameters` and `dtype`, as transformers 5 writes them. What would compute something else is refused by
name. Defaults of absent members are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from edgeqwen.convert.checkpoint import SideFiles
from edgeqwen.convert.embedding_model import EMBEDDING_NOTE, read_pooling
from edgeqwen.convert.files import Fields
from edgeqwen.convert.side_files import (
    NO_TEMPLATE_NOTE,
    LoadedTokenizer,
    TextFiles,
    end_tokens,
    find_chat_template,
    load_tokenizer,
    read_generation_config,
    read_tokenizer_config,
    token_ids,
    with_special_tokens,
)
from edgeqwen.convert.strict import FAMILIES, MAX_LAYERS
from edgeqwen.core.model import Family, ModelSpec, RopeScaling
from edgeqwen.errors import ModelInvalid

DEFAULT_THETA: Final = 10000.0
QWEN_END_TEXTS: Final = ("<|im_end|>", "<|endoftext|>")


def read_spec(config: Fields, shapes: Mapping[str, tuple[int, ...]], *, text: TextFiles) -> ModelSpec:
    """The shape that `config` asks for; `shapes` of the tensors settle what it leaves open."""
    family = check_model_type(config)
    _refuse_variants(config, family)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"is {num_kv_heads}, no divisor of {num_heads} heads")
    vocab_size = config.integer("vocab_size", maximum=1 << 24)
    if text.num_tokens > vocab_size:
        raise ModelInvalid(
            f"{config.path.with_name('tokenizer.json')} has {text.num_tokens:,} tokens, but config.json a vocabulary "
            f"of {vocab_size:,}: they belong to different models"
        )
    theta, scaling = _rope(config)
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        num_tokens=text.num_tokens,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, shapes, num_heads=num_heads, num_kv_heads=num_kv_heads),
        max_position=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        eos_token_ids=text.eos_token_ids,
        rope_scaling=scaling,
        has_qk_norm=family == "qwen3",
        has_qkv_bias=family == "qwen2",
    )


def read_text_files(folder: Path, config: Fields) -> TextFiles:
    """Tokenizer, template, generation defaults and end tokens of a folder."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    tokenizer_config = read_tokenizer_config(folder)
    generation = read_generation_config(folder)
    eos = _eos_token_ids(config, Fields(folder / "generation_config.json", generation), tokenizer, tokenizer_config)
    notes = [] if (folder / "generation_config.json").exists() else ["generation_config.json is missing: no defaults"]
    template = find_chat_template(folder, tokenizer_config)
    if template is None:
        notes.append(NO_TEMPLATE_NOTE)
    else:
        names = ("bos_token", "eos_token")
        template = with_special_tokens(template, {name: special_text(tokenizer_config, name) for name in names})
    pooling = read_pooling(folder)
    if pooling is not None:
        notes.append(EMBEDDING_NOTE)
    side_files = SideFiles(tokenizer.data, template or "", generation, tuple(notes), pooling)
    return TextFiles(side_files, num_tokens=tokenizer.num_tokens, eos_token_ids=eos)


def check_model_type(config: Fields) -> Family:
    model_type = config.string("model_type")
    if model_type is None:
        raise config.error("model_type", "is missing")
    if model_type not in FAMILIES:
        raise config.error("model_type", f"is '{model_type}', which is not supported; supported: {', '.join(FAMILIES)}")
    return cast(Family, model_type)


def special_text(tokenizer_config: Fields | None, name: str) -> str | None:
    """The text of a token that `tokenizer_config.json` names, as a string or as an object with `content`."""
    value = tokenizer_config.get(name) if tokenizer_config else None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_token_ids(
    config: Fields, generation: Fields, tokenizer: LoadedTokenizer, tokenizer_config: Fields | None
) -> tuple[int, ...]:
    """Of `generation_config.json`, else of `config.json`, else the `eos_token` of the tokenizer."""
    path = config.path.with_name("tokenizer.json")
    source = generation if token_ids(generation, "eos_token_id") else config
    named = token_ids(source, "eos_token_id")
    for each in named:
        if each >= tokenizer.num_tokens:
            raise ModelInvalid(
                f"{path} has {tokenizer.num_tokens:,} tokens, but {source.path.name} names the "
                f"end token {each}: they belong to different models"
            )
    text = special_text(tokenizer_config, "eos_token")
    if text is not None and text not in tokenizer.ids:
        raise ModelInvalid(
            f"{path} lacks the token '{text}' that tokenizer_config.json names as 'eos_token': "
            "they belong to different models"
        )
    if not named and text is not None:
        named = (tokenizer.ids[text],)
    is_qwen = (config.string("model_type") or "").startswith("qwen")
    return end_tokens(named, tokenizer.ids, tokenizer.special, candidates=QWEN_END_TEXTS if is_qwen else ())


def _refuse_variants(config: Fields, family: Family) -> None:
    """What members of the families may have and the graph builder does not know."""
    activation = config.string("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise config.error("hidden_act", f"is '{activation}'; supported: silu")
    if "quantization_config" in config:
        table = config.table("quantization_config")
        method = table.get("quant_method") if table else None
        raise config.error("quantization_config", f"is present ({method}): take the model that is not quantised")
    for name in ("attention_bias", "mlp_bias") if family != "qwen2" else ():
        if config.boolean(name, False):
            raise config.error(name, "is true: not supported")
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        others = [str(each) for each in layer_types if each != "full_attention"]
        if others:
            raise config.error("layer_types", f"holds '{others[0]}'; supported: full_attention")
    elif config.boolean("use_sliding_window", False) and config.get("sliding_window"):
        num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
        if config.integer("max_window_layers", 28) < num_layers:
            raise config.error("use_sliding_window", "is true: sliding-window attention is not supported")


def _head_dim(config: Fields, shapes: Mapping[str, tuple[int, ...]], *, num_heads: int, num_kv_heads: int) -> int:
    """Given, or what the rows of q and k agree on."""
    prefix = "model.layers.0.self_attn."
    rows = {name: shapes.get(f"{prefix}{name}_proj.weight", (0,))[0] for name in ("q", "k")}
    for name, num_rows in rows.items():
        if not num_rows:
            raise ModelInvalid(f"{config.path.parent}: tensor '{prefix}{name}_proj.weight' is missing")
    head_dim = config.integer("head_dim", max(1, rows["q"] // num_heads))
    if rows != {"q": num_heads * head_dim, "k": num_kv_heads * head_dim} or head_dim % 2:
        raise ModelInvalid(
            f"{config.path}: {num_heads} heads, {num_kv_heads} for keys, of size {head_dim} do not fit "
            f"'{prefix}q_proj.weight' with {rows['q']} rows and 'k_proj.weight' with {rows['k']}: "
            "weights and configuration belong to different models"
        )
    return head_dim


def _rope(config: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotation, from whichever of the members hold them."""
    new, old = config.table("rope_parameters"), config.table("rope_scaling")
    theta = config.number("rope_theta", DEFAULT_THETA)
    for table in (old, new):
        if table is None:
            continue
        if "rope_theta" in table:
            theta = _same_theta(config, table.number("rope_theta"))
        if table.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise config.error("partial_rotary_factor", "is not 1: not supported")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise config.error("partial_rotary_factor", "is not 1: not supported")
    scalings = [_scaling(config, table) for table in (new, old) if table is not None]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise config.error("rope_scaling", "contradicts 'rope_parameters': remove one of them")
    return theta, scalings[0] if scalings else None


def _same_theta(config: Fields, theta: float) -> float:
    if config.number("rope_theta", theta) != theta:
        raise config.error("rope_theta", f"contradicts 'rope_parameters', which says {theta:g}: remove one of them")
    return theta


def _scaling(config: Fields, table: Fields) -> RopeScaling | None:
    kind = table.string("rope_type") or table.string("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", table.number("factor"))
    if kind != "llama3":
        raise config.error(
            "rope_type", f"is '{kind}'; supported: default, linear, llama3 (remove the scaling for the native context)"
        )
    return RopeScaling(
        "llama3",
        table.number("factor"),
        low_freq_factor=table.number("low_freq_factor"),
        high_freq_factor=table.number("high_freq_factor"),
        original_max_position=table.integer("original_max_position_embeddings"),
    )

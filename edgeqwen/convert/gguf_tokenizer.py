"""The tokenizer of a GGUF file as a `tokenizers` file (`tokenizer.json`).

A GGUF file holds the vocabulary and names the rest. `tokenizer.ggml.model` is the kind: `gpt2`, byte-level BPE with its
merges, whose way of cutting text into words `tokenizer.ggml.pre` names; or `llama`, see `gguf_sentencepiece`.
A wrong way of cutting gives a model that works, badly, so an unknown name is never guessed: a `tokenizer.json` beside
the file is taken, or the file is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from edgeqwen.convert.checkpoint import SideFiles
from edgeqwen.convert.embedding_model import EMBEDDING_NOTE
from edgeqwen.convert.files import Fields
from edgeqwen.convert.gguf_header import GgufHeader
from edgeqwen.convert.gguf_sentencepiece import sentencepiece_tokenizer
from edgeqwen.convert.side_files import (
    NO_TEMPLATE_NOTE,
    LoadedTokenizer,
    TextFiles,
    end_tokens,
    find_chat_template,
    load_tokenizer,
    read_generation_config,
    read_tokenizer_config,
    with_special_tokens,
)
from edgeqwen.convert.tokenizer_parts import PRE_TOKENIZERS, TokenType, byte_level_bpe
from edgeqwen.core.model import Pooling
from edgeqwen.errors import ModelInvalid

PREFIX: Final = "tokenizer.ggml."
END_TEXTS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")
SAMPLING: Final = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Texts and types of the ids, without the padding at the end; `special` are the control tokens."""

    path: Path
    texts: list[str]
    types: list[int]

    @property
    def special(self) -> list[str]:
        return [text for text, kind in zip(self.texts, self.types, strict=True) if kind == TokenType.CONTROL]


def read_side_files(path: Path, header: GgufHeader, *, pooling: Pooling | None = None) -> TextFiles:
    """Tokenizer, template and defaults of the file at `path`; raises `ModelInvalid` naming what is missing."""
    fields = Fields(path, header.metadata, prefix=PREFIX)
    vocabulary = _vocabulary(fields)
    notes = [] if pooling is None else [EMBEDDING_NOTE]
    tokenizer = _tokenizer(fields, vocabulary, notes, is_embedding=pooling is not None)
    ids = {text: index for index, text in enumerate(vocabulary.texts)}
    named = [each for name in ("eos_token_id", "eot_token_id") if (each := fields.token_id(name)) is not None]
    eos = end_tokens(named, ids, vocabulary.special, candidates=END_TEXTS)
    for each in eos:
        if each >= len(vocabulary.texts):
            raise fields.error("eos_token_id", f"is {each}, but there are {len(vocabulary.texts):,} tokens")
    side_files = SideFiles(
        tokenizer_json=tokenizer.data,
        chat_template=_chat_template(path, header, vocabulary, notes),
        generation_config=_generation_config(path, header, eos),
        notes=tuple(notes),
        pooling=pooling,
    )
    return TextFiles(side_files, num_tokens=len(vocabulary.texts), eos_token_ids=eos)


def _vocabulary(fields: Fields) -> GgufVocabulary:
    texts, types = fields.get("tokens"), fields.get("token_type")
    if not isinstance(texts, list) or not texts:
        raise fields.error("tokens", "is missing: the file has no tokenizer")
    if types is None:
        types = np.full(len(texts), TokenType.NORMAL)
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != len(texts):
        raise fields.error("token_type", f"must have one number for each of the {len(texts):,} tokens")
    used = np.flatnonzero(types != TokenType.UNUSED)
    if not len(used):
        raise fields.error("token_type", "marks every token as unused")
    count = int(used[-1]) + 1
    return GgufVocabulary(fields.path, texts[:count], [int(each) for each in types[:count]])


def _tokenizer(fields: Fields, vocabulary: GgufVocabulary, notes: list[str], *, is_embedding: bool) -> LoadedTokenizer:
    model, pre = fields.string("model"), fields.string("pre")
    if model == "gpt2" and pre in PRE_TOKENIZERS and isinstance(fields.get("merges"), list):
        built = byte_level_bpe(fields, vocabulary.texts, vocabulary.types, PRE_TOKENIZERS[pre])
    elif model == "llama":
        built = sentencepiece_tokenizer(fields, vocabulary.texts, vocabulary.types)
    else:
        return _tokenizer_beside(fields, vocabulary, notes, problem=_problem(fields, model, pre))
    if is_embedding:
        built["post_processor"] = _affixed(fields, vocabulary, built["post_processor"])
    loaded = load_tokenizer(fields.path, msgspec.json.encode(built))
    _check_ids(fields.path, vocabulary, loaded)
    return loaded


def _affixed(fields: Fields, vocabulary: GgufVocabulary, post_processor: Any) -> Any:
    """The post-processor, and with it the tokens that the file wants at both ends of a whole text."""
    wanted = [name for name in ("bos", "eos") if fields.boolean(f"add_{name}_token", False)]
    ids = {name: fields.token_id(f"{name}_token_id") for name in wanted}
    count = len(vocabulary.texts)
    texts = {name: vocabulary.texts[index] for name, index in ids.items() if index is not None and index < count}
    if not texts:
        return post_processor
    marks = {name: {"SpecialToken": {"id": text, "type_id": 0}} for name, text in texts.items()}
    whole = [marks.get("bos"), {"Sequence": {"id": "A", "type_id": 0}}, marks.get("eos")]
    single = [each for each in whole if each is not None]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [ids[name]], "tokens": [text]} for name, text in texts.items()},
    }
    return template if post_processor is None else {"type": "Sequence", "processors": [post_processor, template]}


def _problem(fields: Fields, model: str | None, pre: str | None) -> str:
    """What keeps the tokenizer from being built, in words."""
    if model != "gpt2":
        return f"'{PREFIX}model' {'is missing' if model is None else repr(model)}; supported: gpt2, llama"
    if pre is None:
        return f"'{PREFIX}pre' is missing"
    if pre not in PRE_TOKENIZERS:
        return f"'{PREFIX}pre' is '{pre}'; supported: {', '.join(PRE_TOKENIZERS)}"
    return f"'{PREFIX}merges' is missing"


def _tokenizer_beside(fields: Fields, vocabulary: GgufVocabulary, notes: list[str], *, problem: str) -> LoadedTokenizer:
    path = fields.path.parent / "tokenizer.json"
    if not path.exists():
        raise ModelInvalid(
            f"{fields.path}: {problem}: put the model's tokenizer.json beside the file, or take a newer GGUF file"
        )
    loaded = load_tokenizer(path)
    _check_ids(path, vocabulary, loaded)
    notes.append(f"{problem}: the tokenizer is {path.name} beside the file")
    return loaded


def _check_ids(path: Path, vocabulary: GgufVocabulary, loaded: LoadedTokenizer) -> None:
    """Every token that the GGUF file uses must have the same id in the tokenizer."""
    for index, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True)):
        if kind != TokenType.UNUSED and loaded.ids.get(text) != index:
            raise ModelInvalid(
                f"{path}: token {index} of {vocabulary.path.name} has the id {loaded.ids.get(text)} in this tokenizer: "
                "they belong to different models"
            )


def _chat_template(path: Path, header: GgufHeader, vocabulary: GgufVocabulary, notes: list[str]) -> str:
    template = Fields(path, header.metadata, prefix="tokenizer.").string("chat_template")
    if not template:
        template = find_chat_template(path.parent, read_tokenizer_config(path.parent))
        notes.append("the chat template stands beside the file, not in it" if template else NO_TEMPLATE_NOTE)
    if not template:
        return ""
    fields = Fields(path, header.metadata, prefix=PREFIX)
    texts: dict[str, str | None] = {}
    for name in ("bos_token", "eos_token"):
        index = fields.token_id(f"{name}_id")
        texts[name] = vocabulary.texts[index] if index is not None and index < len(vocabulary.texts) else None
    return with_special_tokens(template, texts)


def _generation_config(path: Path, header: GgufHeader, eos: tuple[int, ...]) -> dict[str, Any]:
    """Sampling defaults: of the file beside, else what the GGUF file says of them."""
    config = read_generation_config(path.parent)
    if not config:
        config = {
            name: header.metadata[f"general.sampling.{key}"]
            for key, name in SAMPLING.items()
            if type(header.metadata.get(f"general.sampling.{key}")) in (int, float)
        }
    return {**config, "eos_token_id": list(eos)}

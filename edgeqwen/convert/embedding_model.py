"""What tells an embedding model from a chat model, and how it makes a vector of a text.

On the hub it is a folder of the sentence-transformers library: `1_Pooling/config.json` says which hidden states count,
and the weights are those of the decoder alone, whose tensors have no `model.` before their names and no output matrix
among them. A GGUF file says it by `pooling_type`. The token that such a model wants at a text's end is the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from edgeqwen.convert.files import Fields, read_json
from edgeqwen.core.model import Pooling

POOLING_FILE: Final = "1_Pooling/config.json"
EMBEDDING_NOTE: Final = "an embedding model: text that it generates means nothing"
_MODE: Final = "pooling_mode"
_MODES: Final[Mapping[str, Pooling]] = {"lasttoken": "last", "mean": "mean"}
_FLAGS: Final[Mapping[str, Pooling]] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_GGUF_TYPES: Final[Mapping[int, Pooling]] = {1: "mean", 3: "last"}
_BASE: Final = "model."

T = TypeVar("T")


def read_pooling(folder: Path) -> Pooling | None:
    """How the model in a folder makes vectors, None if it is none for that. Raises `ModelInvalid`."""
    path = folder / POOLING_FILE
    if not path.exists():
        return None
    fields = Fields(path, read_json(path))
    mode = fields.string(_MODE)
    if mode is not None:
        if mode not in _MODES:
            raise fields.error(_MODE, f"is '{mode}'; supported: {', '.join(_MODES)}")
        return _MODES[mode]
    chosen = [name for name in fields.members() if name.startswith(f"{_MODE}_") and fields.boolean(name, False)]
    if len(chosen) != 1 or chosen[0] not in _FLAGS:
        raise fields.error(_MODE, f"is {' and '.join(chosen) or 'missing'}; supported: one of {', '.join(_FLAGS)}")
    return _FLAGS[chosen[0]]


def gguf_pooling(fields: Fields) -> Pooling | None:
    """How the model of a GGUF file makes vectors, None if it is none for that (0), or ranks texts (4)."""
    kind = fields.count("pooling_type")
    if kind not in (0, 4, *_GGUF_TYPES):
        raise fields.error("pooling_type", f"is {kind}; supported: 1 (mean) and 3 (last token)")
    return _GGUF_TYPES.get(kind)


def with_base_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors by canonical name, of a decoder that was saved by itself too."""
    if any(name.startswith(_BASE) for name in tensors):
        return dict(tensors)
    return {name if name.startswith("lm_head.") else _BASE + name: tensor for name, tensor in tensors.items()}

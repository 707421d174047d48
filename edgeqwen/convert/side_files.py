"""What stands beside the weights: chat template, generation defaults, tokenizer file, end tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from edgeqwen.convert.checkpoint import SideFiles
from edgeqwen.convert.files import Fields, read_json, read_small
from edgeqwen.core.package import GENERATION_CONFIG, TEMPLATE, TOKENIZER
from edgeqwen.errors import ModelInvalid, ModelMissing

NO_TEMPLATE_NOTE: Final = "no chat template found: chat requests need one, generate requests work"


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Side files and what the model's shape needs of them; `num_tokens` is the highest id with a text, plus one."""

    side_files: SideFiles
    num_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A `tokenizers` file that loads: ids by text, and those of them flagged special."""

    data: bytes
    ids: Mapping[str, int]
    special: frozenset[str]

    @property
    def num_tokens(self) -> int:
        return max(self.ids.values()) + 1


def load_tokenizer(path: Path, data: bytes | None = None) -> LoadedTokenizer:
    """`tokenizer.json` at `path`, or `data` made from the file at `path`; raises `ModelInvalid` if it does not load."""
    if data is None:
        data = read_small(path)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the library raises bare Exception, or panics, which is no Exception
        raise ModelInvalid(f"{path} is not a tokenizer file: {str(e)[:200]}") from e
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise ModelInvalid(f"{path} holds no tokens")
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return LoadedTokenizer(data, ids, frozenset(special))


def find_chat_template(folder: Path, config: Fields | None) -> str | None:
    """The template in `chat_template.jinja`, else in `tokenizer_config.json` (`config`); of several the default one."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_small(path).decode("utf-8") if path.stat().st_size else None
        except UnicodeDecodeError as e:
            raise ModelInvalid(f"{path} is not UTF-8") from e
    value = config.get("chat_template") if config else None
    if config is None or value is None or isinstance(value, str):
        return value or None
    named = (
        {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        if isinstance(value, list)
        else {}
    )
    template = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    if not isinstance(template, str):
        raise config.error("chat_template", "must be a string or a list of templates, one named 'default'")
    return template


def with_special_tokens(template: str, tokens: Mapping[str, str | None]) -> str:
    """`template` with the texts of the tokens that it names (`bos_token`, `eos_token`) set ahead of it.

    A package holds no tokenizer configuration, so the template has to carry them. The line break goes away under
    `trim_blocks`, with which templates of the hub are written.
    """
    lines = [
        f"{{% set {name} = {msgspec.json.encode(text).decode()} %}}\n"
        for name, text in tokens.items()
        if text is not None and name in template
    ]
    return "".join(lines) + template


def read_generation_config(folder: Path) -> dict[str, Any]:
    """`generation_config.json` of a folder; empty if there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def read_tokenizer_config(folder: Path) -> Fields | None:
    path = folder / "tokenizer_config.json"
    return Fields(path, read_json(path)) if path.exists() else None


def token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """A member that is one token id, a list of them, or absent."""
    value = fields.get(name)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 1 << 31:
            raise fields.error(name, "must be a token id or a list of token ids")
    return tuple(values)


def end_tokens(
    named: Iterable[int], tokenizer_ids: Mapping[str, int], special: Iterable[str], *, candidates: Iterable[str]
) -> tuple[int, ...]:
    """Ids that end an answer: those the files name, then the `candidates` that the tokenizer has as special tokens."""
    known = frozenset(special)
    found = [tokenizer_ids[text] for text in candidates if text in known and text in tokenizer_ids]
    return tuple(dict.fromkeys([*named, *found]))


def write_side_files(folder: Path, side: SideFiles) -> None:
    """Write what a package holds of them."""
    (folder / TOKENIZER).write_bytes(side.tokenizer_json)
    (folder / TEMPLATE).write_text(side.chat_template, encoding="utf-8")
    (folder / GENERATION_CONFIG).write_bytes(msgspec.json.encode(side.generation_config))


def require(path: Path) -> None:
    """Raises `ModelMissing` naming the file if it is not there."""
    if not path.exists():
        raise ModelMissing(f"{path} does not exist: the model's folder is not complete")

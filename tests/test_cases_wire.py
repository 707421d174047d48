"""The real engine through the socket, with tiny models of random weights: end tokens, and ids that have no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.convert.importer import import_model
from edgeqwen.text import Tokenizer
from tests.checkpoints import tiny_num_tokens, tiny_tokenizer_json, write_safetensors_model
from tests.daemons import running_daemon
from tests.fronts import WITHOUT_ASK, chat
from tests.models import tiny_package

ENDS = {
    token["content"]: token["id"]
    for token in tiny_tokenizer_json()["added_tokens"]
    if token["content"] in ("<|im_end|>", "<|endoftext|>")
}
USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("eos", [ENDS["<|im_end|>"], list(ENDS.values()), None], ids=["one", "list", "no file"])
def test_both_end_tokens_stop_whatever_the_generation_config_says(eos: Any, tmp_path: Path) -> None:
    """The bias makes the model say nothing but the end token, and `min_tokens` keeps it from it for two tokens."""
    source = tmp_path / "source"
    write_safetensors_model(source)
    if eos is None:
        (source / "generation_config.json").unlink()
    else:
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    import_model(source, tmp_path / "package", quant="int8", target="any", name="m")
    with running_daemon("onnx", "--threads", "1", model=tmp_path / "package") as daemon:
        for end in ENDS.values():
            for front in WITHOUT_ASK:
                bias = {str(end): 100.0}
                answer = chat(daemon, front, messages=USER, temperature=0, min_tokens=2, logit_bias=bias)
                assert answer.refused is None, answer.raw
                assert answer.finish == "stop"
                assert answer.completion in (3, None)
                assert not any(text in answer.content for text in ENDS)


def test_rows_without_a_token_are_never_drawn_however_hot_the_sampling() -> None:
    package = tiny_package("qwen3", "int8")
    given: dict[str, Any] = {"temperature": 5, "top_k": 0, "top_p": 1, "ignore_eos": True, "max_tokens": 3000}
    with running_daemon("onnx", "--threads", "2", model=package) as daemon, daemon.client() as client:
        frames = list(client.stream("generate", prompt="x", **given, logprobs=True, top_logprobs=2, stream=True))
        entries = [entry for frame in frames for entry in frame.get("logprobs") or ()]
        assert (frames[-1]["finish"], frames[-1]["usage"]["completion"]) == ("length", 3000)
        assert len(entries) == 3000
        said = [entry["token"] for entry in entries]
        listed = {token for entry in entries for token, *_ in entry["top"]}
        assert max(*said, *listed) < tiny_num_tokens()
        assert len(set(said)) > 100
        text = "".join(frame.get("delta", "") for frame in frames)
        assert text == decoded(package, said)
        stopped = client.request("generate", prompt="x", **given, seed=3, stop=["e"])
        assert (stopped["finish"], "e" in stopped["text"]) == ("stop", False)
        assert stopped["usage"]["completion"] < 3000


def decoded(package: Path, tokens: list[int]) -> str:
    """Their text; end tokens have none."""
    tokenizer = Tokenizer.from_file(package / "tokenizer.json")
    return tokenizer.decode_bytes(tokens).decode("utf-8", "replace")

"""The real SmolLM2-135M-Instruct, from its GGUF file to text and to figures of quality."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeqwen.core.model import Pooling, Quant
from edgeqwen.core.package import open_package
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.engine.pooling import Pooler
from edgeqwen.evaluate import EvalReport, built_in_texts, evaluate
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from edgeqwen.text import ChatTemplate, PromptBuilder, Tokenizer
from tests.models import Array, needs_row_invariance, smollm2_package
from tests.record_parity import DATA

MAX_TIED_GAP = 1e-3
CASES: list[dict[str, Any]] = json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))


@functools.cache
def runtime(quant: Quant) -> OnnxRuntime:
    return OnnxRuntime.load(open_package(smollm2_package(quant)), OnnxOptions(2, 1024, 2))


def greedy(model: OnnxRuntime, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    logits = model.step(Batch((Chunk(0, 0, tuple(prompt)),))).logits[0]
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(int(logits[0].argmax()))
        logits = model.step(Batch((Chunk(0, position, (tokens[-1],)),))).logits[0]
    model.release(0)
    return tokens


@pytest.mark.parametrize("case", CASES, ids=[case["question"] for case in CASES])
def test_the_fp32_package_chooses_the_tokens_that_transformers_chose(case: dict[str, Any]) -> None:
    tokens = greedy(runtime("fp32"), case["prompt"], len(case["tokens"]))
    differing = np.flatnonzero(np.array(tokens) != np.array(case["tokens"]))
    assert not len(differing) or case["gaps"][differing[0]] < MAX_TIED_GAP


@pytest.mark.parametrize("case", CASES, ids=[case["question"] for case in CASES])
def test_the_prompt_is_tokenised_as_transformers_does_it(case: dict[str, Any]) -> None:
    package = open_package(smollm2_package("fp32"))
    template = ChatTemplate(package.read_template() or "")
    builder = PromptBuilder(Tokenizer.from_file(package.tokenizer_path), template)
    prompt = builder.build([{"role": "user", "content": case["question"]}])
    assert list(prompt.ids) == case["prompt"]


@functools.cache
def report(quant: Quant) -> EvalReport:
    return evaluate(smollm2_package(quant), against=smollm2_package("fp32"), num_threads=2)


@pytest.mark.parametrize(("quant", "limit"), [("int8", 0.035), ("int4", 0.40)])
def test_quality_against_fp32_is_within_its_bar(quant: Quant, limit: float) -> None:
    counted = report(quant).counted
    assert counted.tokens >= 2000
    assert counted.kl_mean is not None
    assert 0 < counted.kl_mean <= limit


TOPICS = (
    ("The cat sleeps on the warm sofa.", "A kitten is napping on the couch.", "My cat loves to doze on cushions."),
    ("The stock market fell sharply.", "Shares dropped a lot this week.", "Investors lost money as prices tumbled."),
    ("Boil the pasta in salted water.", "Cook the spaghetti, then drain it.", "Simmer the noodles in tomato sauce."),
    ("The rocket was launched at dawn.", "The spacecraft reached its orbit.", "Engineers sent a satellite into space."),
)


@functools.cache
def vectors(quant: Quant, pooling: Pooling) -> Array:
    """Of the texts of all topics, `[texts, hidden]`."""
    tokenizer, model = Tokenizer.from_file(open_package(smollm2_package(quant)).tokenizer_path), runtime(quant)
    found = []
    for text in (text for topic in TOPICS for text in topic):
        ids = tuple(tokenizer.encode(text, special=False))
        pooler = Pooler(pooling)
        pooler.push(model.step(Batch((Chunk(0, 0, ids, 0, len(ids)),))).hidden[0])
        model.release(0)
        found.append(pooler.vector())
    return np.stack(found)


@pytest.mark.parametrize("quant", ["fp32", "int8"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_about_one_thing_are_closer_than_others(quant: Quant, pooling: Pooling) -> None:
    found = vectors(quant, pooling)
    products = found @ found.T
    topic = np.repeat(np.arange(len(TOPICS)), len(TOPICS[0]))
    is_same, is_other = topic[:, None] == topic, topic[:, None] != topic
    np.fill_diagonal(is_same, val=False)
    assert products[is_same].mean() > products[is_other].mean() + products[is_other].std()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_of_int8_are_those_of_fp32_nearly(pooling: Pooling) -> None:
    assert (vectors("fp32", pooling) * vectors("int8", pooling)).sum(axis=1).min() > 0.98


def test_fp32_against_itself_has_no_divergence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(built_in_texts()["code"][:1500], encoding="utf-8")
    package = smollm2_package("fp32")
    shares: list[float] = []
    path = tmp_path / "text"
    own = evaluate(package, text_path=path, against=package, num_threads=2, progress=shares.append).counted
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert (own.kl_mean, own.top1_agreement, own.gap) == (0.0, 1.0, 0.0)
    assert own.perplexity == own.reference_perplexity
    assert own.perplexity < 13


def test_int8_logits_are_the_same_bits_beside_another_sequence_and_in_any_chunking() -> None:
    needs_row_invariance()
    model = runtime("int8")
    first, second = CASES[0]["prompt"] + CASES[0]["tokens"], CASES[1]["prompt"] + CASES[1]["tokens"]
    (alone,) = model.step(Batch((Chunk(0, 0, tuple(first), len(first)),))).logits
    alone = alone.copy()
    model.release(0)
    got, at, other = [], 0, 0
    for width in (13, 1, 1, 40, 1, 3, len(first)):
        piece, beside = tuple(first[at : at + width]), tuple(second[other : other + 7])
        chunks = [Chunk(0, at, piece, len(piece))] + ([Chunk(1, other, beside)] if beside else [])
        got.append(model.step(Batch(tuple(chunks))).logits[0].copy())
        at, other = at + len(piece), other + len(beside)
    model.release(0)
    model.release(1)
    assert np.array_equal(np.concatenate(got), alone)

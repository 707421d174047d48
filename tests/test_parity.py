"""The fp32 package computes what transformers computes, whatever the family, the source format and the chunking."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from edgeqwen.convert.importer import import_model
from tests.checkpoints import write_gguf_model, write_safetensors_model
from tests.models import all_logits, needs_row_invariance, scratch, tiny_runtime
from tests.record_parity import CASES, POSITIONS, case_ids, recorded, reference_logits

TOLERANCE = 1e-3  # of the logits' standard deviation


@functools.cache
def case_package(name: str) -> Path:
    family, options = CASES[name]
    out = scratch() / f"parity-{name}"
    write_safetensors_model(scratch() / f"parity-{name}-source", family=family, **options)
    import_model(scratch() / f"parity-{name}-source", out, quant="fp32", target="any", name=name)
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [2000, 7])
def test_logits_equal_those_recorded_from_transformers(name: str, chunk: int) -> None:
    runtime = tiny_runtime(case_package(name))
    logits = all_logits(runtime, case_ids(runtime.spec.vocab_size), chunk=chunk)
    difference = np.abs(logits[list(POSITIONS)] - recorded()[name]).max(axis=1)
    assert difference.max() <= TOLERANCE * recorded()[name + ".std"][0], dict(zip(POSITIONS, difference, strict=True))


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied", "llama-tied"])
def test_token_by_token_gives_the_same_bits_as_one_chunk_and_as_transformers_its_values(name: str) -> None:
    needs_row_invariance()
    runtime = tiny_runtime(case_package(name))
    ids = case_ids(runtime.spec.vocab_size)
    whole = all_logits(runtime, ids, chunk=2000)
    single = all_logits(runtime, ids, chunk=1)
    assert np.array_equal(whole, single)
    assert np.abs(single[list(POSITIONS)] - recorded()[name]).max() <= TOLERANCE * recorded()[name + ".std"][0]


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="torch and transformers are not installed: recorded logits stand in",
)
@pytest.mark.parametrize("name", CASES)
def test_every_position_equals_transformers_run_here(name: str) -> None:
    runtime = tiny_runtime(case_package(name))
    ids = case_ids(runtime.spec.vocab_size)
    reference = reference_logits(scratch() / f"parity-{name}-source", ids)
    assert np.abs(all_logits(runtime, ids, chunk=256) - reference).max() <= TOLERANCE * reference.std()


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_gguf_and_safetensors_of_one_model_give_the_same_logits(family: str) -> None:
    case = f"{family}-tied"
    path = scratch() / f"{family}.gguf"
    write_gguf_model(path, family=CASES[case][0])
    import_model(path, scratch() / f"{family}-gguf", quant="fp32", target="any", name=family)
    from_gguf, from_folder = tiny_runtime(scratch() / f"{family}-gguf"), tiny_runtime(case_package(case))
    ids = case_ids(from_gguf.spec.vocab_size)[:600]
    assert np.array_equal(all_logits(from_gguf, ids, chunk=256), all_logits(from_folder, ids, chunk=256))


def test_the_recorded_cases_differ_from_each_other() -> None:
    """A check of the check: a rope scaling or a norm that is ignored would show."""
    names = [name for name in CASES if name.startswith("llama")]
    for first in names:
        for second in names:
            if first < second:
                deviation = np.abs(recorded()[first][-1] - recorded()[second][-1]).max()
                assert deviation > 100 * TOLERANCE * recorded()[first + ".std"][0], (first, second)

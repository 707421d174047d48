"""A runtime that is loaded while the text files are still being read."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeqwen.core.package import open_package
from edgeqwen.core.step import Runtime
from edgeqwen.errors import ModelInvalid, ModelMissing, ModelReplaced
from edgeqwen.loading import EarlyRuntime, check_unchanged
from edgeqwen.runtime.fake import load_fake, parse_fake
from tests.models import tiny_package

HANG_S = 30.0


def load(progress: Callable[[float], None]) -> Runtime:
    return load_fake(parse_fake("fake:"), progress, vocab_size=16, num_tokens=16, num_slots=1, capacity=8, eos=None)


def test_loading_goes_on_while_its_caller_does_something_else() -> None:
    is_done = threading.Event()

    def load_and_tell(progress: Callable[[float], None]) -> Runtime:
        try:
            return load(progress)
        finally:
            is_done.set()

    early = EarlyRuntime(load_and_tell)
    early.let_begin()
    assert is_done.wait(HANG_S), "nobody has asked for it yet"
    runtime = early(lambda _: None)
    assert runtime.spec.vocab_size == 16
    runtime.close()


def test_progress_is_told_to_whoever_waits() -> None:
    told: list[float] = []

    def load_slowly(progress: Callable[[float], None]) -> Runtime:
        give_up_at = time.monotonic() + HANG_S
        while not told and time.monotonic() < give_up_at:
            progress(0.5)
            time.sleep(0.001)
        return load(lambda _: None)

    early = EarlyRuntime(load_slowly)
    early.let_begin()
    early(told.append).close()
    assert told
    assert set(told) == {0.5}


def test_what_went_wrong_is_raised_where_the_runtime_is_asked_for() -> None:
    def fail(_: Callable[[float], None]) -> Runtime:
        raise ModelInvalid("decode.onnx: broken")

    early = EarlyRuntime(fail)
    early.let_begin()
    with pytest.raises(ModelInvalid, match=r"decode\.onnx: broken"):
        early(lambda _: None)


def test_the_runtime_of_the_first_load_is_not_given_out_twice() -> None:
    early = EarlyRuntime(load)
    early.let_begin()
    first = early(lambda _: None)
    first.close()
    told: list[float] = []
    second = early(told.append)
    assert second is not first
    assert told, "it is a load like any other"
    second.close()


def test_a_package_whose_place_another_model_took_is_not_loaded_with_the_text_of_the_old_one(tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(tiny_package("qwen3", "int8"), place)
    package = open_package(place)
    check_unchanged(package)
    shutil.rmtree(place)
    with pytest.raises(ModelMissing):
        check_unchanged(package)
    shutil.copytree(tiny_package("qwen3", "fp32"), place)
    with pytest.raises(ModelReplaced, match=str(place)):
        check_unchanged(package)

"""A runtime that is loaded while the text files are still being read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from edgeqwen.core.step import Runtime
from edgeqwen.errors import ModelInvalid
from edgeqwen.loading import EarlyRuntime
from edgeqwen.runtime.fake import load_fake, parse_fake

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

"""Memory of a daemon and of a runtime at work: bounded by what is held, whatever shapes have come before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import onnxruntime as ort
import pytest

from edgeqwen.core.package import open_package
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.runtime.onnx import OnnxRuntime
from edgeqwen.runtime.step_graph import KEPT_SHAPES
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon
from tests.models import tiny_package, tiny_runtime
from tests.processes import anonymous_bytes

SLOTS = 4
LONGEST = 3000
NUM_PROMPTS = 75
STEP_BYTES = 8 << 20
"""What steps of this tiny model may take beside its cache: a chunk of 256 rows takes some 4 MB."""

SPARE_BYTES = 1 << 20
NUM_PASSES = 3
"""What leaks does so in every pass; a heap that is not yet as large as it gets may grow in one."""

WIDTH = 16
VOCABULARY = 1 << 16
WIDE_BYTES = 2 * SLOTS * WIDTH * VOCABULARY * 4
"""Logits of a step of all slots: coarse, and as they are in the end."""

HEAP_BYTES = 48 << 20
BLOCK_BYTES = 3 << 20

NUM_SHAPES = 500
SHAPE_BYTES = 10 << 10
NUM_GRAPHS = 2


@dataclass
class Peak:
    """The most anonymous memory of a process that was seen."""

    pid: int
    num_bytes: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        while not self.over.wait(0.005):
            self.num_bytes = max(self.num_bytes, anonymous_bytes(self.pid))


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Peak]:
    peak = Peak(pid)
    thread = threading.Thread(target=peak.look)
    thread.start()
    try:
        yield peak
    finally:
        peak.over.set()
        thread.join()


def answer(daemon: DaemonProcess, lengths: Sequence[int]) -> None:
    """Prompts of these lengths, `SLOTS` clients at a time."""

    def one(length: int) -> None:
        with daemon.client() as client:
            client.request("generate", tokens=[5] * length, max_tokens=3, ignore_eos=True, cache=False)

    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(one, lengths))
    daemon.wait_for(running=0, kv_bytes=0)


def test_prompts_of_any_length_leave_no_more_behind_than_the_first_ones_did() -> None:
    draw = random.Random(7)
    lengths = [LONGEST] * SLOTS + [draw.randint(1, LONGEST) for _ in range(NUM_PROMPTS)]
    package = tiny_package(quant="int8")
    kv_bytes = SLOTS * LONGEST * open_package(package).manifest.spec.kv_floats_per_token * 4
    with running_daemon("onnx", "--threads", "1", "--slots", str(SLOTS), model=package) as daemon:
        pid = daemon.process.pid
        answer(daemon, [1])
        begun = anonymous_bytes(pid)
        with watched(pid) as peak:
            answer(daemon, lengths)
            plateau = anonymous_bytes(pid)
            answer(daemon, lengths)
        passes = [plateau, anonymous_bytes(pid)]
        for _ in range(NUM_PASSES - 1):
            answer(daemon, lengths)
            passes.append(anonymous_bytes(pid))
        answer(daemon, [draw.randint(1, 30) for _ in range(100)])
        after = anonymous_bytes(pid)
    assert peak.num_bytes < begun + kv_bytes + STEP_BYTES, (begun, peak)
    assert plateau < begun + STEP_BYTES, (begun, plateau)
    assert min(later - before for before, later in pairwise(passes)) < SPARE_BYTES, passes
    assert after < passes[-1] + SPARE_BYTES, (passes, after)


def wait_until_less(num_bytes: int) -> int:
    """Until anonymous memory of this process is below; returns what it is then."""
    give_up_at = time.monotonic() + HANG_GUARD_S
    while (now := anonymous_bytes(os.getpid())) >= num_bytes:
        assert time.monotonic() < give_up_at, (now, num_bytes)
        time.sleep(0.01)
    return now


def test_what_the_widest_steps_need_is_given_back_in_the_next_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeqwen.runtime.onnx.PAUSE_S", 1.0)  # far more than from a step to the look at memory
    runtime = tiny_runtime(tiny_package(quant="int8", vocab_size=VOCABULARY), num_slots=SLOTS, capacity=256)
    wide = Batch(tuple(Chunk(slot, 0, (5,) * WIDTH, WIDTH) for slot in range(SLOTS)))
    expected = [rows.copy() for rows in runtime.step(wide).logits]
    for _ in range(NUM_PASSES):
        rested = wait_until_less(anonymous_bytes(os.getpid()) - WIDE_BYTES)
        assert all(map(np.array_equal, runtime.step(wide).logits, expected))  # and nobody holds the logits any more
    wait_until_less(rested + SPARE_BYTES)
    runtime.close()


FREE_IN_A_THREAD = f"""
import os
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from edgeqwen.cpu import keep_large_blocks_apart
from tests.processes import anonymous_bytes

def work():
    np.ones({HEAP_BYTES} // 2, np.uint8)  # from which glibc would learn to keep so much
    blocks = [np.ones({BLOCK_BYTES}, np.uint8) for _ in range({HEAP_BYTES} // {BLOCK_BYTES})]
    held = anonymous_bytes(os.getpid())
    blocks.clear()
    return held - anonymous_bytes(os.getpid())

keep_large_blocks_apart()
with ThreadPoolExecutor(1) as pool:  # a thread has heaps of its own
    print(pool.submit(work).result())
"""


def test_what_a_thread_frees_goes_back_though_larger_blocks_have_been_before() -> None:
    """In a process of its own: heaps of other tests' threads may have room for what is to go back."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library decides for itself")
    command = [sys.executable, "-c", FREE_IN_A_THREAD]
    result = subprocess.run(command, capture_output=True, check=True, timeout=HANG_GUARD_S)
    assert int(result.stdout) > HEAP_BYTES - SPARE_BYTES


def run_shapes(runtime: OnnxRuntime, draw: random.Random, count: int) -> None:
    """Steps of `count` random shapes, hardly ever one that has been before."""
    for _ in range(count):
        slots = sorted(draw.sample(range(SLOTS), draw.randint(1, SLOTS)))
        counts = [draw.randint(1, 256 // SLOTS) for _ in slots]
        chunks = [
            Chunk(slot, 0, (5,) * rows, draw.randint(0, min(4, rows))) for slot, rows in zip(slots, counts, strict=True)
        ]
        runtime.step(Batch(tuple(chunks)))
        for slot in slots:
            runtime.release(slot)


def num_bindings() -> int:
    gc.collect()
    return sum(isinstance(each, ort.IOBinding) for each in gc.get_objects())


def test_new_shapes_of_steps_take_little_and_bindings_of_old_ones_are_given_up() -> None:
    before = num_bindings()
    runtime = tiny_runtime(tiny_package(quant="hybrid", num_layers=12), num_slots=SLOTS, capacity=256)
    draw = random.Random(3)
    run_shapes(runtime, draw, 2 * KEPT_SHAPES)
    begun = anonymous_bytes(os.getpid())
    run_shapes(runtime, draw, NUM_SHAPES)
    grown = anonymous_bytes(os.getpid()) - begun
    assert 0 < num_bindings() - before <= NUM_GRAPHS * KEPT_SHAPES
    assert grown < SHAPE_BYTES * NUM_SHAPES
    runtime.close()
    del runtime
    assert num_bindings() == before

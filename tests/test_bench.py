"""What `bench` counts, on a runtime whose steps take a scripted time on a virtual clock."""

from __future__ import annotations

import pytest

from edgeqwen.bench import BenchOptions, bench, measure
from edgeqwen.cpu import Processor, ThreadGroup, ThreadPlan
from edgeqwen.runtime.fake import FakeRuntime, FakeScript
from tests.models import tiny_package


class VirtualClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("num_streams", "decode_tok_s"), [(1, 100.0), (3, 300.0)])
def test_speeds_are_tokens_by_the_clock(num_streams: int, decode_tok_s: float) -> None:
    clock = VirtualClock()
    script = FakeScript(step_s=0.01, prefill_token_s=0.001, max_chunk=16)
    runtime = FakeRuntime(script, vocab_size=64, capacity=200, num_slots=4, sleep=clock.sleep)
    speeds = measure(runtime, BenchOptions(num_prompt=100, num_decode=8, num_streams=num_streams), clock)
    assert speeds.prefill_tok_s == pytest.approx(100 / (7 * 0.01 + 100 * 0.001))  # 7 chunks of at most 16 tokens
    assert speeds.decode_tok_s == pytest.approx(decode_tok_s)
    assert runtime.held_slots == ()


def test_report_says_what_was_measured_on() -> None:
    """A figure means nothing without the processor, its instruction sets, its clock and the threads."""
    processor = Processor("x86_64", "Some CPU", frozenset({"avx2", "fpu", "avx_vnni"}))
    plan = ThreadPlan(ThreadGroup(1, ((0,),)), ThreadGroup(1, ((0,),)))
    report = bench(
        tiny_package(), BenchOptions(num_prompt=8, num_decode=2), processor=processor, threads=plan
    ).to_dict()
    assert report["cpu"] == "Some CPU x86_64 avx2 avx_vnni"
    assert (report["threads"], report["prefill_threads"], report["cpus"]) == (1, 1, "0")
    assert report["clock_mhz"] is None or report["clock_mhz"] > 0
    assert min(report["prefill_tok_s"], report["decode_tok_s"]) > 0

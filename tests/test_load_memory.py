"""Loading a real model takes memory once, for the weights that are multiplied; those that are looked up stay mapped."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest

from edgeqwen.convert.store import external_range
from edgeqwen.core.kernel import KERNEL_CHECK
from edgeqwen.core.model import Quant
from tests.daemons import HANG_GUARD_S, running_daemon
from tests.models import smollm2_package, tiny_package
from tests.processes import anonymous_bytes

GATHERS = {"Gather", "GatherBlockQuantized"}
GRAPH_BYTES = 16 << 20
"""For each graph: what onnxruntime knows of its 1,400 nodes, and the sums that it keeps beside packed blocks."""

OWN_BYTES = 20 << 20
"""For the tokenizer of 49,152 tokens."""

PASSING_BYTES = 10 << 20
"""More than in the end, while a graph is read."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a graph's weights: those that are multiplied, and those of which only rows are read."""

    multiplied: int
    looked_up: int


def weights_of(path: Path) -> Weights:
    graph = onnx.load(str(path), load_external_data=False).graph
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    multiplied = looked_up = 0
    for tensor in graph.initializer:
        _, size = external_range(tensor) or (0, 0)
        if readers[tensor.name] <= GATHERS:
            looked_up += size
        else:
            multiplied += size
    return Weights(multiplied, looked_up)


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of a daemon's private memory when it was ready, and the most while it loaded."""

    ready: int
    peak: int


@functools.cache
def load(package: Path) -> Load:
    peak = 0
    with running_daemon("onnx", "--threads", "1", model=package) as daemon:
        give_up_at = time.monotonic() + 4 * HANG_GUARD_S
        while "ready model=" not in daemon.log:
            assert daemon.process.poll() is None, daemon.log
            assert time.monotonic() < give_up_at
            peak = max(peak, anonymous_bytes(daemon.process.pid))
            time.sleep(0.005)
        ready = anonymous_bytes(daemon.process.pid)
        return Load(ready, max(peak, ready))


@pytest.mark.parametrize("quant", ["int8", "int4", "hybrid"])
def test_load_takes_the_multiplied_weights_once_and_none_that_are_looked_up(quant: Quant) -> None:
    package = smollm2_package(quant)
    paths = [path for path in package.glob("*.onnx") if path.name != KERNEL_CHECK]
    graphs = [weights_of(path) for path in paths]
    base, found = load(tiny_package(quant=quant)), load(package)
    taken, allowed = found.ready - base.ready, OWN_BYTES + GRAPH_BYTES * len(graphs)
    multiplied = sum(graph.multiplied for graph in graphs)
    assert taken < multiplied + allowed, (base, found, graphs)
    assert found.peak - base.peak < multiplied + allowed + PASSING_BYTES, (base, found, graphs)
    # A copy of the embedding would be seen:
    smallest_seen = taken + min(graph.looked_up for graph in graphs)
    assert smallest_seen > multiplied + allowed, (base, found, graphs)

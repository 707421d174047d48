"""What everything around the model costs: `ask` itself, and socket and JSON for each token of one stream.

    scripts/benchmark overhead

A daemon with a scripted runtime that answers at once serves a tiny model. `ask`: wall time of the command, less the
time that the daemon says it spent. A token: time of a long streamed answer over the socket, less that of the same
answer taken from the engine in process, divided by its tokens; both in turns, medians.

A step: several streams at once over as many connections, with a vocabulary of Qwen's size, greedy and sampled, nothing
guessed ahead; the time of one token of each. The script's own work (a row of logits to fill) and the client's count.

Measuring: the fastest of several rounds, since it is all of one piece: what a token costs in its histogram, and what it
takes to ask for all metrics over the socket while nothing else runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

from edgeqwen.doctor.package import QWEN3
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.meters import GAP_BOUNDS_S
from edgeqwen.metrics import Histogram
from edgeqwen.runtime.fake import FakeScript
from tests.daemons import DaemonProcess, running_daemon
from tests.engines import Listener, running

NUM_TOKENS = 1000
NUM_ROUNDS = 7
TOKENS = tuple(40 + index % 50 for index in range(NUM_TOKENS))
CAPACITY = 2048
NUM_STEPS = 300
STREAMS = (1, 2, 4, 8)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
}


def ask_once(daemon: DaemonProcess) -> dict[str, Any]:
    command = [sys.executable, "-m", "edgeqwen", "ask", "--socket", str(daemon.socket_path), "--json", "hi"]
    began = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    took_ms = (time.perf_counter() - began) * 1e3
    reply = json.loads(run.stdout.splitlines()[-1])
    return {"wall_ms": took_ms, "own_ms": took_ms - reply["ms"]["total"]}


def stream_once(daemon: DaemonProcess) -> float:
    """Milliseconds a token over the socket."""
    with daemon.client() as client:
        began = time.perf_counter()
        frames = list(client.stream("chat", prompt="hi", stream=True, max_tokens=NUM_TOKENS, ignore_eos=True))
        took = time.perf_counter() - began
    assert frames[-1]["usage"]["completion"] == NUM_TOKENS
    return took / NUM_TOKENS * 1e3


def step_once(daemon: DaemonProcess, num_streams: int, sampling: dict[str, Any]) -> float:
    """Milliseconds for one token of each of the streams."""

    def stream(_: int) -> float:
        with daemon.client() as client:
            frames = client.stream(
                "chat", prompt="hi", stream=True, max_tokens=NUM_STEPS, ignore_eos=True, speculate=False, **sampling
            )
            times = [time.perf_counter() for frame in frames if "delta" in frame]
        return times[-1] - times[0]

    with ThreadPoolExecutor(num_streams) as pool:
        return statistics.median(pool.map(stream, range(num_streams))) / (NUM_STEPS - 1) * 1e3


def steps() -> dict[str, dict[int, float]]:
    """By way of sampling and number of streams."""
    script = {"tokens": TOKENS, "capacity": CAPACITY, "vocab_size": QWEN3.vocab_size}
    with running_daemon("fake:" + json.dumps(script)) as daemon:
        daemon.wait_for(running=0)
        return {
            name: {
                num: round(statistics.median(step_once(daemon, num, sampling) for _ in range(NUM_ROUNDS)), 3)
                for num in STREAMS
            }
            for name, sampling in SAMPLING.items()
        }


def measuring(daemon: DaemonProcess) -> dict[str, float]:
    """Microseconds of a token's measuring, milliseconds of a scrape."""
    gaps = Histogram(GAP_BOUNDS_S)
    observing = timeit.repeat(lambda: gaps.observe(0.035), number=NUM_TOKENS, repeat=20 * NUM_ROUNDS)
    with daemon.client() as client:
        scraping = timeit.repeat(client.metrics, number=1, repeat=20 * NUM_ROUNDS)
    return {"token_us": round(min(observing) / NUM_TOKENS * 1e6, 3), "scrape_ms": round(min(scraping) * 1e3, 2)}


async def engine_once() -> float:
    """Milliseconds a token from the engine itself."""
    async with running(FakeScript(tokens=TOKENS, capacity=CAPACITY)) as rig:
        listener = Listener()
        messages = ({"role": "user", "content": "hi"},)
        given = GenerationInput(messages=messages, max_tokens=NUM_TOKENS, ignore_eos=True)
        began = time.perf_counter()
        await rig.inference.submit(given, owner="0", sink=listener)
        await listener.done()
        return (time.perf_counter() - began) / NUM_TOKENS * 1e3


def main() -> None:
    with running_daemon("fake:" + json.dumps({"tokens": TOKENS, "capacity": CAPACITY})) as daemon:
        daemon.wait_for(running=0)
        asks = [ask_once(daemon) for _ in range(NUM_ROUNDS)]
        measured = measuring(daemon)
        pairs = [(stream_once(daemon), uvloop.run(engine_once())) for _ in range(NUM_ROUNDS)]
    report = {
        "benchmark": "overhead",
        "ask_own_ms": round(statistics.median(each["own_ms"] for each in asks), 1),
        "socket_ms_per_token": round(statistics.median(socket for socket, _ in pairs), 3),
        "engine_ms_per_token": round(statistics.median(engine for _, engine in pairs), 3),
        "measuring": measured,
        "step_ms_by_streams": steps(),
        "socket_added_ms_per_token": round(statistics.median(socket - engine for socket, engine in pairs), 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

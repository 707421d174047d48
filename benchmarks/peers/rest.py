"""What an engine costs besides speed: time to start, memory at ready and at most, CPU time while it idles.

Ours is the daemon; a peer is a process that has loaded the model and computed a few tokens. Both are then given one
prompt of 128 tokens and 32 tokens to generate, and left alone.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._processes import cpu_s, memory, running_daemon
from benchmarks.peers.contenders import Contender
from benchmarks.peers.environments import CHECKOUT, Unavailable, ending, last_words, say

SETTLE_S = 1.0
NUM_PROMPT = 128
NUM_DECODED = 32


@dataclass(frozen=True, slots=True)
class Rest:
    """Seconds, bytes; `idle_percent` is of one core."""

    start_s: float
    ready_bytes: int
    ready_private_bytes: int
    peak_bytes: int
    idle_percent: float


@dataclass(frozen=True, slots=True)
class Resident:
    """A process that is ready: `work` makes it compute once."""

    pid: int
    start_s: float
    work: Callable[[], None]


def measure(
    contenders: Sequence[Contender], state: Path, *, rounds: int, idle_s: float, num_threads: int
) -> tuple[dict[str, Rest], dict[str, str]]:
    """By label: the figures (of a peer's settings the better one, figure by figure), and reasons where there are none.

    Start times are medians of the rounds; the rest does not vary and is taken in the first.
    """
    found: dict[str, Rest] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        say(f"start, memory, idle: {contender.label}")
        try:
            each = [_settled(contender, setting, state, rounds, idle_s, num_threads) for setting in contender.settings]
        except (Unavailable, RuntimeError) as error:
            failures[contender.label] = str(error)
            continue
        best: dict[str, Any] = {name: min(asdict(rest)[name] for rest in each) for name in asdict(each[0])}
        found[contender.label] = Rest(**best)
    return found, failures


def _settled(contender: Contender, setting: str, state: Path, rounds: int, idle_s: float, num_threads: int) -> Rest:
    with _started(contender, setting, state, num_threads):
        pass  # the first start may find things out about the machine, and reads the files into the page cache
    with _started(contender, setting, state, num_threads) as resident:
        starts = [resident.start_s]
        time.sleep(SETTLE_S)
        at_ready = memory(resident.pid)
        resident.work()
        peak = memory(resident.pid).peak
        time.sleep(SETTLE_S)
        before = cpu_s(resident.pid)
        time.sleep(idle_s)
        idle = (cpu_s(resident.pid) - before) / idle_s * 100
    for _ in range(rounds - 1):
        with _started(contender, setting, state, num_threads) as resident:
            starts.append(resident.start_s)
    return Rest(statistics.median(starts), at_ready.resident, at_ready.private, peak, idle)


def _started(
    contender: Contender, setting: str, state: Path, num_threads: int
) -> contextlib.AbstractContextManager[Resident]:
    if contender.environment is None:
        return _ours(contender, state, num_threads)
    threads = f"--threads={num_threads}"
    return _theirs(contender.environment.command("rest", str(contender.path), threads, f"--setting={setting}"))


@contextlib.contextmanager
def _ours(contender: Contender, state: Path, num_threads: int) -> Iterator[Resident]:
    with running_daemon(contender.path, state, "--threads", str(num_threads), *contender.options) as daemon:

        def work() -> None:
            with daemon.client() as client:
                client.request("generate", prompt="a" * NUM_PROMPT, max_tokens=NUM_DECODED, ignore_eos=True)

        yield Resident(daemon.pid, daemon.start_s, work)


@contextlib.contextmanager
def _theirs(command: Sequence[str]) -> Iterator[Resident]:
    pipe = subprocess.PIPE
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, cwd=CHECKOUT) as process,
    ):

        def wait_for(state: str) -> None:
            assert process.stdout
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    if json.loads(line).get("state") == state:
                        return
            code = process.wait()
            errors.seek(0)
            raise Unavailable(f"{command[2]} ended with {ending(code)}: {last_words(errors.read())}")

        def work() -> None:
            assert process.stdin
            process.stdin.write("work\n")
            process.stdin.flush()
            wait_for("done")

        try:
            wait_for("ready")
            yield Resident(process.pid, time.perf_counter() - began, work)
        finally:
            process.kill()

"""Ready means warm: the first request finds in memory what it needs, and a load leaves no trace but that."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon
from tests.models import smollm2_package, tiny_package, tiny_runtime
from tests.processes import Work, needs_thread_accounting, work_of

QUESTION = "Write about the colours of the sky, from the first light of the morning to the last of the evening. " * 4
MOST_CPU = 2.0
"""Of the first chat, beside the cheapest later one. Its prompt goes in two pieces, as nothing is known of speed yet."""

STRAY_FAULTS = 2
"""Pages read from a disk that a system short of memory has taken meanwhile; the rows of a cold embedding are more."""


def forget_pages(folder: Path) -> None:
    """Drop the pages of all files below `folder` from memory."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@contextlib.contextmanager
def ready_daemon(*flags: str, model: Path, environ: Mapping[str, str] | None = None) -> Iterator[DaemonProcess]:
    with running_daemon("onnx", "--threads", "1", *flags, model=model, environ=environ) as daemon:
        give_up_at = time.monotonic() + 4 * HANG_GUARD_S
        while "ready model=" not in daemon.log:
            assert daemon.process.poll() is None, daemon.log
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        yield daemon


def chat(daemon: DaemonProcess) -> Work:
    """The work of one chat over a new connection."""
    before = work_of(daemon.process.pid)
    with daemon.client() as client:
        client.request("chat", prompt=QUESTION, max_tokens=4, ignore_eos=True, cache=False)
    daemon.wait_for(running=0, kv_bytes=0)
    return work_of(daemon.process.pid) - before


def test_first_chat_after_a_cold_start_waits_for_no_disk_and_works_hardly_more_than_the_next(tmp_path: Path) -> None:
    needs_thread_accounting()
    package = smollm2_package("int8")
    flags = ("--state-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache"))
    with ready_daemon(*flags, model=package):
        pass  # the copy for this processor has been made and its profile measured
    for folder in (package, tmp_path):
        forget_pages(folder)
    with ready_daemon(*flags, model=package) as daemon:
        first, *later = [chat(daemon) for _ in range(4)]
    assert first.num_major_faults <= STRAY_FAULTS, first
    assert first.num_minor_faults < 2 * max(work.num_minor_faults for work in later), (first, later)
    assert first.cpu_ns < MOST_CPU * min(work.cpu_ns for work in later), (first, later)


def imports(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("import time:")]


def test_first_chat_imports_nothing() -> None:
    sampled = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3, "logprobs": True, "top_logprobs": 2}
    limits = {"max_tokens": 12, "ignore_eos": True, "stop": ["###"], "repetition_penalty": 1.1, "deadline_ms": 60_000}
    with ready_daemon(model=tiny_package(quant="hybrid"), environ={"PYTHONPROFILEIMPORTTIME": "1"}) as daemon:
        before = imports(daemon.log)
        with daemon.client() as client:
            frames = list(client.stream("chat", prompt="hello world", stream=True, **sampled, **limits))
            assert frames[-1]["usage"]["completion"] == 12
            client.request("tokenize", text="hello")
            client.request("stats")
        assert any("edgeqwen.daemon" in line for line in before)
        assert imports(daemon.log)[len(before) :] == []


def test_load_leaves_no_trace_in_what_the_daemon_says_of_itself() -> None:
    with ready_daemon(model=tiny_package(quant="hybrid")) as daemon, daemon.client() as client:
        stats = client.request("stats")
    assert (stats["running"], stats["queued"], stats["kv_bytes"]) == (0, 0, 0)
    assert not any([*stats["totals"].values(), *stats["tok_s"].values(), *stats["speculation"].values()])


class CountedSession(ort.InferenceSession):  # type: ignore[misc]  # onnxruntime has no types
    """A session that notes with how many rows of tokens it is run."""

    opened: ClassVar[list[CountedSession]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[int] = []
        self.opened.append(self)

    def io_binding(self) -> ort.IOBinding:
        io = super().io_binding()
        bind = io.bind_cpu_input

        def note_rows(name: str, array: NDArray[Any]) -> None:
            if name == "input_ids":
                io.num_rows = array.shape[1]
            bind(name, array)

        io.bind_cpu_input = note_rows
        return io

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        self.rows.append(iobinding.num_rows)
        super().run_with_iobinding(iobinding, run_options)


def test_every_graph_has_run_when_the_runtime_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "InferenceSession", CountedSession)
    monkeypatch.setattr(CountedSession, "opened", [])
    runtime = tiny_runtime(tiny_package(quant="hybrid"))
    rows = [session.rows for session in CountedSession.opened if len(session.get_inputs()) > 2]
    decode, prefill = sorted(rows, key=lambda of_one: min(of_one, default=0))  # they are opened at once, in any order
    assert min(decode, default=0) in {1, 2}
    assert max(prefill, default=0) >= 8
    runtime.close()

"""What `doctor` finds of the socket, of restrictions and of a real run."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.doctor import Finding
from edgeqwen.doctor import trial as trial_module
from edgeqwen.doctor.access import SocketReport, examine_socket, socket_findings
from edgeqwen.doctor.sandbox import Sandbox, disk_findings, free_bytes, read_sandbox, sandbox_findings
from edgeqwen.doctor.trial import Trial, run_trial, trial_findings, trial_obstacle
from tests.daemons import run_command, running_daemon, script_of
from tests.machines import put
from tests.models import tiny_package


def topics(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.topic) for finding in findings]


# The socket.


def test_a_daemon_is_found_and_says_how_it_is() -> None:
    with running_daemon(script_of("x")) as daemon:
        daemon.wait_until_ready()
        report = examine_socket(daemon.socket_path)
    assert (report.kind, report.mode, report.answer, report.state) == ("socket", 0o600, "answers", "ready")
    assert report.owner
    assert topics(socket_findings(report, frozenset())) == []
    assert examine_socket(daemon.socket_path).kind == "none"


def test_what_is_no_socket_and_one_that_nobody_listens_on_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert topics(socket_findings(examine_socket(tmp_path / "file"), frozenset())) == [("warning", "socket-place")]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "stale"))
    (tmp_path / "stale").chmod(0o600)
    report = examine_socket(tmp_path / "stale")
    assert report.answer == "refuses"
    assert topics(socket_findings(report, frozenset())) == [("note", "socket-stale")]


@pytest.mark.parametrize("reply", [b"", b"[1]\n", b"no json\n", b'{"done":true}\n'])
def test_whoever_listens_and_is_no_daemon_is_called_silent(reply: bytes, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen()

        def serve() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        report = examine_socket(tmp_path / "s")
        thread.join()
    assert report.answer == "silent"
    assert ("warning", "socket-silent") in topics(socket_findings(report, frozenset()))


def test_who_may_not_connect_is_told_which_group_may() -> None:
    report = SocketReport("/run/x", "socket", 0o660, "root", "edgeqwen", "denied")
    (finding,) = socket_findings(report, frozenset({"users"}))
    assert "usermod -aG edgeqwen" in finding.advice
    (finding,) = socket_findings(replace(report, mode=0o600), frozenset())
    assert "ask as root" in finding.advice
    assert topics(socket_findings(replace(report, mode=0o666, answer="answers"), frozenset())) == [
        ("note", "socket-open")
    ]


# Restrictions.


def sandbox(**facts: Any) -> Sandbox:
    usual: dict[str, Any] = {
        "container": "",
        "no_new_privileges": False,
        "seccomp": "",
        "denies_write_execute": False,
        "is_proc_whole": True,
        "max_files": 1024,
        "max_locked_bytes": None,
    }
    return Sandbox(**(usual | facts))


def test_restrictions_are_read_from_proc(tmp_path: Path) -> None:
    files = {"proc/self/status": "Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\n", "run/.containerenv": ""}
    put(tmp_path, files)
    found = read_sandbox(tmp_path)
    assert (found.no_new_privileges, found.seccomp, found.container, found.is_proc_whole) == (
        True,
        "filtered",
        "podman",
        False,
    )
    assert "system calls filtered" in found.to_text()
    put(tmp_path, {"proc/cpuinfo": "x", "proc/meminfo": "x", "run/systemd/container": "lxc\n"})
    found = read_sandbox(tmp_path)
    assert (found.container, found.is_proc_whole) == ("lxc", True)
    assert read_sandbox(tmp_path / "nothing").to_text()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, []),
        ({"is_proc_whole": False}, [("warning", "proc-hidden")]),
        ({"max_files": 40}, [("warning", "open-files")]),
        ({"max_files": None, "denies_write_execute": True}, [("note", "write-execute")]),
    ],
)
def test_what_of_them_costs_something(facts: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert topics(sandbox_findings(sandbox(**facts))) == expected


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes(tmp_path / "not" / "there") == free_bytes(tmp_path)
    folders = {"service.state_dir": tmp_path, "service.cache_dir": tmp_path / "cache"}
    for free, expected in (
        (10 << 20, [("warning", "disk-full"), ("warning", "disk-full")]),
        (1 << 30, [("note", "disk-small")]),
        (100 << 30, []),
    ):
        monkeypatch.setattr("edgeqwen.doctor.sandbox.free_bytes", lambda _, free=free: free)
        assert topics(disk_findings(folders, 2 << 30)) == expected


# A run.

TRIAL = Trial(1.0, 100_000.0, 500.0, 50.0, 20e9, 25e9)


def test_the_time_of_a_request_is_split() -> None:
    assert TRIAL.split == {"load_s": 1.0, "tokenize_s": 0.005, "prefill_s": 1.0, "decode_s": 4.0}
    assert TRIAL.memory_share == pytest.approx(0.8)
    assert "500 tokens of a prompt: read in 5 ms, computed in 1.0 s" in next(TRIAL.lines())


@pytest.mark.parametrize(
    ("changes", "quant", "threads", "topic", "advice"),
    [
        ({}, "int8", 2, "bottleneck-memory", "--quant hybrid"),
        ({}, "int4", 2, "bottleneck-memory", "a smaller model"),
        ({"weights_bytes_s": 5e9}, "int8", 1, "bottleneck-cores", "cpu.threads"),
        ({"weights_bytes_s": 5e9}, "int8", 4, "bottleneck-cores", "governor"),
        ({"prefill_tok_s": 50.0}, "int4", 2, "bottleneck-prefill", "`hybrid` and `int8` read prompts fastest"),
        ({"prefill_tok_s": 50.0}, "int8", 2, "bottleneck-prefill", "faster cores"),
    ],
)
def test_the_bottleneck_comes_with_the_setting_that_changes_it(
    changes: dict[str, float], quant: str, threads: int, topic: str, advice: str
) -> None:
    (finding,) = trial_findings(replace(TRIAL, **changes), quant=quant, num_threads=threads, num_cores=4)
    assert finding.topic == topic
    assert advice in finding.advice


def test_a_slow_load_is_told() -> None:
    found = trial_findings(replace(TRIAL, load_s=30.0), quant="int8", num_threads=2, num_cores=2)
    assert ("note", "slow-load") in topics(found)


def test_a_real_run_is_measured_and_told_as_json() -> None:
    report = json.loads(run_command("doctor", str(tiny_package()), "--json").stdout)
    assert report["trial"]["decode_tok_s"] > 0
    assert report["trial"]["memory_bytes_s"] > 1e6
    assert set(report["trial"]["split"]) == {"load_s", "tokenize_s", "prefill_s", "decode_s"}
    assert {"sandbox", "socket"} <= set(report)
    quick = json.loads(run_command("doctor", str(tiny_package()), "--json", "--quick").stdout)
    assert quick["trial"] is None


@pytest.mark.parametrize(
    ("num_active", "free_bytes", "words"),
    [(0, None, ""), (0, 10**9, ""), (0, 10**9 - 1, "stop the daemon"), (2, None, "`edgeqwen stats`")],
)
def test_a_run_that_would_do_harm_is_left_out(num_active: int, free_bytes: int | None, words: str) -> None:
    found = trial_obstacle(num_active=num_active, needed_bytes=10**9, free_bytes=free_bytes)
    assert (found is not None) == bool(words)
    assert found is None or (found.topic == "trial-skipped" and words in found.advice)


def test_a_daemon_at_work_is_not_disturbed() -> None:
    with running_daemon(script_of("x" * 400, step_s=0.05), "--context", "1024") as daemon:
        daemon.wait_until_ready()
        with daemon.client() as client:
            replies = client.stream("chat", prompt="x", stream=True, max_tokens=400)
            next(replies)
            arguments = ("doctor", str(tiny_package()), "--socket", str(daemon.socket_path), "--json")
            report = json.loads(run_command(*arguments).stdout)
    assert report["socket"]["active"] == 1
    assert report["trial"] is None
    assert "trial-skipped" in [finding["topic"] for finding in report["findings"]]


@pytest.mark.parametrize(
    ("program", "topic", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "trial-crashed", "SIGILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "trial-crashed", "SIGKILL"),
        ("import sys; sys.exit('edgeqwen: the graph is broken')", "trial-failed", "the graph is broken"),
        ("import time; time.sleep(60)", "trial-slow", "not over"),
    ],
)
def test_a_run_that_ends_badly_is_a_finding(
    program: str, topic: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "edgeqwen").mkdir()
    (tmp_path / "edgeqwen" / "__init__.py").touch()
    (tmp_path / "edgeqwen" / "__main__.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial_module, "GIVE_UP_S", 2.0 if topic == "trial-slow" else 30.0)
    found = run_trial("any", ())
    assert isinstance(found, Finding)
    assert found.topic == topic
    assert text in found.text + found.advice
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_every_finding_stands_in_the_handbook() -> None:
    root = Path(__file__).parent.parent
    handbook = (root / "docs/operations.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w-]+)`", handbook.partition("## What doctor finds")[2]))
    found: set[str] = set()
    for path in (root / "edgeqwen/doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding" and len(node.args) > 1:
                found |= {str(each.value) for each in ast.walk(node.args[1]) if isinstance(each, ast.Constant)}
    assert len(found) > 25
    assert found - listed == set()

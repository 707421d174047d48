"""The Python of docs/clients.md, and its batches, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client_programs import run_tool, tool
from tests.daemons import HANG_GUARD_S, DaemonProcess, run_command, running_daemon, script_of

ROOT = str(Path(__file__).parent.parent)
PAGE = (Path(ROOT) / "docs" / "clients.md").read_text(encoding="utf-8")


def block(info: str) -> str:
    """The code of the block with this info string."""
    (found,) = re.findall(rf"^```{info}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(script_of("Hello!")) as daemon:
        daemon.wait_for(running=0)
        yield daemon


@pytest.mark.parametrize("info", ["python sync", "python async"])
def test_the_python_of_the_page_runs_and_runs_again(daemon: DaemonProcess, info: str) -> None:
    environ = {**os.environ, "EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)}
    command = [sys.executable, "-W", "error", "-c", block(info)]
    for _ in range(2):
        result = subprocess.run(command, env=environ, capture_output=True, check=False, timeout=HANG_GUARD_S)
        assert (result.returncode, result.stderr) == (0, b"")
        assert b"Hello!" in result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a file of questions."""
    (tmp_path / "questions.json").write_text(json.dumps([{"id": "a", "prompt": "x"}, {"prompt": "x"}]))
    return tmp_path


def test_the_command_of_the_page_runs(daemon: DaemonProcess, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    name, *flags = block("sh batch").split()
    assert name == "edgeqwen"
    # A package that is not installed is found from the folder where the tests run.
    environ = {"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path), "PYTHONPATH": ROOT}
    result = run_command(*flags, environ=environ)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert {line.get("id", line.get("index")): line["text"] for line in lines} == {"a": "Hello!", 1: "Hello!"}


def test_the_recipe_of_the_page_asks_for_each_file_once(daemon: DaemonProcess, tmp_path: Path) -> None:
    tool("jq")
    environ = {**os.environ, "EDGEQWEN_SOCKET_PATH": str(daemon.socket_path), "PYTHONPATH": ROOT}
    (tmp_path / "a b.txt").write_text('A "lamp"\non a table.')
    (tmp_path / "c.txt").write_text("A lighthouse.")
    script = f'edgeqwen() {{ {shlex.quote(sys.executable)} -m edgeqwen "$@"; }}\n{block("sh recipe")}'
    summaries = []
    for name in ("a b.txt", "d.txt"):
        (tmp_path / name).touch()
        result = run_tool("sh", "-ec", script, env=environ, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        summaries.append(sorted(result.stdout.splitlines()))
    first = [b"a b.txt: Hello!", b"c.txt: Hello!"]
    assert summaries == [first, [*first, b"d.txt: Hello!"]]
    assert b"1 answered, 2 were there before" in result.stderr


def test_the_request_of_the_page_is_answered(daemon: DaemonProcess, folder: Path) -> None:
    tool("curl")
    environ = {**os.environ, "S": str(daemon.socket_path)}
    result = run_tool("sh", "-c", block("sh http"), env=environ, cwd=folder)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[-1] == {"done": True, "n": 2, "failed": 0}

"""What docs/clients.md, docs/protocol.md and the README show, run as it stands there against a daemon."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client_programs import CLIENTS, Program, build_go, run_tool, tool
from tests.daemons import DaemonProcess, running_daemon, script_of

PAGE = (CLIENTS.parent / "clients.md").read_text(encoding="utf-8")
PROTOCOL = (CLIENTS.parent / "protocol.md").read_text(encoding="utf-8")
README = (CLIENTS.parent.parent / "README.md").read_text(encoding="utf-8")
SYSTEM_SOCKET = "/run/edgeqwen/edgeqwen.sock"


def block(page: str, heading: str, language: str) -> str:
    """The first code of a language below a heading."""
    found = re.search(rf"^#+ {re.escape(heading)}\n.*?^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found.group(1)


ONE_LINERS = [
    line
    for line in (
        *block(PAGE, "One line in a shell", "sh").splitlines(),
        *block(PROTOCOL, "The socket: `eqp/1`", "sh").splitlines(),
    )
    if not line.startswith("S=")
] + [line.replace("/tmp/eq/s", "$S") for line in README.splitlines() if line.startswith("""printf '{"op":"chat",""")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(script_of("Hello!")) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project that the files were copied into."""
    return shutil.copytree(CLIENTS, tmp_path / "project")


@pytest.mark.parametrize("command", dict.fromkeys(ONE_LINERS))
def test_one_line_in_a_shell_prints_the_answer(command: str, daemon: DaemonProcess) -> None:
    for word in ("socat", "nc", "curl", "jq"):
        if word in shlex.split(command):
            tool(word)
    result = run_tool("sh", "-c", command, env=environment(daemon))
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"Hello!" in result.stdout


def test_socat_is_always_told_to_wait() -> None:
    """Its own patience is half a second, and then it says that all is well."""
    for path in (CLIENTS.parent.parent / "README.md", *CLIENTS.parent.rglob("*.*")):
        for command in re.findall(r"\bsocat -.*|\bsocat [A-Z/].*", path.read_text(encoding="utf-8")):
            assert command.startswith("socat -t 60 "), (path.name, command)


def environment(daemon: DaemonProcess) -> dict[str, str]:
    environ = Program("c").environment(daemon.socket_path)
    return environ | {"S": str(daemon.socket_path), "EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)}


@pytest.mark.parametrize("path", ["health", "ready", "stats", "v1/models"])
def test_curl_gets_what_needs_no_body(path: str, daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        client.request("chat", prompt="x")  # the model is loaded then
    command = (tool("curl"), "-sS", "-f", "--unix-socket", str(daemon.socket_path), f"http://x/{path}")
    result = run_tool(*command)
    assert (result.returncode, result.stderr) == (0, b"")
    assert isinstance(json.loads(result.stdout), dict)


def test_the_shell_functions_do_what_the_page_shows(daemon: DaemonProcess, folder: Path) -> None:
    tool("socat")
    script = block(PAGE, "Shell functions", "sh")
    result = run_tool("sh", "-ec", script, env=environment(daemon), cwd=folder)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.count(b"Hello!") == sum(line.count("eq_") for line in script.splitlines()[1:])


def test_the_c_example_is_built_as_the_page_shows(daemon: DaemonProcess, folder: Path) -> None:
    tool("cc")
    result = run_tool("sh", "-ec", block(PAGE, "C", "sh"), env=environment(daemon), cwd=folder, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hello!", b"")


def test_the_go_example_is_run_as_the_page_shows(daemon: DaemonProcess, folder: Path) -> None:
    cache = build_go().parent / "go-cache"  # what was compiled for the other tests is taken from there
    environ = {"GOCACHE": str(cache), "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"} | environment(daemon)
    result = run_tool("sh", "-ec", block(PAGE, "Go", "sh"), env=environ, cwd=folder, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hello!", b"")


@pytest.mark.parametrize("interpreter", [sys.executable, "micropython"], ids=["cpython", "micropython"])
def test_the_micropython_example_runs(interpreter: str, daemon: DaemonProcess, folder: Path) -> None:
    script = block(PAGE, "MicroPython", "python").replace(SYSTEM_SOCKET, str(daemon.socket_path))
    (folder / "example.py").write_text(script)
    result = run_tool(tool(interpreter), "example.py", env=environment(daemon), cwd=folder)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hello!", b"")


def test_the_node_example_runs(daemon: DaemonProcess, folder: Path) -> None:
    script = block(PAGE, "Node", "js").replace(SYSTEM_SOCKET, str(daemon.socket_path))
    (folder / "example.mjs").write_text(script)
    result = run_tool(tool("node"), "example.mjs", env=environment(daemon), cwd=folder)
    assert (result.returncode, result.stdout) == (0, b"Hello!")
    assert b"completion" in result.stderr


def test_every_file_is_named_on_the_page() -> None:
    files = {path.name for path in CLIENTS.iterdir() if path.is_file()}
    assert files == set(re.findall(r"\]\(clients/([^)]+)\)", PAGE))

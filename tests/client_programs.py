"""The clients of docs/clients as programs: how each is built and called, and what it needs."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import HANG_GUARD_S

CLIENTS = Path(__file__).parent.parent / "docs" / "clients"
CFLAGS = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
BUILD_GUARD_S = 300.0
MICROPYTHON_ARGUMENT_BYTES = 255
ENDLESS = 'fake:{"step_s":0.05,"capacity":100000}'
"""A runtime whose answers take minutes: nothing in them repeats, so no token is guessed."""
SHELL_CALL = '. "$1"; shift; if [ -n "${2-}" ]; then eq_ask -s "$2" -- "$1"; else eq_ask -- "$1"; fi'


def tool(name: str) -> str:
    """The path of a tool, beside the interpreter too (of a virtual environment that is not on the path); skips the test
    where there is none.
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@functools.cache
def build_folder() -> Path:
    """One for a test run, removed at its end; everybody may enter it."""
    folder = Path(tempfile.mkdtemp(prefix="eq-clients-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run_tool(*command: str, timeout: float = HANG_GUARD_S, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, check=False, timeout=timeout, **settings)


@functools.cache
def has_sanitizers(compiler: str) -> bool:
    source = build_folder() / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    output = str(build_folder() / "empty")
    built = run_tool(compiler, *SANITIZERS, str(source), "-o", output, timeout=BUILD_GUARD_S)
    return built.returncode == 0 and run_tool(output).returncode == 0


@functools.cache
def build_c(source: str, name: str, *flags: str) -> Path:
    """A C program with the header at hand; it must compile without a warning."""
    compiler = tool("cc")
    if "-fsanitize=address,undefined" in flags and not has_sanitizers(compiler):
        pytest.skip("the C compiler has no sanitizers")
    path = build_folder() / f"{name}.c"
    path.write_text(source)
    output = build_folder() / name
    command = (compiler, *CFLAGS, *flags, f"-I{CLIENTS}", str(path), "-o", str(output))
    built = run_tool(*command, timeout=BUILD_GUARD_S)
    assert built.returncode == 0, built.stderr.decode()
    assert built.stderr == b""
    return output


@functools.cache
def build_go() -> Path:
    go = tool("go")
    output = build_folder() / "ask-go"
    environ = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
    environ.setdefault("GOCACHE", str(build_folder() / "go-cache"))
    built = run_tool(go, "build", "-o", str(output), str(CLIENTS / "ask.go"), env=environ, timeout=BUILD_GUARD_S)
    assert built.returncode == 0, built.stderr.decode()
    return output


@dataclass(frozen=True, slots=True)
class Program:
    """A client on the command line. `environ` is what it is given besides the socket."""

    name: str
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_shell(self) -> bool:
        return self.name.startswith("sh ")

    def command(self, socket_path: Path, prompt: str, session: str | None = None) -> list[str]:
        """What runs it; skips the test where that is not installed."""
        more = [] if session is None else [session]
        arguments = [str(socket_path), prompt, *more]
        if self.is_shell:
            _, shell, transport = self.name.split()
            tool(transport)
            interpreter = [tool("busybox"), "sh"] if shell == "busybox" else [tool(shell)]
            return [*interpreter, "-c", SHELL_CALL, "sh", str(CLIENTS / "edgeqwen.sh"), *arguments[1:]]
        match self.name:
            case "c":
                return [str(build_c((CLIENTS / "ask.c").read_text(), "ask", *SANITIZERS)), *arguments]
            case "go":
                return [str(build_go()), *arguments]
            case "node":
                return [tool("node"), str(CLIENTS / "ask.mjs"), *arguments]
            case "micropython":
                return [tool("micropython"), str(CLIENTS / "edgeqwen_micropython.py"), *arguments]
            case _:
                assert self.name == "cpython"
                return [sys.executable, str(CLIENTS / "edgeqwen_micropython.py"), *arguments]

    def environment(self, socket_path: Path) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEQWEN_", "EQ_"))}
        if self.is_shell:
            environ |= {"EDGEQWEN_SOCKET_PATH": str(socket_path), "EQ_TRANSPORT": self.name.split()[2]}
        return environ | dict(self.environ)

    def run(
        self, socket_path: Path, prompt: str = "x", session: str | None = None, **settings: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Ask once and wait for the end."""
        stdin = ""
        if self.name == "micropython" and len(prompt.encode()) > MICROPYTHON_ARGUMENT_BYTES:
            stdin, prompt = prompt, "-"
        command = self.command(socket_path, prompt, session)
        return run_tool(*command, input=stdin.encode(), env=self.environment(socket_path), **settings)

    def start(self, socket_path: Path, prompt: str = "x") -> subprocess.Popen[bytes]:
        """Ask; the answer is to be read from `stdout`."""
        return subprocess.Popen(
            self.command(socket_path, prompt),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=self.environment(socket_path),
        )


SHELLS = ("sh dash socat", "sh dash nc", "sh dash curl", "sh bash nc", "sh busybox socat")
PROGRAMS = tuple(Program(name) for name in ("c", "go", "node", "cpython", "micropython", *SHELLS))

"""Nothing is written outside of where it was asked for, and nothing phones home."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemons import run_command, running_daemon
from tests.models import tiny_package


def home_of(folder: Path) -> dict[str, str]:
    """Environment of a user whose home is an empty folder."""
    home = folder / "home"
    home.mkdir()
    return {"HOME": str(home), "XDG_CACHE_HOME": "", "XDG_DATA_HOME": "", "XDG_STATE_HOME": ""}


def test_running_a_model_leaves_nothing_in_the_home_directory(tmp_path: Path) -> None:
    environ = home_of(tmp_path)
    flags = ("--prompt", "4", "--decode", "2", "--threads", "1")
    assert run_command("bench", str(tiny_package()), *flags, environ=environ).returncode == 0
    assert list((tmp_path / "home").iterdir()) == []


def test_daemon_and_its_client_leave_nothing_in_the_home_directory(tmp_path: Path) -> None:
    environ = home_of(tmp_path)
    with running_daemon("onnx", "--threads", "1", model=tiny_package(), environ=environ) as daemon:
        with daemon.client() as client:
            assert client.request("chat", prompt="hi", max_tokens=2)["done"]
        run_command("ask", "--socket", str(daemon.socket_path), "--max-tokens", "2", "hi", environ=environ)
    assert list((tmp_path / "home").iterdir()) == []


def test_import_and_run_open_no_internet_socket(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    package = tiny_package()
    source = package.with_name(f"{package.name}-source")
    for command in (
        ["import", str(source), "--out", str(tmp_path / "out")],
        ["bench", str(package), "--prompt", "4", "--decode", "2"],
    ):
        traced = [strace, "-f", "-e", "trace=socket", "-o", str(trace), sys.executable, "-m", "edgeqwen", *command]
        done = subprocess.run(traced, capture_output=True, timeout=60, check=False)
        if b"ptrace" in done.stderr.lower() and done.returncode != 0:
            pytest.skip("strace may not trace here")
        assert done.returncode == 0, done.stderr
        assert "AF_INET" not in trace.read_text()

"""From a hub to an answer, by the commands themselves: a local server acts as the hub and has a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from edgeqwen.core.model import Source
from edgeqwen.core.package import open_package, verify_digests
from tests.checkpoints import write_safetensors_model
from tests.daemons import run_command
from tests.hub_server import COMMIT, Hub, serve_hub

REPO = "Qwen/Qwen3-0.6B"

QUICKSTART = """
import sys
from pathlib import Path
from edgeqwen.cli import quickstart
models = Path(sys.argv.pop(1))
quickstart.models_folder = lambda: models  # as root it would be the system's
sys.exit(quickstart.main())
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Has a tiny model under the name of the real one."""
    write_safetensors_model(tmp_path / "source", num_shards=2)
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    with serve_hub(files, repo=REPO) as server:
        yield server


def environ(hub: Hub, home: Path) -> Mapping[str, str]:
    """A user with an empty home whose hub is the local server."""
    home.mkdir(exist_ok=True)
    places = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "HF_HOME": str(home / "hf")}
    return {**places, "HF_ENDPOINT": hub.endpoint, "MODELSCOPE_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}


@pytest.mark.parametrize(("prefix", "kind"), [("", "hub"), ("modelscope:", "modelscope")])
def test_a_pulled_model_is_a_package_that_pins_its_revision(prefix: str, kind: str, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "package"
    command = ["pull", prefix + REPO, "--quant", "int8", "--out", str(out)]
    result = run_command(*command, environ=environ(hub, tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode().strip() == str(out)
    package = open_package(out)
    verify_digests(package)
    assert package.manifest.source == Source(kind, REPO, COMMIT)  # type: ignore[arg-type]  # one of the two above


def test_a_model_that_the_hub_does_not_have_is_one_line_and_exit_66(hub: Hub, tmp_path: Path) -> None:
    result = run_command("pull", "Qwen/Nothing", environ=environ(hub, tmp_path / "home"))
    assert result.returncode == 66
    assert b"Qwen/Nothing" in result.stderr
    assert b"Traceback" not in result.stderr


def test_quickstart_pulls_from_a_hub_in_reach_then_answers_and_needs_it_no_more(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-c", QUICKSTART, str(home / "models"), "--cache", str(home / "cache"), "Why?"]
    settings = {**os.environ, **environ(hub, home)}
    first = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert first.returncode == 0, first.stderr
    assert "pulling Qwen/Qwen3-0.6B" in first.stderr
    assert "tokens/s" in first.stderr
    assert first.stdout
    package = open_package(home / "models" / "qwen3-0.6b")
    assert package.manifest.source == Source("hub", REPO, COMMIT)
    num_requests = len(hub.requests)
    second = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 0, second.stderr
    assert len(hub.requests) == num_requests

"""What a daemon that does not start, or that has ended, leaves where its socket would be or was: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemons import run_command, running_daemon, script_of, write_text_model

REFUSALS = {
    "a folder that is missing": (("--socket", "{here}/missing/s"), 78),
    "a file in the place": (("--socket", "{here}/file"), 78),
    "a folder in the place": (("--socket", "{here}"), 78),
    "an address of others without keys": (("--http", "0.0.0.0:0"), 78),
    "an address that is none": (("--http", "nowhere"), 78),
    "a model that is none": (("--model", "{here}/empty"), 66),
    "a model that is missing": (("--model", "{here}/none"), 66),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_refused_daemon_leaves_nothing_behind(tmp_path: Path, why: str) -> None:
    flags, code = REFUSALS[why]
    here = tmp_path / "here"
    (here / "empty").mkdir(mode=0o755, parents=True)
    (here / "file").write_text("precious")
    model = write_text_model(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    base = ("serve", "--model", str(model), "--socket", str(here / "s"), "--runtime", "fake:")
    result = run_command(*base, *(flag.format(here=here) for flag in flags))
    assert result.returncode == code, result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_daemon_that_was_stopped_leaves_neither_socket_nor_lock() -> None:
    with running_daemon(script_of("x")) as daemon:
        folder = daemon.socket_path.parent
        assert (folder / "s.lock").exists()
        daemon.process.terminate()
        assert daemon.process.wait(60) == 0
        assert not {"s", "s.lock"} & {path.name for path in folder.iterdir()}

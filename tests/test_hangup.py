"""The daemon when its terminal closes: SIGHUP ends it as SIGTERM does, unless it was told to ignore it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from edgeqwen.client import Client
from tests.daemons import HANG_GUARD_S, running_daemon, script_of, write_text_model


def test_sighup_lets_the_running_answer_end() -> None:
    with running_daemon(script_of("to the end", step_s=0.05)) as daemon, daemon.client() as client:
        frames = client.stream("chat", prompt="x", stream=True)
        next(frames)
        daemon.process.send_signal(signal.SIGHUP)
        assert [*frames][-1]["finish"] == "stop"
        assert daemon.wait() == 0
        assert not daemon.socket_path.exists()


def test_sighup_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    flags = ["serve", "--runtime", "fake:", "--model", str(write_text_model(tmp_path / "m"))]
    command = ["sh", "-c", 'trap "" HUP; exec "$0" "$@"', sys.executable, "-m", "edgeqwen", *flags]
    command += ["--socket", str(tmp_path / "s")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            while b"ready" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGHUP)
            with Client.connect(tmp_path / "s") as client:
                assert client.request("ready")["ok"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_GUARD_S) == 0
        finally:
            process.kill()

"""Daemons for tests: real processes on a socket of their own, with scripted answers unless a package is given."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeqwen.client import Client, NoDaemon
from tests.engines import TEMPLATE
from tests.tiny_tokenizers import byte_level, byte_level_file

HANG_GUARD_S = 30.0


@dataclass(frozen=True, slots=True)
class DaemonProcess:
    """A running `edgeqwen serve`; `log_path` holds its stderr."""

    process: subprocess.Popen[bytes]
    socket_path: Path
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def http_port(self) -> int:
        """The TCP port of a daemon that was given `--http`."""
        give_up_at = time.monotonic() + HANG_GUARD_S
        while (found := re.search(r"listening http=\S+:(\d+) ", self.log)) is None:
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.01)
        return int(found[1])

    def client(self) -> Client:
        return Client.connect(self.socket_path)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(HANG_GUARD_S)

    def wait_until_ready(self) -> None:
        """Until the model is loaded and the daemon has said so."""
        give_up_at = time.monotonic() + HANG_GUARD_S
        while " INFO ready model=" not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.01)

    def wait_for(self, **facts: Any) -> dict[str, Any]:
        """Ask `stats` until it shows these values; while the model loads, that nothing runs says nothing."""
        self.wait_until_ready()
        give_up_at = time.monotonic() + HANG_GUARD_S
        while True:
            with self.client() as client:
                frame = client.request("stats")
            if all(frame[key] == value for key, value in facts.items()):
                return frame
            assert time.monotonic() < give_up_at, frame
            time.sleep(0.01)


def write_text_model(folder: Path, **generation_config: Any) -> Path:
    """A folder that does for a scripted runtime: a small tokenizer, a template, greedy defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(byte_level_file())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False} | generation_config))
    return folder


def script_of(*texts: str, **settings: Any) -> str:
    """`--runtime` value: sequence after sequence says these texts (markers as their ids), then ends."""
    scripts = [byte_level().encode(text, special=True) for text in texts]
    return "fake:" + json.dumps({"scripts": scripts, **settings})


@functools.cache
def state_folder() -> tempfile.TemporaryDirectory[str]:
    """One for all commands of a test run, removed at its end."""
    return tempfile.TemporaryDirectory(prefix="eq-state-")


def start_command(*flags: str, environ: Mapping[str, str] | None = None, **popen: Any) -> subprocess.Popen[bytes]:
    """`edgeqwen FLAGS` as a process of its own, which keeps its state apart from the machine's."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("EDGEQWEN_")}
    env["STATE_DIRECTORY"] = state_folder().name
    return subprocess.Popen([sys.executable, "-m", "edgeqwen", *flags], env=env | dict(environ or {}), **popen)


def run_command(
    *flags: str, stdin: bytes = b"", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """`edgeqwen FLAGS` to its end."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start_command(*flags, environ=environ, **pipes) as process:
        try:
            out, err = process.communicate(stdin, timeout=HANG_GUARD_S)
        except subprocess.TimeoutExpired:
            process.kill()  # leaving the `with` would wait for it
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def running_daemon(
    runtime: str = "fake:", *flags: str, model: Path | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[DaemonProcess]:
    """A daemon that listens (it may still be loading); killed at the end if the test did not stop it.

    It knows nothing of sessions and caches of others, unless `environ` names a state directory.
    """
    with tempfile.TemporaryDirectory(prefix="eq-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environ = {"STATE_DIRECTORY": str(folder / "state"), **(environ or {})}
        model = model or write_text_model(folder / "model")
        socket_path, log_path = folder / "s", folder / "log"
        command = ["serve", "--socket", str(socket_path), "--model", str(model), "--runtime", runtime, *flags]
        with log_path.open("wb") as log:
            process = start_command(*command, environ=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        daemon = DaemonProcess(process, socket_path, log_path)
        try:
            wait_until_listening(daemon)
            yield daemon
        finally:
            process.kill()
            process.wait()


def wait_until_listening(daemon: DaemonProcess, within_s: float = HANG_GUARD_S) -> None:
    """Until the daemon accepts connections; it may still be loading then."""
    give_up_at = time.monotonic() + within_s
    while daemon.process.poll() is None and time.monotonic() < give_up_at:
        with contextlib.suppress(NoDaemon):
            daemon.client().close()
            return
        time.sleep(0.01)
    raise AssertionError(f"the daemon does not listen: {daemon.log}")

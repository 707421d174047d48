"""The daemon's life, from outside: start, signals, draining, what it exits with, what it logs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.client import CutOff
from edgeqwen.errors import EdgeqwenError
from tests.checkpoints import tiny_tokenizer_json
from tests.daemons import DaemonProcess, run_command, running_daemon, script_of, write_text_model
from tests.models import tiny_package

CANARY = "zanzibar"
ANSWER = "word " * 40


def slow(step_s: float = 0.02, **settings: Any) -> str:
    return script_of(ANSWER, step_s=step_s, **settings)


@contextlib.contextmanager
def begun(daemon: DaemonProcess) -> Iterator[Iterator[dict[str, Any]]]:
    """A streamed answer that has begun: frames from its first piece of text on."""
    with daemon.client() as client:
        frames = client.stream("chat", prompt=f"say {CANARY}", stream=True, speculate=False)
        while "delta" not in next(frames):
            pass
        yield frames


def rest(frames: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The final frame."""
    return [*frames][-1]


def test_sigterm_ends_an_idle_daemon_cleanly() -> None:
    with running_daemon(script_of("x")) as daemon:
        daemon.wait_until_ready()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert not daemon.socket_path.exists()
        assert "ready model=fake" in daemon.log


@pytest.mark.parametrize(
    ("environ", "is_guessing"),
    [({}, True), ({"EDGEQWEN_ENGINE_SPECULATION": "false"}, False), ({"EDGEQWEN_ENGINE_DETERMINISTIC": "true"}, False)],
    ids=["as it comes", "switched off", "deterministic"],
)
def test_guesses_are_made_unless_the_configuration_forbids_them(environ: dict[str, str], is_guessing: bool) -> None:
    with running_daemon(script_of(ANSWER), environ=environ) as daemon, daemon.client() as client:
        assert client.request("chat", prompt="hi")["text"] == ANSWER
        guesses = client.request("stats")["speculation"]
        assert (guesses["drafted"] > 0) == (guesses["accepted"] > 0) == is_guessing


def test_sigint_without_a_terminal_is_an_end_like_any_other() -> None:
    with running_daemon(script_of("x")) as daemon:
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.wait() == 0


def test_running_answer_ends_before_the_daemon_does() -> None:
    with running_daemon(slow()) as daemon, begun(daemon) as frames:
        daemon.process.send_signal(signal.SIGTERM)
        final = rest(frames)
        assert (final["finish"], daemon.wait()) == ("stop", 0)
        assert final["usage"]["completion"] > 40


def test_drain_time_cuts_an_answer_off() -> None:
    environ = {"EDGEQWEN_SERVICE_DRAIN_S": "0.1"}
    with running_daemon(slow(loop=True), environ=environ) as daemon, begun(daemon) as frames:
        daemon.process.send_signal(signal.SIGTERM)
        assert (rest(frames)["finish"], daemon.wait()) == ("cancelled", 0)


def test_shutdown_that_names_no_time_gives_the_configured_one() -> None:
    environ = {"EDGEQWEN_SERVICE_DRAIN_S": "0.1"}
    with running_daemon(slow(loop=True), environ=environ) as daemon, begun(daemon) as frames:
        with daemon.client() as other:
            other.request("shutdown")
        assert (rest(frames)["finish"], daemon.wait()) == ("cancelled", 0)


def test_second_signal_does_not_wait_for_the_drain() -> None:
    environ = {"EDGEQWEN_SERVICE_DRAIN_S": "600"}
    with running_daemon(slow(loop=True), environ=environ) as daemon, begun(daemon) as frames:
        daemon.process.send_signal(signal.SIGTERM)
        while "stopping" not in daemon.log:
            next(frames)
        daemon.process.send_signal(signal.SIGTERM)
        assert (rest(frames)["finish"], daemon.wait()) == ("cancelled", 0)


def test_draining_daemon_refuses_new_work() -> None:
    with running_daemon(slow()) as daemon, begun(daemon) as frames:
        with daemon.client() as other:
            assert other.request("shutdown", drain_s=20)["draining"] == 1
            with pytest.raises((EdgeqwenError, CutOff)) as caught:
                other.request("chat", prompt="hi")
            assert isinstance(caught.value, CutOff) or caught.value.code == "draining"
        assert rest(frames)["finish"] == "stop"
        assert daemon.wait() == 0


def test_hanging_step_does_not_keep_the_daemon_alive() -> None:
    environ = {"EDGEQWEN_SERVICE_DRAIN_S": "0"}
    with running_daemon(script_of(ANSWER, hang_at_step=4), environ=environ) as daemon, begun(daemon):
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_logs_hold_no_text_of_prompt_or_answer() -> None:
    with running_daemon(script_of("quite", fail_at_step=4)) as daemon:
        with daemon.client() as client:
            with pytest.raises(EdgeqwenError) as caught:
                client.request("chat", prompt=f"say {CANARY}")
            assert CANARY not in caught.value.message
            assert client.request("chat", prompt=CANARY)["text"] == "quite"
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait()
        assert CANARY not in daemon.log
        assert "quite" not in daemon.log


def test_clients_are_served_while_the_model_loads() -> None:
    with running_daemon(script_of("late", load_s=3.0)) as daemon, daemon.client() as client:
        health = client.request("health")
        assert (health["ok"], health["state"]) == (True, "loading")
        with pytest.raises(EdgeqwenError) as caught:
            client.request("chat", prompt="hi", wait=False)
        assert caught.value.code == "loading"
        assert client.request("chat", prompt="hi")["text"] == "late"
        assert client.request("ready")["model"] == "fake"


def test_model_that_cannot_be_loaded_ends_the_daemon_and_who_waited_for_it() -> None:
    with running_daemon(script_of("x", load_s=2.0, fail_load="the disk went away")) as daemon:
        with pytest.raises((EdgeqwenError, CutOff)), daemon.client() as client:
            client.request("chat", prompt="hi")
        assert daemon.wait() == 70
        assert daemon.log.splitlines()[-1] == "edgeqwen: the disk went away"


def test_sigterm_while_loading_ends_the_daemon() -> None:
    with running_daemon(script_of("x", load_s=0.5)) as daemon:
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


@pytest.mark.parametrize(
    ("flags", "environ", "code", "named"),
    [
        (("--runtime", "fake:{}x"), {}, 78, "fake runtime"),
        (("--runtime", "magic"), {}, 78, "magic"),
        (("--context", "-1"), {}, 78, "kv.context"),
        ((), {"EDGEQWEN_KV_SLOT": "1"}, 78, "EDGEQWEN_KV_SLOT"),
        (("--config", "nowhere.toml"), {}, 78, "nowhere.toml"),
        ((), {"EDGEQWEN_SOCKET_GROUP": "nobody-has-this-group"}, 78, "socket.group"),
    ],
)
def test_bad_configuration_is_exit_78_in_one_line(
    tmp_path: Path, flags: tuple[str, ...], environ: dict[str, str], code: int, named: str
) -> None:
    model = write_text_model(tmp_path / "model")
    base = ("serve", "--model", str(model), "--socket", str(tmp_path / "s"))
    runtime = () if "--runtime" in flags else ("--runtime", "fake:")
    result = run_command(*base, *runtime, *flags, environ=environ)
    assert result.returncode == code
    last = result.stderr.decode().splitlines()[-1]
    assert named in last
    assert not (tmp_path / "s").exists()


def test_second_daemon_on_a_socket_does_not_start() -> None:
    with running_daemon(script_of("x")) as daemon:
        model = write_text_model(daemon.socket_path.parent / "other")
        result = run_command("serve", "--model", str(model), "--socket", str(daemon.socket_path), "--runtime", "fake:")
        assert result.returncode == 78
        with daemon.client() as client:
            assert client.request("health")["ok"]


def test_a_second_daemon_of_a_socket_ends_before_it_opens_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with running_daemon() as daemon:
        result = run_command("serve", "--socket", str(daemon.socket_path), "--model", str(tmp_path / "empty"))
        assert result.returncode == 78
        assert b"already running" in result.stderr
        daemon.wait_for(running=0)


def test_a_model_that_cannot_be_opened_leaves_no_socket(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / "s"
    assert run_command("serve", "--socket", str(path), "--model", str(tmp_path / "empty")).returncode == 65
    assert not path.exists()


def test_configuration_file_is_read_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "edgeqwen.toml"
    path.write_text("[kv]\ncontext = 64\nslots = 2\n[limits]\nqueue = 5\n")
    with running_daemon(script_of("x"), "--config", str(path), "--context", "128") as daemon:
        daemon.wait_until_ready()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait()
        assert "context=128" in daemon.log


def test_service_manager_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with running_daemon(script_of("x"), environ=environ) as daemon:
            assert manager.recv(200) == b"STATUS=loading the model"
            assert manager.recv(200).startswith(b"READY=1\n")
            daemon.process.send_signal(signal.SIGTERM)
            assert manager.recv(200) == b"STOPPING=1"
            assert daemon.wait() == 0


def test_imported_package_is_served() -> None:
    package = tiny_package(quant="int8")
    with running_daemon("onnx", "--threads", "1", model=package) as daemon, daemon.client() as client:
        frame = client.request("chat", prompt="hi", max_tokens=5, ignore_eos=True)
        assert frame["usage"]["completion"] == 5
        assert client.request("ready")["quant"] == "int8"


def copied_package(folder: Path, **changed: bytes) -> Path:
    """The tiny package with some files replaced, their sizes and digests restated."""
    folder.mkdir()
    for path in tiny_package().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / "model.json").read_bytes())
    for name, data in changed.items():
        (folder / name).write_bytes(data)
        manifest["sizes"][name] = len(data)
        manifest["digests"][name] = "sha256:" + hashlib.sha256(data).hexdigest()
    (folder / "model.json").write_text(json.dumps(manifest))
    return folder


def other_tokenizer() -> bytes:
    """That of the tiny model with one added token fewer."""
    whole = tiny_tokenizer_json()
    return json.dumps(whole | {"added_tokens": whole["added_tokens"][:-1]}).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", other_tokenizer()),
        ("decode.onnx", b"no graph"),
        ("chat_template.jinja", b"{% for %}"),
        ("generation_config.json", b'{"temperature": -1}'),
    ],
)
def test_file_that_does_not_belong_is_named_with_exit_65(tmp_path: Path, name: str, data: bytes) -> None:
    package = copied_package(tmp_path / "package", **{name: data})
    result = run_command("serve", "--model", str(package), "--socket", str(tmp_path / "s"), "--threads", "1")
    assert result.returncode == 65
    assert name in result.stderr.decode().splitlines()[-1]
    assert not (tmp_path / "s").exists()


def test_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    flags = ("--model", str(tiny_package()), "--socket", str(tmp_path / "s"), "--context", "1000000")
    result = run_command("serve", *flags)
    assert result.returncode == 78
    assert b"kv.context" in result.stderr


def test_many_clients_at_once_all_get_their_answers() -> None:
    texts: list[str] = []
    with running_daemon(script_of("same", step_s=0.001)) as daemon:

        def one() -> None:
            with daemon.client() as client:
                texts.append(client.request("chat", prompt="hi")["text"])

        threads = [threading.Thread(target=one) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert texts == ["same"] * 24

"""`edgeqwen batch`: a file in, a file out; what is there is not asked again, whatever ended the run before."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.cli.batch_output import BatchOutput
from edgeqwen.errors import CannotWrite, ConfigInvalid
from tests.daemons import HANG_GUARD_S, DaemonProcess, run_command, running_daemon, script_of, start_command

SLOW = {"step_s": 0.01}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(script_of("Hello!", eos=None)) as daemon:
        daemon.wait_for(running=0)
        yield daemon


def write_items(path: Path, items: Sequence[Any], *, as_lines: bool = False) -> Path:
    text = "".join(json.dumps(item) + "\n" for item in items) if as_lines else json.dumps(items)
    path.write_text(text)
    return path


def batch(
    daemon: DaemonProcess, file: Path | str, out: Path, *flags: str, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    flags = ("--socket", str(daemon.socket_path), str(file), "--out", str(out), *flags)
    return run_command("batch", *flags, **options)


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize("as_lines", [False, True])
def test_every_item_has_its_line(daemon: DaemonProcess, tmp_path: Path, as_lines: bool) -> None:
    items = [{"id": f"n{number}", "prompt": "x"} if number % 2 else {"prompt": "x"} for number in range(40)]
    file = write_items(tmp_path / "in", items, as_lines=as_lines)
    result = batch(daemon, file, tmp_path / "out", "--max-tokens", "2", "--common", "seed=7")
    assert (result.returncode, result.stdout) == (0, b""), result.stderr
    assert b"40 answered" in result.stderr
    lines = lines_of(tmp_path / "out")
    keys = [line.get("id", line.get("index")) for line in lines]
    assert sorted(map(str, keys)) == sorted(f"n{number}" if number % 2 else str(number) for number in range(40))
    assert all(line["finish"] == "length" and line["seed"] == 7 and line["usage"]["completion"] == 2 for line in lines)
    assert next(iter(lines[0])) in {"id", "index"}


def test_raw_prompts_and_vectors(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = write_items(tmp_path / "in", [{"prompt": "abc", "echo": True, "max_tokens": 1}])
    assert batch(daemon, file, tmp_path / "out", "--op", "generate").returncode == 0
    assert lines_of(tmp_path / "out")[0]["text"].startswith("abc")


def test_items_that_are_wrong_have_their_error_and_the_exit_code_is_that_of_the_first(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    items: list[Any] = [
        {"prompt": "x"}, 5, {"prompt": "x", "temprature": 1}, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "x"},
        {"prompt": "x", "temperature": -1}, {"prompt": "x" * (1 << 20)}, {"prompt": "x", "op": "chat"}, {"id": ""},
    ]  # fmt: skip
    file = write_items(tmp_path / "in", items)
    result = batch(daemon, file, tmp_path / "out", "--max-tokens", "1")
    assert result.returncode == 64
    assert b"2 answered, 7 failed" in result.stderr
    errors = {line["index"]: line["error"] for line in lines_of(tmp_path / "out") if "error" in line}
    assert {index: (error["code"], error.get("field")) for index, error in errors.items()} == {
        1: ("bad_request", None),
        2: ("bad_request", "temprature"),
        4: ("bad_request", "id"),
        5: ("bad_request", "temperature"),
        6: ("too_large", None),
        7: ("bad_request", "op"),
        8: ("bad_request", "id"),
    }


def test_what_is_there_is_not_asked_again(daemon: DaemonProcess, tmp_path: Path) -> None:
    items = [{"id": number, "prompt": "x"} for number in range(10)] + [{"prompt": "x"}] * 10
    file, out = write_items(tmp_path / "in", items), tmp_path / "out"
    assert batch(daemon, file, out, "--max-tokens", "1").returncode == 0
    whole = out.read_bytes()
    asked = daemon.wait_for()["totals"]["requests"]
    result = batch(daemon, file, out, "--max-tokens", "1")
    assert (result.returncode, out.read_bytes()) == (0, whole)
    assert b"0 answered, 20 were there before" in result.stderr
    assert daemon.wait_for()["totals"]["requests"] == asked
    kept = whole.splitlines(keepends=True)[:7]
    out.write_bytes(b"".join(kept) + b'{"id":9,"text":"He')  # torn
    assert batch(daemon, file, out, "--max-tokens", "1").returncode == 0
    assert out.read_bytes().startswith(b"".join(kept))
    keys = [str(line.get("id", line.get("index"))) for line in lines_of(out)]
    assert sorted(keys) == sorted(map(str, range(20)))


def test_a_run_that_is_killed_or_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    items = [{"id": number, "prompt": "x"} for number in range(200)]
    file, out = write_items(tmp_path / "in", items, as_lines=True), tmp_path / "out"
    with running_daemon(script_of("Hello!", step_s=0.03)) as daemon:
        daemon.wait_for(running=0)
        flags = ["batch", "--socket", str(daemon.socket_path), str(file), "--out", str(out), "--max-tokens", "3"]
        for number, expected in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
            before = len(out.read_bytes().splitlines()) if out.exists() else 0
            with start_command(*flags, stderr=subprocess.PIPE) as process:
                wait_until(lambda: out.exists() and len(out.read_bytes().splitlines()) > before + 8)  # noqa: B023 -- waited for at once
                process.send_signal(number)
                assert process.wait(HANG_GUARD_S) == expected
                assert process.stderr is not None
                assert process.stderr.read().strip() == b""
        assert daemon.wait_for(running=0)["totals"]["errors"] == 0
        result = run_command(*flags)
    assert result.returncode == 0
    assert b"were there before" in result.stderr
    assert sorted(line["id"] for line in lines_of(out)) == list(range(200))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_that_restarts_in_the_middle_is_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    """What its end cuts short is asked again, too."""
    items = [{"id": number, "prompt": "x"} for number in range(40)]
    file, out = write_items(tmp_path / "in", items), tmp_path / "out"
    socket = tmp_path / "s"
    runtime = script_of("Hello!", step_s=0.01, load_s=0.5)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_daemon(runtime, environ={"EDGEQWEN_SERVICE_DRAIN_S": "0"}))
        socket.symlink_to(first.socket_path)
        flags = ["batch", "--socket", str(socket), str(file), "--out", str(out), "--max-tokens", "9"]
        process = stack.enter_context(start_command(*flags, stderr=subprocess.PIPE))
        wait_until(lambda: out.exists() and len(out.read_bytes().splitlines()) > 8)
        first.process.send_signal(number)
        first.wait()
        second = stack.enter_context(running_daemon(runtime))
        socket.unlink()
        socket.symlink_to(second.socket_path)
        assert process.wait(HANG_GUARD_S) == 0
    lines = lines_of(out)
    assert sorted(line["id"] for line in lines) == list(range(40))
    assert {(line["text"], line["finish"]) for line in lines} == {("Hello!", "stop")}


def test_a_daemon_that_stays_away_ends_the_run(tmp_path: Path) -> None:
    file, out = write_items(tmp_path / "in", [{"id": 1, "prompt": "x"}]), tmp_path / "out"
    with running_daemon(script_of("Hello!", step_s=0.5)) as daemon:
        daemon.wait_for(running=0)
        flags = ["batch", "--socket", str(daemon.socket_path), str(file), "--out", str(out), "--patience", "1"]
        with start_command(*flags, stderr=subprocess.PIPE) as process:
            daemon.wait_for(running=1)
            daemon.process.kill()
            assert process.wait(HANG_GUARD_S) in {69, 74}
    assert lines_of(out) == []


def test_no_daemon_is_told_before_anything_else(tmp_path: Path) -> None:
    file = write_items(tmp_path / "in", [{"prompt": "x"}])
    result = run_command("batch", "--socket", str(tmp_path / "none"), str(file), "--out", str(tmp_path / "out"))
    assert result.returncode == 69
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("text", "num_answered", "code"),
    [
        ('[{"prompt":"x"},{"prompt":"x"},nonsense', 2, 65),
        ('[{"prompt":"x"},{"prompt":"x"}', 2, 65),
        ('{"prompt":"x"}\n{"prompt":', 1, 65),
        ("", 0, 65),
        ('{"common":{},"items":[{"prompt":"x"}]}', 0, 65),
        ('{"items":[{"prompt":"x"}]}', 1, 0),
        ("[]", 0, 0),
    ],
)
def test_an_input_that_is_wrong_is_answered_as_far_as_it_goes(
    daemon: DaemonProcess, tmp_path: Path, text: str, num_answered: int, code: int
) -> None:
    (tmp_path / "in").write_text(text)
    result = batch(daemon, tmp_path / "in", tmp_path / "out", "--max-tokens", "1")
    assert result.returncode == code, result.stderr
    assert (len(lines_of(tmp_path / "out")), result.stderr.count(b"\n")) == (num_answered, 1)


def test_the_input_may_come_from_a_pipe(daemon: DaemonProcess, tmp_path: Path) -> None:
    result = batch(daemon, "-", tmp_path / "out", "--max-tokens", "1", stdin=b'{"prompt":"x"}\n{"prompt":"x"}')
    assert result.returncode == 0, result.stderr
    assert len(lines_of(tmp_path / "out")) == 2


def test_answers_may_go_to_standard_output(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = write_items(tmp_path / "in", [{"id": "a", "prompt": "x"}, {"prompt": "y"}])
    for _ in range(2):
        result = batch(daemon, file, Path("-"), "--max-tokens", "1")
        assert (result.returncode, result.stderr) == (0, b"edgeqwen: 2 answered\n")
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert sorted(str(line.get("id", line.get("index"))) for line in lines) == ["1", "a"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert not Path("-").exists()


def test_a_reader_that_goes_away_ends_the_run_in_silence(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = write_items(tmp_path / "in", [{"prompt": "x"}] * 50)
    reading, writing = os.pipe()
    os.close(reading)
    flags = ("batch", str(file), "--out", "-", "--socket", str(daemon.socket_path), "--max-tokens", "1")
    with start_command(*flags, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        _, err = process.communicate(timeout=HANG_GUARD_S)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (["--common", "x"], 64, b"KEY=VALUE"),
        (["--common", "temprature=1"], 64, b"temprature"),
        (["--common", "stream=true"], 64, b"stream"),
        (["--in-flight", "9"], 64, b"in-flight"),
        (["--op", "stats"], 64, b"op"),
    ],
)
def test_options_that_are_wrong_are_named(
    daemon: DaemonProcess, tmp_path: Path, flags: list[str], code: int, word: bytes
) -> None:
    file = write_items(tmp_path / "in", [{"prompt": "x"}])
    result = batch(daemon, file, tmp_path / "out", *flags)
    assert (result.returncode, result.stderr.count(b"\n")) == (code, 1)
    assert word in result.stderr


def test_files_that_cannot_be_used_are_named(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = write_items(tmp_path / "in", [{"prompt": "x"}])
    (tmp_path / "notes").write_text("my notes\nare here\n")
    (tmp_path / "one").write_text("my notes")
    for name, out, code in (
        (tmp_path / "none", tmp_path / "out", 66),
        (file, tmp_path / "no" / "out", 73),
        (file, file, 78),
        (file, tmp_path / "notes", 78),
        (file, tmp_path / "one", 78),
    ):
        result = batch(daemon, name, out)
        assert (result.returncode, result.stderr.count(b"\n")) == (code, 1), result.stderr
    assert b"the output " in batch(daemon, file, tmp_path / "no" / "out").stderr
    assert (tmp_path / "notes").read_text() == "my notes\nare here\n"
    assert (tmp_path / "one").read_text() == "my notes"
    assert json.loads(file.read_text()) == [{"prompt": "x"}]


# The output file.


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    output = BatchOutput(tmp_path / "out")
    with pytest.raises(ConfigInvalid, match="another run"):
        BatchOutput(tmp_path / "out")
    output.close()
    BatchOutput(tmp_path / "out").close()


@pytest.mark.parametrize("torn_len", [0, 1, 20, 3 << 20])
def test_a_torn_line_is_cut_off_however_long(tmp_path: Path, torn_len: int) -> None:
    path = tmp_path / "out"
    whole = b'{"id":1,"text":"a"}\n{"index":0}\n'
    torn = (b'{"id":2,"text":"' + b"x" * torn_len)[:torn_len]
    path.write_bytes(whole + torn)
    output = BatchOutput(path)
    assert output.done == {("id", 1), ("index", 0)}
    output.append({"id": "é"})
    output.close()
    assert path.read_bytes() == whole + '{"id":"é"}\n'.encode()
    path.write_bytes(torn)
    if torn:
        output = BatchOutput(path)
        assert (output.done, path.read_bytes()) == (frozenset(), b"")
        output.close()


def test_a_line_that_does_not_fit_the_disk_leaves_none_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = BatchOutput(tmp_path / "out")
    output.append({"id": 1})
    write = os.write

    def fail(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(fd, data[:10])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        with pytest.raises(CannotWrite, match="No space left"):
            output.append({"id": 2, "text": "x" * 20})
    output.close()
    assert lines_of(tmp_path / "out") == [{"id": 1}]


def wait_until(condition: Any) -> None:
    give_up_at = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)

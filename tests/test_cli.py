"""The commands, from outside: what they print where, and their exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeqwen.cli.ask import read_prompt, speeds
from edgeqwen.cli.importing import default_name
from edgeqwen.cli.main import run
from edgeqwen.errors import BadRequest
from edgeqwen.evaluate import EvalReport, Score
from tests.checkpoints import write_safetensors_model
from tests.daemons import DaemonProcess, run_command, running_daemon, script_of, start_command
from tests.models import all_logits, tiny_package, tiny_runtime

BLANKS = "  lead x\n\t y  "
OUTPUT = BLANKS.encode() + b"\n"
THOUGHT = "<think>\nhm\n</think>\n\nanswer"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """Says the same to everybody."""
    with running_daemon(script_of(BLANKS)) as running:
        yield running


def ask(daemon: DaemonProcess, *flags: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return run_command("ask", "--socket", str(daemon.socket_path), *flags, stdin=stdin)


def one_line(err: bytes) -> str:
    """stderr, which must be a single line."""
    assert err.endswith(b"\n")
    assert err.count(b"\n") == 1, err
    return err.decode()


def test_ask_prints_the_answer_byte_for_byte_and_nothing_else(daemon: DaemonProcess) -> None:
    result = ask(daemon, "hello")
    assert (result.returncode, result.stdout, result.stderr) == (0, OUTPUT, b"")


@pytest.mark.parametrize(("answer", "output"), [("yes", b"yes\n"), ("yes\n", b"yes\n"), ("a\n\nb", b"a\n\nb\n")])
def test_output_of_ask_is_whole_lines(answer: str, output: bytes) -> None:
    with running_daemon(script_of(answer)) as daemon:
        assert ask(daemon, "hello").stdout == output


def test_answer_that_was_cut_is_told_on_stderr(daemon: DaemonProcess) -> None:
    cut = ask(daemon, "--max-tokens", "2", "hello")
    assert cut.returncode == 0
    assert "cut at 2 tokens" in one_line(cut.stderr)
    assert ask(daemon, "--json", "--max-tokens", "2", "hello").stderr == b""
    chat = run_command("chat", "--socket", str(daemon.socket_path), "--max-tokens", "1", stdin=b"a\nb\n")
    assert chat.returncode == 0
    assert chat.stderr.decode().splitlines() == [
        line for line in chat.stderr.decode().splitlines() if "at 1 token:" in line
    ]
    assert len(chat.stderr.splitlines()) == 2


def test_ask_finds_the_socket_through_the_environment(daemon: DaemonProcess) -> None:
    result = run_command("ask", "hello", environ={"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)})
    assert (result.returncode, result.stdout) == (0, OUTPUT)


def test_ask_verbose_adds_speeds_on_stderr(daemon: DaemonProcess) -> None:
    result = ask(daemon, "-v", "hello")
    assert result.stdout == OUTPUT
    assert "ended: stop" in one_line(result.stderr)


def test_ask_json_is_one_final_frame(daemon: DaemonProcess) -> None:
    frame = json.loads(ask(daemon, "--json", "hello").stdout)
    assert (frame["done"], frame["text"], frame["finish"]) == (True, BLANKS, "stop")


def test_embed_prints_a_vector_for_each_text_or_line(daemon: DaemonProcess) -> None:
    texts = [f"text {number}" for number in range(70)]
    socket = ("--socket", str(daemon.socket_path))
    by_line = run_command("embed", *socket, stdin="\n".join([*texts, "", " "]).encode())
    assert (by_line.returncode, by_line.stderr) == (0, b"")
    found = [json.loads(line) for line in by_line.stdout.splitlines()]
    assert [each["text"] for each in found] == texts
    assert all(abs(sum(x * x for x in each["embedding"]) - 1) < 1e-5 for each in found)
    by_argument = run_command("embed", *socket, "--pooling", "last", *texts[:2])
    assert by_argument.stdout.splitlines() == by_line.stdout.splitlines()[:2]


def test_embed_needs_texts_and_a_pooling_that_there_is(daemon: DaemonProcess) -> None:
    socket = ("--socket", str(daemon.socket_path))
    assert run_command("embed", *socket).returncode == 64
    refused = run_command("embed", *socket, "--pooling", "first", "x")
    assert (refused.returncode, refused.stdout) == (64, b"")
    assert "pooling" in one_line(refused.stderr)


def test_prompt_is_arguments_then_stdin(daemon: DaemonProcess) -> None:
    joined = json.loads(ask(daemon, "--json", "one", "two", stdin=b"three").stdout)
    whole = json.loads(ask(daemon, "--json", "one two\n\nthree").stdout)
    shorter = json.loads(ask(daemon, "--json", "one two").stdout)
    assert joined["usage"]["prompt"] == whole["usage"]["prompt"] > shorter["usage"]["prompt"]


class Piped(io.TextIOWrapper):
    """Stands in for a stdin that is no terminal."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        (("a", "b"), b"", "a b"),
        ((), b"c\n", "c\n"),
        (("a",), b"c", "a\n\nc"),
        (("a",), b" \n", "a"),
        (("é",), b"\xc3\xa9", "é\n\né"),
    ],
)
def test_prompt_is_read_from_both(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], stdin: bytes, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(stdin))
    assert read_prompt(arguments) == prompt


def test_no_prompt_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(b""))
    with pytest.raises(BadRequest, match="nothing to ask"):
        read_prompt(())


def test_thought_does_not_reach_stdout() -> None:
    with running_daemon(script_of(THOUGHT)) as daemon:
        result = ask(daemon, "--think", "why?")
        assert result.returncode == 0
        assert result.stdout.strip() == b"answer"
        assert b"hm" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [(("--temperature", "1000"), 64, "temperature"), (("--max-tokens", "0"), 64, "max_tokens")],
)
def test_ask_reports_what_the_daemon_refuses(
    daemon: DaemonProcess, flags: tuple[str, ...], code: int, named: str
) -> None:
    result = ask(daemon, *flags, "hello")
    assert (result.returncode, result.stdout) == (code, b"")
    assert named in one_line(result.stderr)


def test_prompt_that_is_too_long_is_exit_65() -> None:
    with running_daemon(script_of("x"), "--context", "64") as daemon:
        result = ask(daemon, stdin=b"long " * 200)
        assert result.returncode == 65
        one_line(result.stderr)


def test_prompt_that_no_request_can_hold_is_told_in_words(daemon: DaemonProcess) -> None:
    result = ask(daemon, stdin=b"long " * 300_000)
    assert result.returncode == 65
    assert "the prompt is too long" in one_line(result.stderr)


@pytest.mark.parametrize("command", ["ask", "stats", "chat"])
def test_no_daemon_is_exit_69(tmp_path: Path, command: str) -> None:
    result = run_command(command, "--socket", str(tmp_path / "none"), stdin=b"hello")
    assert result.returncode == 69
    assert "edgeqwen serve" in one_line(result.stderr)


def slow_answer() -> str:
    return script_of("word " * 40, loop=True, step_s=0.02)


def first_bytes(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.read(4)


def start_ask(daemon: DaemonProcess, *flags: str) -> subprocess.Popen[bytes]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return start_command("ask", "--socket", str(daemon.socket_path), *flags, "hello", **pipes)


def test_ctrl_c_is_exit_130_and_ends_the_work() -> None:
    with running_daemon(slow_answer()) as daemon, start_ask(daemon) as process:
        assert first_bytes(process) == b"word"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, b"")
        daemon.wait_for(running=0)


def test_closed_pipe_ends_ask_in_silence() -> None:
    with running_daemon(slow_answer()) as daemon, start_ask(daemon) as process:
        assert first_bytes(process) == b"word"
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_answer_that_is_cut_off_is_exit_74() -> None:
    with running_daemon(slow_answer()) as daemon, start_ask(daemon) as process:
        assert first_bytes(process) == b"word"
        daemon.process.kill()
        _, err = process.communicate(timeout=30)
        assert process.returncode == 74
        one_line(err)


def test_failure_inside_the_engine_is_exit_70() -> None:
    with running_daemon(script_of("abc", fail_at_step=2)) as daemon:
        result = ask(daemon, "hello")
        assert result.returncode == 70
        one_line(result.stderr)


def test_stats_in_words_and_as_json(daemon: DaemonProcess) -> None:
    words = run_command("stats", "--socket", str(daemon.socket_path))
    assert b"totals.requests" in words.stdout
    frame = json.loads(run_command("stats", "--json", "--socket", str(daemon.socket_path)).stdout)
    assert frame["running"] == 0
    assert "done" not in frame


def test_chat_keeps_the_conversation_until_reset() -> None:
    with running_daemon(script_of("one", "two", "three")) as daemon:
        lines = b"first\n\nsecond\n/reset\nfirst\n/quit\nnever\n"
        result = run_command("chat", "-v", "--socket", str(daemon.socket_path), stdin=lines)
        assert result.stdout == b"one\ntwo\nthree\n"
        prompts = [int(line.split()[1]) for line in result.stderr.decode().splitlines()]
        assert prompts[0] == prompts[2] < prompts[1]


def test_chat_goes_on_after_an_error() -> None:
    with running_daemon(script_of("one", "two", fail_at_step=2)) as daemon:
        result = run_command("chat", "--socket", str(daemon.socket_path), stdin=b"first\nsecond\n")
        assert result.returncode == 0
        assert result.stdout.endswith(b"two\n")
        assert b"edgeqwen:" in result.stderr


def test_chat_does_not_send_mistyped_commands_to_the_model() -> None:
    with running_daemon(script_of("one", "two")) as daemon:
        lines = b"/exit\n/etc/passwd is what?\n /quit \nnever\n"
        result = run_command("chat", "--socket", str(daemon.socket_path), stdin=lines)
        assert result.stdout == b"one\n"
        assert "there is no /exit" in one_line(result.stderr)


def run_here(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """The command in this process: exit code, stdout, stderr."""
    code = run(flags)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (("import", "x.gguf", "--quant", "int3"), 64, "int3"),
        (("import", "x.gguf", "--target", "sparc"), 64, "sparc"),
        (("import", "nowhere.gguf"), 66, "nowhere.gguf"),
        (("bench", "nowhere"), 66, "nowhere"),
        (("eval", "nowhere"), 66, "nowhere"),
        (("serve", "--model", "nowhere"), 66, "nowhere"),
        (("serve", "--slots", "0"), 78, "kv.slots"),
        (("serve", "--slots", "many"), 64, "--slots"),
        (("pull", "no-such-id"), 64, "no-such-id"),
        (("conquer",), 64, "conquer"),
        (("ask", "--colour"), 64, "--colour"),
    ],
)
def test_mistakes_are_one_line_with_the_right_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: tuple[str, ...],
    code: int,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    actual, out, err = run_here(capsys, *flags)
    assert (actual, out) == (code, "")
    assert named in one_line(err.encode())


def test_help_and_version_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_here(capsys, "--help")
    assert code == 0
    assert "ask" in out
    assert "..." not in out.replace("[ARGS]...", ""), "what a command does should fit the line"
    assert run_here(capsys, "--version")[0] == 0


def test_models_without_any_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    code, out, err = run_here(capsys, "models")
    assert (code, out) == (0, "")
    assert "edgeqwen pull" in one_line(err.encode())


def test_broken_model_file_is_exit_65(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    code, _, err = run_here(capsys, "import", str(tmp_path / "cut.gguf"), "--out", str(tmp_path / "out"))
    assert code == 65
    assert "cut.gguf" in one_line(err.encode())
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


def test_import_then_models_then_bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    write_safetensors_model(tmp_path / "Tiny-Model", family="qwen3")
    code, out, _ = run_here(capsys, "import", str(tmp_path / "Tiny-Model"), "--quant", "fp32", "--target", "any")
    assert (code, out.strip()) == (0, str(tmp_path / "data/edgeqwen/models/tiny-model-fp32"))
    code, out, _ = run_here(capsys, "models", "--json")
    assert json.loads(out)["name"] == "tiny-model-fp32"
    flags = ("--prompt", "16", "--decode", "4", "--threads", "1", "--json")
    code, out, _ = run_here(capsys, "bench", "tiny-model-fp32", *flags)
    report = json.loads(out)
    code, out, _ = run_here(capsys, "bench", *flags)
    assert (code, json.loads(out)["model"]) == (0, report["model"])
    assert (code, report["quant"], report["threads"], report["prompt"]) == (0, "fp32", 1, 16)
    assert min(report[key] for key in ("prefill_tok_s", "decode_tok_s", "load_s", "rss_bytes")) > 0


def test_quant_auto_says_what_it_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "tiny", family="qwen3")
    flags = ("import", str(tmp_path / "tiny"), "--quant", "auto", "--out", str(tmp_path / "out"), "--json")
    code, out, err = run_here(capsys, *flags)
    facts = json.loads(out)
    assert (code, facts["name"]) == (0, "out")
    assert f"--quant auto takes {facts['quant']}: " in err


def test_eval_writes_logits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(5))
    flags = ("--ids", str(tmp_path / "ids.npy"), "--logits", str(tmp_path / "logits.npy"), "--threads", "1")
    package = tiny_package()
    assert run_here(capsys, "eval", str(package), *flags)[0] == 0
    logits = np.load(tmp_path / "logits.npy")
    assert logits.dtype == np.float32
    assert len(logits) == 5
    runtime = tiny_runtime(package)
    assert np.array_equal(logits, all_logits(runtime, range(5), chunk=5))
    runtime.close()


def test_eval_says_what_is_wrong_with_ids_and_where_logits_go(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "many.npy", np.zeros(1024, np.int64))
    np.save(tmp_path / "few.npy", np.arange(5))
    short = tiny_package(max_position=1000)
    code, _, err = run_here(capsys, "eval", str(short), "--ids", str(tmp_path / "many.npy"), "--logits", os.devnull)
    assert (code, "1024 ids are more than the model's 1000 positions" in err) == (64, True)
    code, _, err = run_here(capsys, "eval", str(short), "--ids", str(tmp_path / "few.npy"), "--logits", "/dev/full")
    assert (code, "/dev/full: cannot write the logits" in err) == (73, True)


def test_table_of_eval_shows_the_other_package_only_if_there_is_one() -> None:
    alone, compared = Score("english", 900, 31.5), Score("english", 900, 31.5, 30.0, 0.02, 0.1, 0.9, 1.5)
    assert EvalReport("m", "int8", None, (alone,), alone).to_text().splitlines()[1:] == [
        "text        tokens      ppl",
        "english        900    31.50",
    ]
    table = EvalReport("m", "int8", "ref", (compared, compared), compared).to_text().splitlines()
    assert table[0] == "m (int8) against ref"
    assert table[1].split() == ["text", "tokens", "ppl", "ref", "ppl", "KL", "mean", "KL", "p99", "top-1", "gap"]
    assert table[4].split() == ["english", "900", "31.50", "30.00", "0.0200", "0.100", "0.900", "1.50"]


@pytest.mark.parametrize(
    ("source", "quant", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "int8", "smollm2-135m-instruct"),
        ("Qwen3-0.6B-Q8_0.gguf", "int4", "qwen3-0.6b-int4"),
        ("Qwen/Qwen3-0.6B", "int8", "qwen3-0.6b"),
        ("My Model (final)/", "fp32", "my-model-final-fp32"),
        ("???", "int8", "model"),
    ],
)
def test_default_name(source: str, quant: str, name: str) -> None:
    assert default_name(source, quant) == name


def test_speeds_leave_out_what_was_not_measured() -> None:
    final = {"usage": {"prompt": 10, "cached": 4, "completion": 1}, "finish": "stop"}
    text = speeds(final | {"ms": {"queue": 10, "ttft": 310, "total": 310}})
    assert "prompt 10 tokens (4 known), 20.0 tokens/s" in text
    assert "answer 1 token |" in text


def test_speeds_say_how_much_of_the_time_was_waiting() -> None:
    final = {"usage": {"prompt": 36, "cached": 0, "completion": 9}, "finish": "stop"}
    text = speeds(final | {"ms": {"queue": 790, "ttft": 826, "total": 1826}})
    assert "prompt 36 tokens, 1000.0 tokens/s" in text
    assert "first text after 826 ms, 790 ms of them waiting" in text
    assert "waiting" not in speeds(final | {"ms": {"queue": 0, "ttft": 36, "total": 1036}})


def test_two_asks_at_once_both_end(daemon: DaemonProcess) -> None:
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(ask(daemon, "hi").stdout)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [OUTPUT] * 2

"""From nothing to an answer, without a network: the real model where its file is at hand, stand-ins elsewhere."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgeqwen.cli import quickstart
from edgeqwen.cli.quickstart import (
    Places,
    find_model,
    is_usable,
    main,
    running_daemon,
    shortened,
    writable_models_folder,
)
from edgeqwen.errors import EdgeqwenError, ModelMissing
from tests.models import smollm2_gguf, tiny_package


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A user without models, out of reach of a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(quickstart, "models_folder", lambda: tmp_path / "models")
    return Places(tmp_path / "models", tmp_path / "cache")


def install(places: Places, name: str) -> Path:
    shutil.copytree(tiny_package(quant="int8"), places.models / name)
    return places.models / name


@pytest.mark.usefixtures("places")
def test_question_is_answered_by_the_real_model(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    smollm2_gguf()  # skips where the file is not at hand
    assert main(["--cache", str(tmp_path / "cache"), "What is the capital", "of France?"]) == 0
    out, err = capfd.readouterr()
    assert "Paris" in out
    assert out.endswith("\n")
    assert "no model hub in reach" in err
    assert "tokens/s" in err
    assert list((tmp_path / "cache").iterdir()) == []


def test_installed_model_is_taken_without_a_look_at_the_network(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> bool:
        raise AssertionError("asked for the hub")

    monkeypatch.setattr(quickstart, "hub_in_reach", unreachable)
    small = install(places, "smollm2-135m-instruct")
    assert find_model(places) == small
    big = install(places, "qwen3-0.6b")
    assert find_model(places) == big


def test_pull_that_fails_falls_back_to_the_small_model(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: Places) -> Path:
        raise ModelMissing("the hub\nwent away")

    monkeypatch.setattr(quickstart, "hub_in_reach", lambda: True)
    monkeypatch.setattr(quickstart, "pull", failing)
    monkeypatch.setattr(quickstart, "make_small", lambda given: install(given, "smollm2-135m-instruct"))
    assert find_model(places).name == "smollm2-135m-instruct"
    assert "the hub went away" in capsys.readouterr().err


def test_damaged_or_foreign_package_is_not_taken(places: Places) -> None:
    package = install(places, "smollm2-135m-instruct")
    assert is_usable(package)
    manifest = (package / "model.json").read_text()
    (package / "model.json").write_text(manifest.replace('"builder_version": "', '"builder_version": "0.0.'))
    assert not is_usable(package)
    (package / "model.json").write_text(manifest)
    (package / "weights.bin").write_bytes(b"")
    assert not is_usable(package)


def test_models_go_to_the_cache_where_there_is_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME")
    assert writable_models_folder(tmp_path) == tmp_path / "models"
    assert "cannot be written to" in capsys.readouterr().err


def test_long_question_is_shown_as_one_short_line() -> None:
    assert shortened("why is\nthe sky  blue?") == "why is the sky blue?"
    assert shortened("x" * 70) == "x" * 70
    assert shortened("x" * 5000) == "x" * 69 + "…"


@pytest.mark.parametrize("arguments", [[], [""], ["  ", "\n"]])
def test_no_question_is_a_usage_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 64
    assert "question" in capsys.readouterr().err


def test_question_that_is_no_text_is_refused_before_a_model_is_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeqwen.cli.quickstart.find_model", lambda _: pytest.fail("a model was looked for"))
    assert main(["why \udcff?"]) == 65
    assert "the question is not UTF-8" in capsys.readouterr().err


def test_unknown_flag_is_one_line_and_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--loud", "why?"])
    assert ended.value.code == 64
    err = capsys.readouterr().err
    assert "--loud" in err
    assert err.count("\n") == 1


def test_daemon_that_does_not_start_is_reported_with_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EdgeqwenError, match="did not start"), running_daemon(tmp_path / "nothing"):
        pass
    assert "nothing" in capsys.readouterr().err


def test_daemon_is_stopped_when_quickstart_is(places: Places, tmp_path: Path) -> None:
    package = install(places, "qwen3-0.6b")
    script = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "from edgeqwen.cli.quickstart import running_daemon\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"with running_daemon(Path({str(package)!r})) as path:\n"
        "    print(path, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.is_socket()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    give_up_at = time.monotonic() + 10
    while path.parent.exists() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert not path.parent.exists()

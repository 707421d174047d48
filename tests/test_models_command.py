"""`edgeqwen models rm`: installed packages go, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeqwen.cli.main import run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models directory with two packages, as far as they are told by their manifests, and other things."""
    home = tmp_path / "edgeqwen" / "models"
    for name in ("one", "two"):
        (home / name).mkdir(parents=True)
        (home / name / "model.json").write_text("{}")
        (home / name / "weights.bin").write_bytes(b"x" * 998)
    (home / "notes").mkdir()
    (home / "notes" / "precious").touch()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return home


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_removed_model_is_gone_with_all_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "rm", "one"]) == 0
    assert capsys.readouterr().out == "removed one: 0 MB (1000 bytes)\n"
    assert names_in(folder) == ["notes", "two"]
    assert run(["models", "rm", "--json", "two"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "two", "bytes": 1000}
    assert names_in(folder) == ["notes"]


@pytest.mark.parametrize("name", ["none", "notes", "", ".", "..", "one/.", "one/../two", "../models/one", "ONE"])
def test_what_is_no_installed_model_stays(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = sorted(folder.rglob("*"))
    assert run(["models", "rm", name]) == 66
    assert sorted(folder.rglob("*")) == before
    assert capsys.readouterr().err.count("\n") == 1


def test_a_path_is_no_name(folder: Path) -> None:
    assert run(["models", "rm", str(folder / "one")]) == 66
    assert (folder / "one" / "weights.bin").exists()


def test_others_are_removed_all_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "rm", "none", "two"]) == 66
    assert names_in(folder) == ["notes", "one"]
    captured = capsys.readouterr()
    assert captured.out.startswith("removed two")
    assert "none: no model in" in captured.err


def test_of_a_link_only_the_link_goes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.json").touch()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    assert run(["models", "rm", "linked"]) == 0
    assert not (folder / "linked").is_symlink()
    assert (tmp_path / "elsewhere" / "model.json").exists()


def test_rest_of_a_removal_that_was_killed_is_no_hindrance(folder: Path) -> None:
    (folder / ".one.removed").mkdir()
    (folder / ".one.removed" / "weights.bin").touch()
    assert run(["models", "rm", "one"]) == 0
    assert names_in(folder) == ["notes", "two"]


def test_open_files_of_a_removed_model_can_still_be_read(folder: Path) -> None:
    with (folder / "one" / "weights.bin").open("rb") as file:
        assert run(["models", "rm", "one"]) == 0
        assert file.read() == b"x" * 998


def test_models_alone_lists_and_rm_alone_is_a_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    assert "one" in capsys.readouterr().err  # its manifest says nothing
    assert run(["models", "rm"]) == 64
    assert names_in(folder) == ["notes", "one", "two"]

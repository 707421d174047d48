"""The folder that a daemon keeps things in: made if it can be, done without if not."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from edgeqwen.cli.places import cache_folder, state_folder
from edgeqwen.core.state import could_write, writable_folder


def test_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "edgeqwen"
    assert could_write(path)
    assert writable_folder(path) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert writable_folder(path) == path


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_folder_that_cannot_be_is_warned_of_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, below: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / below
    assert not could_write(path)
    with caplog.at_level(logging.WARNING):
        assert writable_folder(path) is None
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    ("configured", "environ", "is_root", "path"),
    [
        ("/given", {"STATE_DIRECTORY": "/systemd", "HOME": "/home/u"}, False, "/given"),
        ("", {"STATE_DIRECTORY": "/var/lib/one:/var/lib/two", "HOME": "/home/u"}, False, "/var/lib/one"),
        ("", {"STATE_DIRECTORY": "/systemd"}, True, "/systemd"),
        ("", {"XDG_STATE_HOME": "/x", "HOME": "/home/u"}, False, "/x/edgeqwen"),
        ("", {"XDG_STATE_HOME": "relative", "HOME": "/home/u"}, False, "/home/u/.local/state/edgeqwen"),
        ("", {"XDG_STATE_HOME": "/x"}, True, "/var/lib/edgeqwen"),
    ],
)
def test_state_is_kept_where_it_was_asked_for_or_belongs(
    configured: str, environ: dict[str, str], is_root: bool, path: str
) -> None:
    assert state_folder(configured, environ, is_root=is_root) == Path(path)


@pytest.mark.parametrize(
    ("configured", "environ", "path"),
    [
        ("/given", {"CACHE_DIRECTORY": "/systemd"}, "/given"),
        ("", {"CACHE_DIRECTORY": "/var/cache/one:/var/cache/two"}, "/var/cache/one"),
        ("", {}, "/state/cache"),
    ],
)
def test_cache_lies_below_the_state_unless_asked_otherwise(configured: str, environ: dict[str, str], path: str) -> None:
    assert cache_folder(configured, environ, Path("/state")) == Path(path)

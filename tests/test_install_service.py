"""Installing as a service, into a folder: everything comes where the units look for it, and goes away again.

No network, no systemd: the environment is one that is there already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.models import tiny_package

CHECKOUT: Final = Path(__file__).parents[1]
UNITS: Final = {"edgeqwen.service", "edgeqwen.socket"}
SYSTEM_UNITS: Final = UNITS | {"edgeqwen@.service", "edgeqwen@.socket", "edgeqwen.slice"}


class Machine:
    """A folder that stands for a machine, and an environment in which edgeqwen is installed."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.home = folder / "home"
        self.environment = folder / "env"
        program = self.environment / "bin" / "edgeqwen"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nPYTHONPATH={CHECKOUT} exec {sys.executable} -m edgeqwen "$@"\n')
        program.chmod(0o755)
        self.home.mkdir()

    def run(self, script: str, *arguments: str, exit_code: int = 0) -> str:
        """A script of the checkout; returns what it said."""
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.home), "PYTHONPATH": str(CHECKOUT)}
        result = subprocess.run(
            [str(CHECKOUT / "scripts" / script), *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert result.returncode == exit_code, result.stderr
        return result.stderr

    def install(self, *arguments: str) -> str:
        return self.run("install-service", "--root", str(self.root), "--env", str(self.environment), *arguments)

    def uninstall(self, *arguments: str) -> str:
        return self.run("uninstall-service", "--root", str(self.root), *arguments)

    def files(self) -> dict[str, bytes]:
        """Path below the root -> content."""
        paths = [path for path in self.root.rglob("*") if path.is_file() or path.is_symlink()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def units_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_system_service_comes_where_systemd_looks(machine: Machine) -> None:
    said = machine.install()
    units = units_of(machine.root / "usr/local/lib/systemd/system")
    assert set(units) == SYSTEM_UNITS
    for name in ("edgeqwen.service", "edgeqwen@.service"):
        assert "\nExecStart=/usr/local/bin/edgeqwen serve --config /etc/edgeqwen/" in units[name]
        assert "/usr/bin/" not in units[name].replace("/usr/local/bin/", "")
        assert "\nDocumentation=file:///usr/local/share/doc/edgeqwen/operations.md\n" in units[name]
    for folder in ("sysusers.d", "tmpfiles.d"):
        assert (machine.root / "usr/local/lib" / folder / "edgeqwen.conf").is_file()
    assert (machine.root / "usr/local/share/edgeqwen/drop-ins/tcp.conf").is_file()
    assert "systemd-sysusers && systemd-tmpfiles --create" in said
    assert "systemctl daemon-reload && systemctl enable --now edgeqwen.socket" in said
    assert "no model yet: sudo edgeqwen pull" in said


def test_command_that_is_installed_works(machine: Machine) -> None:
    machine.install()
    program = machine.root / "usr/local/bin/edgeqwen"
    result = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert "edgeqwen" in result.stdout


def test_installing_twice_changes_nothing(machine: Machine) -> None:
    package = str(tiny_package(quant="int8"))
    machine.install("--model", package)
    before = machine.files()
    times = {path: path.lstat().st_mtime_ns for path in machine.root.rglob("*.*") if path.is_file()}
    assert "stays as it is" in machine.install("--model", package)
    assert machine.files() == before
    assert {path: path.lstat().st_mtime_ns for path in machine.root.rglob("*.*") if path.is_file()} == times


def test_settings_are_never_overwritten(machine: Machine) -> None:
    machine.install()
    settings = machine.root / "etc/edgeqwen/edgeqwen.toml"
    settings.write_text("[limits]\nqueue = 5\n")
    said = machine.install("--model", str(tiny_package(quant="int8")))
    assert settings.read_text() == "[limits]\nqueue = 5\n"
    assert 'package = "' in said  # what to write


def test_model_is_copied_and_named_in_new_settings(machine: Machine, tmp_path: Path) -> None:
    package = shutil.copytree(tiny_package(quant="int8"), tmp_path / "small")
    machine.install("--model", str(package))
    installed = machine.root / "var/lib/edgeqwen/models/small"
    assert {path.name for path in installed.iterdir()} == {path.name for path in package.iterdir()}
    assert (installed / "weights.bin").read_bytes() == (package / "weights.bin").read_bytes()
    assert '\npackage = "small"\n' in (machine.root / "etc/edgeqwen/edgeqwen.toml").read_text()
    assert "small is installed" in machine.install("--model", "small")


def test_settings_that_are_installed_are_those_of_the_daemon(machine: Machine, tmp_path: Path) -> None:
    from edgeqwen.config import ConfigSources

    package = shutil.copytree(tiny_package(quant="int8"), tmp_path / "small")
    machine.install("--model", str(package))
    config = ConfigSources(machine.root / "etc/edgeqwen/edgeqwen.toml", {}, {}).read()
    assert config.model.package == "small"


def test_model_that_is_nowhere_is_named(machine: Machine) -> None:
    flags = ["--root", str(machine.root), "--env", str(machine.environment), "--model", "nothing"]
    said = machine.run("install-service", *flags, exit_code=66)
    assert "nothing: neither a path nor a model" in said


def test_removing_leaves_settings_and_models(machine: Machine, tmp_path: Path) -> None:
    package = shutil.copytree(tiny_package(quant="int8"), tmp_path / "small")
    machine.install("--model", str(package))
    said = machine.uninstall()
    left = {path.split("/models/")[0] for path in machine.files()}
    assert left == {"etc/edgeqwen/edgeqwen.toml", "var/lib/edgeqwen"}
    assert "are still there" in said
    machine.install("--model", "small")  # and can be taken up again


def test_purging_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    package = shutil.copytree(tiny_package(quant="int8"), tmp_path / "small")
    machine.install("--model", str(package))
    drop_in = machine.root / "etc/systemd/system/edgeqwen.service.d/tcp.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\n")
    state = machine.root / "var/lib/edgeqwen/sessions/1"
    state.parent.mkdir()
    state.write_text("")
    machine.uninstall("--purge")
    assert machine.files() == {}
    machine.uninstall("--purge")  # once more is no error


def test_what_belongs_to_others_stays(machine: Machine) -> None:
    machine.install()
    others = ["usr/local/bin/other", "usr/local/lib/systemd/system/edgeqwen-backup.timer", "opt/edgeqwen-data/x"]
    for name in others:
        (machine.root / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.root / name).write_text("")
    machine.uninstall("--purge")
    assert sorted(machine.files()) == sorted(others)


def test_user_service_is_below_the_home(machine: Machine) -> None:
    said = machine.install("--user")
    home = machine.root / machine.home.relative_to("/")
    units = units_of(home / ".local/share/systemd/user")
    assert set(units) == UNITS
    assert "\nExecStart=%h/.local/bin/edgeqwen serve --config %E/edgeqwen/edgeqwen.toml\n" in units["edgeqwen.service"]
    assert (home / ".config/edgeqwen/edgeqwen.toml").is_file()
    assert (home / ".local/bin/edgeqwen").is_symlink()
    assert "systemctl --user daemon-reload" in said
    assert not (machine.root / "etc").exists()
    machine.uninstall("--user", "--purge")
    assert machine.files() == {}


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("install-service", ["--loud"], "unknown flag --loud"),
        ("install-service", ["--model"], "--model needs a value"),
        ("install-service", ["--purge"], "unknown flag --purge"),
        ("uninstall-service", ["--model", "x"], "unknown flag --model"),
        ("install-service", ["--env", "/nowhere", "--root"], "--root needs a value"),
    ],
)
def test_wrong_flags_are_a_usage_error(machine: Machine, script: str, arguments: list[str], words: str) -> None:
    said = machine.run(script, *arguments, exit_code=64)
    assert words in said
    assert f"usage: scripts/{script}" in said


def test_environment_without_edgeqwen_is_refused(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    flags = ["--root", str(machine.root), "--env", str(tmp_path / "empty")]
    assert "has no bin/edgeqwen" in machine.run("install-service", *flags, exit_code=64)
    assert machine.files() == {}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_nothing_is_wrong_with_installed_units(machine: Machine) -> None:
    machine.install()
    units = machine.root / "usr/local/lib/systemd/system"
    for path in units.iterdir():  # the program is not where it will be
        path.write_text(path.read_text(encoding="utf-8").replace("/usr/local/bin/edgeqwen", "/bin/true"))
    environ = {**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"}
    for name in ("edgeqwen.service", "edgeqwen@small.service"):
        command = ["systemd-analyze", "verify", "--man=no", str(units / name)]
        result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

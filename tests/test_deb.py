"""What scripts/build-deb packs, with stand-ins for the libraries; `scripts/soak package` installs the real one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import Final

import pytest

CHECKOUT: Final = Path(__file__).parents[1]
HOME: Final = "usr/lib/edgeqwen"
MINOR: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE: Final = f"{HOME}/lib/{MINOR}/site-packages"
UNCHECKED_HASH: Final = b"\1\0\0\0"  # PEP 552: bit 0 says that a hash stands there, bit 1 that it is to be checked

pytestmark = pytest.mark.skipif(which("dpkg-deb") is None, reason="dpkg-deb is not installed")


def output(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout


def build(folder: Path, libraries: Path) -> Path:
    environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "SOURCE_DATE_EPOCH": "1750000000"}
    command = [str(CHECKOUT / "scripts/build-deb"), "--libraries", str(libraries), "--out", str(folder)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def write_library(site: Path, name: str, tag: str) -> None:
    """A library as pip leaves it."""
    for part, text in {
        f"{name}/__init__.py": "ANSWER = 42\n",
        f"{name}/__init__.pyi": "ANSWER: int\n",
        f"{name}/__pycache__/__init__.cpython-311.pyc": "",
        f"{name}-1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n",
        f"{name}-1.0.dist-info/direct_url.json": "{}",
        f"bin/{name}": f"#!{sys.executable}\n",
    }.items():
        (site / part).parent.mkdir(parents=True, exist_ok=True)
        (site / part).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("libraries")
    write_library(site, "plain", "py3-none-any")
    write_library(site, "older", "cp311-cp311-manylinux_2_17_x86_64")
    write_library(site, "newer", "cp311-cp311-manylinux_2_28_x86_64")
    return site


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory, libraries: Path) -> Path:
    return build(tmp_path_factory.mktemp("dist"), libraries)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, deb: Path) -> Path:
    """What it unpacks to; DEBIAN has what is said of it."""
    folder = tmp_path_factory.mktemp("tree") / "root"
    output("dpkg-deb", "--raw-extract", deb, folder)
    return folder


@pytest.fixture(scope="module")
def control(deb: Path) -> Mapping[str, str]:
    lines = output("dpkg-deb", "--field", deb).splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith(" "))


def test_name_says_version_and_architecture(deb: Path, control: Mapping[str, str]) -> None:
    from edgeqwen import __version__

    arch = output("dpkg", "--print-architecture").strip()
    assert control["Version"].replace("~", "") == __version__.replace(".dev", "dev")
    assert control["Architecture"] == arch
    assert deb.name == f"edgeqwen_{control['Version']}_{arch}.deb"


def test_interpreter_and_libc_are_those_of_the_libraries(control: Mapping[str, str]) -> None:
    depends = control["Depends"].split(", ")
    assert depends[0] == MINOR
    assert "libc6 (>= 2.28)" in depends
    assert "procps" in depends  # /bin/kill of ExecReload=
    assert "systemd | systemd-standalone-sysusers" in depends


def test_environment_is_its_own(tree: Path) -> None:
    assert os.readlink(tree / HOME / "bin/python") == f"/usr/bin/{MINOR}"
    assert "home = /usr/bin\n" in (tree / HOME / "pyvenv.cfg").read_text(encoding="utf-8")
    assert (tree / SITE / "plain/__init__.py").is_file()
    program = (tree / "usr/bin/edgeqwen").read_text(encoding="utf-8")
    assert program.startswith("#!/usr/lib/edgeqwen/bin/python -I\n")
    assert (tree / "usr/bin/edgeqwen").stat().st_mode & 0o777 == 0o755


def test_whole_daemon_is_in_it(tree: Path) -> None:
    for path in (CHECKOUT / "edgeqwen").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (tree / SITE / path.relative_to(CHECKOUT)).read_bytes() == path.read_bytes(), path


def test_what_nobody_needs_is_left_out(tree: Path) -> None:
    names = {path.name for path in (tree / SITE).rglob("*")}
    assert not names & {"__init__.pyi", "direct_url.json", "bin"}


def test_modules_are_compiled_for_good(tree: Path) -> None:
    for source in (tree / SITE).rglob("*.py"):
        compiled = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        assert compiled.read_bytes()[4:8] == UNCHECKED_HASH, source


def test_nothing_tells_where_it_was_built(tree: Path, libraries: Path) -> None:
    built_at = [str(place).encode() for place in (CHECKOUT, libraries, Path(sys.executable))]
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            assert not [place for place in built_at if place in content], path


def test_files_are_roots_and_nobody_else_changes_them(deb: Path) -> None:
    for line in output("dpkg-deb", "--contents", deb).splitlines():
        mode, owner = line.split()[:2]
        assert owner == "root/root", line
        assert mode.startswith("l") or (mode[5], mode[8]) == ("-", "-"), line


def test_units_and_drop_ins_are_those_of_the_checkout(tree: Path) -> None:
    systemd = CHECKOUT / "systemd"
    places = {f"systemd/{kind}": systemd / kind for kind in ("system", "user")}
    places |= {kind: systemd / kind for kind in ("sysusers.d", "tmpfiles.d")}
    for place, folder in places.items():
        packed = {path.name: path.read_bytes() for path in (tree / "usr/lib" / place).iterdir()}
        assert packed == {path.name: path.read_bytes() for path in folder.iterdir()}
    drop_ins = {path.name for path in (tree / "usr/share/edgeqwen/drop-ins").iterdir()}
    assert drop_ins == {path.name for path in (systemd / "drop-ins").iterdir()}


def test_settings_are_kept_over_an_upgrade(tree: Path) -> None:
    assert (tree / "DEBIAN/conffiles").read_text(encoding="utf-8") == "/etc/edgeqwen/edgeqwen.toml\n"
    assert (tree / "etc/edgeqwen/edgeqwen.toml").read_bytes() == (CHECKOUT / "docs/edgeqwen.toml").read_bytes()


def test_program_of_the_units_is_in_it(tree: Path) -> None:
    for unit in (tree / "usr/lib/systemd").rglob("*.service"):
        started = [line for line in unit.read_text(encoding="utf-8").splitlines() if line.startswith("ExecStart=")]
        (program,) = (line.partition("=")[2].split()[0] for line in started)
        assert os.access(tree / program[1:], os.X_OK), unit


def test_document_of_the_units_is_in_it(tree: Path) -> None:
    for unit in (tree / "usr/lib/systemd").rglob("edgeqwen*"):
        for line in unit.read_text(encoding="utf-8").splitlines():
            if line.startswith("Documentation="):
                assert (tree / line.partition("file:///")[2]).is_file(), unit


def test_checksums_are_right(tree: Path) -> None:
    listed = (tree / "DEBIAN/md5sums").read_text(encoding="utf-8").splitlines()
    for line in listed:
        digest, _, name = line.partition("  ")
        assert hashlib.md5((tree / name).read_bytes(), usedforsecurity=False).hexdigest() == digest, name
    files = [path for top in ("etc", "usr") for path in (tree / top).rglob("*") if path.is_file()]
    assert len(listed) == sum(not path.is_symlink() for path in files)


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_maintainer_scripts_are_shell(tree: Path, script: str) -> None:
    path = tree / "DEBIAN" / script
    assert path.stat().st_mode & 0o777 == 0o755
    output("sh", "-n", path)
    assert path.read_text(encoding="utf-8").startswith("#!/bin/sh\nset -e\n")


def test_same_sources_give_the_same_package(deb: Path, libraries: Path, tmp_path: Path) -> None:
    assert build(tmp_path, libraries).read_bytes() == deb.read_bytes()


def test_wrong_flag_is_a_usage_error() -> None:
    command = [str(CHECKOUT / "scripts/build-deb"), "--loud"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 64
    assert "unknown flag --loud; usage: scripts/build-deb" in result.stderr

"""The daemon's choice between a package and a copy remade for this processor."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgeqwen.convert.importer import Target
from edgeqwen.convert.retarget import retarget_package
from edgeqwen.core.kernel import KERNEL_CHECK
from edgeqwen.core.package import MANIFEST, WEIGHTS, Package, open_package
from edgeqwen.cpu import Processor, read_processor
from edgeqwen.errors import CannotWrite
from edgeqwen.fitting import FOLDER, ORIGIN, better_target, fitting_package, remake_by_command
from tests.models import all_logits, tiny_package, tiny_runtime

VNNI = Processor("x86_64", "new", frozenset({"avx2", "avx512_vnni"}))
AVX2 = Processor("x86_64", "old", frozenset({"avx2"}))
ARM = Processor("aarch64", "board", frozenset({"asimd"}))

IDS = [3, 14, 15, 92, 65, 35]


class Remaker:
    """Remakes in this process and counts; `fails` is what it says instead."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[tuple[Path, Target]] = []

    def __call__(self, package: Package, out: Path, target: Target) -> None:
        self.calls.append((package.path, target))
        if self.fails:
            raise CannotWrite(self.fails)
        retarget_package(package.path, out, target=target)


@pytest.fixture
def unsigned(tmp_path: Path) -> Package:
    """An int8 package for any processor, in a place of its own."""
    shutil.copytree(tiny_package("qwen3", "int8", target="any"), tmp_path / "model")
    return open_package(tmp_path / "model")


@pytest.fixture
def signed_is_right() -> None:
    """Skips where signed weights are multiplied wrongly: nothing is remade into them there."""
    if read_processor().target == "any":
        pytest.skip("this processor has no VNNI")


def copies(cache: Path) -> list[Path]:
    return sorted((cache / FOLDER).iterdir()) if (cache / FOLDER).exists() else []


def test_package_for_any_processor_fits_all_but_those_with_vnni(unsigned: Package) -> None:
    assert better_target(unsigned, VNNI) == "vnni"
    assert better_target(unsigned, AVX2) is None
    assert better_target(unsigned, ARM) is None


@pytest.mark.parametrize("quant", ["fp32", "int4"])
def test_package_without_row_products_fits_every_processor(quant: str) -> None:
    package = open_package(tiny_package("qwen3", "fp32" if quant == "fp32" else "int4", target="any"))
    assert [better_target(package, processor) for processor in (VNNI, AVX2, ARM)] == [None, None, None]


@pytest.mark.usefixtures("signed_is_right")
def test_signed_package_fits_where_its_products_are_right() -> None:
    package = open_package(tiny_package("qwen3", "int8", target="vnni"))
    assert better_target(package, VNNI) is None


def test_signed_package_whose_products_are_wrong_is_to_be_remade_for_any(unsigned: Package) -> None:
    """Wrong products are had here from a check of signed weights that are not what they should be."""
    check = unsigned.path / KERNEL_CHECK
    signed = tiny_package("qwen3", "int8", target="vnni") / KERNEL_CHECK
    content = signed.read_bytes()
    column = bytes([127, 129])  # two columns of extremes
    assert column in content
    check.write_bytes(content.replace(column, bytes([126, 129]), 1))
    assert better_target(unsigned, AVX2) == "any"


def test_package_that_fits_is_used_itself_and_nothing_is_written(unsigned: Package, tmp_path: Path) -> None:
    remaker = Remaker()
    assert fitting_package(unsigned, AVX2, tmp_path / "cache", remake=remaker) is unsigned
    assert not remaker.calls
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("signed_is_right")
def test_copy_is_made_once_and_computes_the_same_bits(unsigned: Package, tmp_path: Path) -> None:
    remaker = Remaker()
    first, second = (fitting_package(unsigned, VNNI, tmp_path / "cache", remake=remaker) for _ in range(2))
    assert remaker.calls == [(unsigned.path, "vnni")]
    assert first == second
    assert first.manifest.weight_form == "signed"
    assert first.manifest.name == unsigned.manifest.name
    expected = all_logits(tiny_runtime(unsigned.path), IDS, chunk=3)
    assert np.array_equal(all_logits(tiny_runtime(first.path), IDS, chunk=3), expected)


@pytest.mark.usefixtures("signed_is_right")
def test_copy_of_a_package_that_has_changed_is_made_again(unsigned: Package, tmp_path: Path) -> None:
    remaker = Remaker()
    fitting_package(unsigned, VNNI, tmp_path / "cache", remake=remaker)
    changed = msgspec.structs.replace(unsigned.manifest, name="renamed")
    (unsigned.path / MANIFEST).write_bytes(msgspec.json.encode(changed))
    copy = fitting_package(open_package(unsigned.path), VNNI, tmp_path / "cache", remake=remaker)
    assert copy.manifest.name == "renamed"
    assert len(remaker.calls) == 2
    assert len(copies(tmp_path / "cache")) == 1


@pytest.mark.usefixtures("signed_is_right")
@pytest.mark.parametrize("damage", ["cut weights", "no origin", "no manifest"])
def test_damaged_copy_is_made_again(damage: str, unsigned: Package, tmp_path: Path) -> None:
    remaker = Remaker()
    copy = fitting_package(unsigned, VNNI, tmp_path / "cache", remake=remaker).path
    if damage == "cut weights":
        os.truncate(copy / WEIGHTS, 100)
    else:
        (copy / (ORIGIN if damage == "no origin" else MANIFEST)).unlink()
    assert fitting_package(unsigned, VNNI, tmp_path / "cache", remake=remaker).path == copy
    assert len(remaker.calls) == 2


@pytest.mark.usefixtures("signed_is_right")
def test_copies_of_packages_that_are_gone_and_all_but_the_last_used_are_removed(tmp_path: Path) -> None:
    cache, packages = tmp_path / "cache", []
    for number in range(4):
        shutil.copytree(tiny_package("qwen3", "int8", target="any"), tmp_path / f"model{number}")
        packages.append(open_package(tmp_path / f"model{number}"))
    first = fitting_package(packages[0], VNNI, cache, remake=Remaker())
    shutil.rmtree(packages[0].path)
    second, third, fourth = (fitting_package(package, VNNI, cache, remake=Remaker()) for package in packages[1:])
    assert not first.path.exists()
    assert not second.path.exists()
    assert copies(cache) == sorted([third.path, fourth.path])


@pytest.mark.usefixtures("signed_is_right")
def test_leftovers_of_a_killed_import_are_removed_once_they_are_old(unsigned: Package, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / FOLDER
    for name in (".old.importing", ".new.importing"):
        (folder / name).mkdir(parents=True)
    os.utime(folder / ".old.importing", (0, 0))
    fitting_package(unsigned, VNNI, tmp_path / "cache", remake=Remaker())
    assert not (folder / ".old.importing").exists()
    assert (folder / ".new.importing").exists()


def test_package_serves_as_it_is_where_no_copy_can_be_made(
    unsigned: Package, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert fitting_package(unsigned, VNNI, tmp_path / "cache", remake=Remaker("the disk is on fire")) is unsigned
    assert "the disk is on fire" in caplog.text
    assert f"edgeqwen import {unsigned.path} --target vnni --out {unsigned.path}" in caplog.text


def test_no_copy_is_begun_without_room_for_it(
    unsigned: Package, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaker = Remaker()
    monkeypatch.setattr("edgeqwen.fitting.RESERVE_BYTES", 1 << 62)
    assert fitting_package(unsigned, VNNI, tmp_path / "cache", remake=remaker) is unsigned
    assert not remaker.calls
    assert "to spare are needed" in caplog.text


def test_cache_directory_that_cannot_be_made_keeps_nothing_from_serving(unsigned: Package, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert fitting_package(unsigned, VNNI, tmp_path / "cache", remake=Remaker()) is unsigned


@pytest.mark.usefixtures("signed_is_right")
def test_command_remakes_a_package(
    unsigned: Package, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the project is found wherever the daemon runs
    caplog.set_level(logging.INFO)
    copy = fitting_package(unsigned, VNNI, tmp_path / "cache")
    assert copy.manifest.weight_form == "signed"
    assert "using a copy remade for this processor" in caplog.text


def test_what_the_command_complains_of_is_the_reason(unsigned: Package, tmp_path: Path) -> None:
    (unsigned.path / WEIGHTS).write_bytes(bytes(unsigned.manifest.sizes[WEIGHTS]))
    with pytest.raises(CannotWrite, match=f"{WEIGHTS}: content differs"):
        remake_by_command(unsigned, tmp_path / "made", "vnni")
    assert not (tmp_path / "made").exists()

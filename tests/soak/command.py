"""The command line of a long run: a package, a flag for each size, JSON lines with what was counted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.conversations.packages import smollm2
from edgeqwen.core.package import open_package
from tests.soak.service import Model, package_model, scripted_model

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Size = TypeVar("Size", bound="DataclassInstance")


def run_with_models(
    name: str, description: str | None, size: Size, run: Callable[[Path, Model, Size], dict[str, Any]]
) -> None:
    """Run with each type of cache that the package has (`--kv` for one), or with a scripted model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="default: SmolLM2-135M-Instruct in int8")
    parser.add_argument("--kv", choices=("fp32", "int8"), help="default: each that the package has")
    parser.add_argument("--scripted", action="store_true", help="no model at all")
    fields = dataclasses.fields(size)
    for each in fields:
        flag = "--" + each.name.removeprefix("num_").replace("_", "-")
        parser.add_argument(flag, type=type(each.default), default=each.default, dest=each.name)
    given = parser.parse_args()
    chosen = dataclasses.replace(size, **{each.name: getattr(given, each.name) for each in fields})
    with tempfile.TemporaryDirectory(prefix=f"soak-{name}-") as folder:
        for number, model in enumerate(_models(given, Path(folder))):
            began = time.monotonic()
            found = run(Path(folder) / str(number), model, chosen)
            print(json.dumps({"soak": name, "took_s": round(time.monotonic() - began), **found}), flush=True)


def _models(given: argparse.Namespace, folder: Path) -> list[Model]:
    if given.scripted:
        return [scripted_model(folder / "model")]
    package = given.package or smollm2()
    return [package_model(package, kv) for kv in open_package(package).manifest.kv_types if given.kv in {None, kv}]

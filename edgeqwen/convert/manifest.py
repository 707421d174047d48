"""What a package's manifest says of its files, and the writing of it: the last file of a package to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgeqwen.core.model import Manifest
from edgeqwen.core.package import MANIFEST, file_digest


@dataclass(frozen=True, slots=True)
class Files:
    """By name: sizes in bytes, and digests."""

    sizes: dict[str, int]
    digests: dict[str, str]


def describe_files(folder: Path, *, known: Mapping[str, str] | None = None) -> Files:
    """All files of `folder`, which has no manifest yet; `known` digests are not computed again."""
    known = known or {}
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return Files(
        sizes={path.name: path.stat().st_size for path in paths},
        digests={path.name: known.get(path.name) or file_digest(path) for path in paths},
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `model.json`, for people to read too."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")

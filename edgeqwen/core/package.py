"""A model package on disk: the folder that an import writes and that is all a daemon reads.

    model.json  decode.onnx  [prefill.onnx]  weights.bin  tokenizer.json  chat_template.jinja  generation_config.json

A graph over an int8 cache stands beside the one over a float32 cache, as `decode.kv8.onnx`; all graphs read the same
weights. Steps of many rows take the prefill graph if there is one.

`model.json` is the `Manifest`; it lists every other file with its size and digest, so a truncated, missing or mixed-up
file is told by name before anything is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edgeqwen.core.model import FORMAT_VERSION, KVType, Manifest, Stage
from edgeqwen.errors import ModelInvalid, ModelMissing

MANIFEST = "model.json"
GRAPH = "decode.onnx"
WEIGHTS = "weights.bin"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"

REQUIRED = (GRAPH, TOKENIZER, TEMPLATE, GENERATION_CONFIG)


@dataclass(frozen=True, slots=True)
class Package:
    """An opened package: every file is there in its size. `generation_config` is the model's own, perhaps empty."""

    path: Path
    manifest: Manifest
    generation_config: Mapping[str, Any]

    def graph_path(self, stage: Stage, kv_type: KVType) -> Path | None:
        """The graph of a stage over a type of cache; None if the package has none."""
        path = self.path / graph_file(stage, kv_type)
        return path if path.name in self.manifest.sizes else None

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those of the manifest and those of the generation config (an id or a list)."""
        return tuple(dict.fromkeys([*self.manifest.spec.eos_token_ids, *listed_eos(self.generation_config)]))

    def read_template(self) -> str | None:
        """Source of the chat template; None if the model has none. Raises `ModelInvalid` if it is not UTF-8."""
        path = self.path / TEMPLATE
        try:
            return _read(path).decode("utf-8") or None
        except UnicodeDecodeError as error:
            raise ModelInvalid(f"{path}: not UTF-8; import the model again") from error


def graph_file(stage: Stage, kv_type: KVType) -> str:
    """Name of a graph in a package."""
    return f"{stage}.onnx" if kv_type == "fp32" else f"{stage}.kv8.onnx"


def is_package(path: Path) -> bool:
    """Whether a package, rather than a checkpoint, lies at `path`, whole or not."""
    return (path / MANIFEST).is_file() and not (path / "config.json").exists()


def open_package(path: Path) -> Package:
    """Read the manifest and check that each file is there in its stated size.

    Raises `ModelMissing` if the folder or a file is not there, `ModelInvalid` if one is broken or not of this package.
    """
    if not os.path.exists(path):
        raise ModelMissing(f"{path}: no such model package")
    if not os.path.isfile(path / MANIFEST):
        if os.path.isdir(path) and not os.access(path, os.X_OK):
            raise ModelMissing(f"{path}: cannot be read: {os.strerror(errno.EACCES)}")
        raise ModelInvalid(f"{path}: not a model package (no {MANIFEST}); make one with `edgeqwen import {path}`")
    manifest = _read_manifest(path / MANIFEST)
    _check_files(path, manifest)
    return Package(path, manifest, _read_generation_config(path / GENERATION_CONFIG))


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files of a package that say how text is made, without a model: for a runtime that has none."""

    template: str | None
    generation_config: Mapping[str, Any]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return listed_eos(self.generation_config)


def read_text_files(path: Path) -> TextFiles:
    """Template and generation config of the folder `path`, as far as it has them."""
    template, config = path / TEMPLATE, path / GENERATION_CONFIG
    return TextFiles(
        template=(_read(template).decode("utf-8", "replace") or None) if os.path.isfile(template) else None,
        generation_config=_read_generation_config(config) if os.path.isfile(config) else {},
    )


def listed_eos(generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of a generation config, which is an id, a list of ids, or not there."""
    given = generation_config.get("eos_token_id")
    listed = given if isinstance(given, list) else [given]
    return tuple(token for token in listed if type(token) is int)


def named_digest(digest: Any) -> str:
    """A hash of hashlib's sha256 as a manifest states it."""
    return f"sha256:{digest.hexdigest()}"


def file_digest(path: Path) -> str:
    """Digest of a file as a manifest states it."""
    with path.open("rb") as file:
        return named_digest(hashlib.file_digest(file, "sha256"))


def verify_digests(package: Package, *, with_weights: bool = True) -> None:
    """Read every file and compare its digest; raises `ModelInvalid` that names the first one that differs.

    `with_weights` false leaves out the one file that takes long to read.
    """
    for name, digest in package.manifest.digests.items():
        if name == WEIGHTS and not with_weights:
            continue
        try:
            actual = file_digest(package.path / name)
        except OSError as error:
            raise _unreadable(package.path / name, error) from error
        if actual != digest:
            raise ModelInvalid(f"{package.path / name}: content differs from what {MANIFEST} states; import it again")


def _read_manifest(path: Path) -> Manifest:
    data = _read(path)
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
        if version != FORMAT_VERSION:
            raise ModelInvalid(f"{path}: package format {version}, not {FORMAT_VERSION}; import the model again")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelInvalid(f"{path}: not a valid manifest: {error}") from error
    if min(manifest.spec.num_tokens, manifest.spec.max_position) < 1:
        raise ModelInvalid(f"{path}: not a valid manifest: num_tokens and max_position must be above 0")
    return manifest


class _Versioned(msgspec.Struct):
    """The one member that every format has, read first so that another format is told from a broken file."""

    format_version: int


def _check_files(path: Path, manifest: Manifest) -> None:
    names = dict.fromkeys([*REQUIRED, *manifest.sizes])
    for name in names:
        if Path(name).name != name:
            raise ModelInvalid(f"{path / MANIFEST}: {name!r} lies outside of the package")
    missing = [name for name in names if not os.path.isfile(path / name)]
    if missing:
        raise ModelMissing(f"{path}: the package lacks {', '.join(missing)}; import the model again")
    for name in names:
        actual, size = _readable_size(path / name), manifest.sizes.get(name)
        if size is not None and actual != size:
            raise ModelInvalid(f"{path / name}: {actual} bytes, {MANIFEST} states {size}; import the model again")


def _readable_size(path: Path) -> int:
    """Size of a file in bytes. It is opened for it: one that cannot be read is to be found before it is needed."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ModelMissing:
    return ModelMissing(f"{path}: cannot be read: {error.strerror}")


def _read_generation_config(path: Path) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(_read(path) or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelInvalid(f"{path}: not a JSON object: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def models_dir(environ: Mapping[str, str], *, is_root: bool) -> Path:
    """Where installed packages live: /var/lib for root, the user's data directory (XDG) for others."""
    if is_root:
        return Path("/var/lib/edgeqwen/models")
    data = environ.get("XDG_DATA_HOME", "")
    if not data.startswith("/"):  # the XDG specification: a relative path is to be ignored
        data = f"{environ.get('HOME', '')}/.local/share"
    return Path(data) / "edgeqwen" / "models"


def installed_models(folder: Path) -> tuple[str, ...]:
    """Names of the packages in `folder`, sorted; not what an import is writing or has left (`.NAME.importing`)."""
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        return tuple(sorted(entry.name for entry in entries if (entry / MANIFEST).is_file()))
    except OSError:
        return ()


def resolve_model(name_or_path: str, folder: Path) -> Path:
    """Path of the package meant: an existing path, else a name in `folder`, else (empty) the only one in it."""
    names = installed_models(folder)
    if not name_or_path:
        if len(names) == 1:
            return folder / names[0]
        hint = (
            "get one with `edgeqwen pull ID` or `edgeqwen import PATH`"
            if not names
            else "say which one, `serve` by --model NAME"
        )
        raise ModelMissing(f"{len(names) or 'no'} models in {folder}{_listed(names)}; {hint}")
    if os.path.exists(name_or_path):
        return Path(name_or_path)
    if name_or_path in names:
        return folder / name_or_path
    raise ModelMissing(f"{name_or_path}: neither a path nor a model in {folder}{_listed(names)}")


def _listed(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names)})" if names else ""

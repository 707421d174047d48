"""The checkpoint that a package was made of, found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgeqwen.convert.hub import HubSettings, pull
from edgeqwen.core.model import Source
from edgeqwen.errors import ModelMissing


def find_checkpoint(package: Path, source: Source, settings: HubSettings) -> Path:
    """Where the checkpoint lies that `package` says it came from: the place it was imported from, or the cache of what
    was fetched from a hub. Nothing is fetched. Raises `ModelMissing` if it is not there.
    """
    if source.kind in {"hub", "modelscope"}:
        prefix = "modelscope:" if source.kind == "modelscope" else ""
        try:
            return pull(prefix + source.id, settings=replace(settings, offline=True), revision=source.revision).path
        except ModelMissing as error:
            raise _lost(package, f"{prefix}{source.id} is no longer in the cache of what was fetched") from error
    if source.path and Path(source.path).exists():
        return Path(source.path)
    if source.kind == "optimum":
        raise _lost(package, "this one was made of an exported graph")
    where = f"{source.path} is gone" if source.path else "it does not say where that lay"
    raise _lost(package, where)


def _lost(package: Path, reason: str) -> ModelMissing:
    return ModelMissing(
        f"{package}: torch serves the checkpoint that this package was made of, and {reason}; "
        "give the checkpoint itself (--model, model.package), or take --runtime onnx"
    )

"""Fetching checkpoints from a hub: Hugging Face (and mirrors of it) through its own library, ModelScope over HTTP.

Only files that an import reads are fetched: top-level JSON, templates, safetensors and GGUF; never pickles or code. A
pull names the commit that it got, and every file is of that commit. What was fetched stays in the cache, so an
interrupted pull goes on where it stopped and a finished one works without a network.
"""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from edgeqwen.convert.embedding_model import POOLING_FILE
from edgeqwen.core.model import Source
from edgeqwen.errors import BadRequest, ModelMissing

HUB_ENDPOINT: Final = "https://huggingface.co"
MODELSCOPE_ENDPOINT: Final = "https://www.modelscope.cn"
ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WEIGHTS: Final = re.compile(r"model(-[\w.-]+)?\.safetensors", re.ASCII)
SIDE_FILES: Final = frozenset({
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    POOLING_FILE,
})
FileProgress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where to fetch from and to. `cache` None is the hub library's own; `offline` uses what is there already."""

    endpoint: str = HUB_ENDPOINT
    modelscope_endpoint: str = MODELSCOPE_ENDPOINT
    cache: Path | None = None
    offline: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, cache: Path | None = None) -> HubSettings:
        """As the variables `HF_ENDPOINT`, `MODELSCOPE_ENDPOINT` and `HF_HUB_OFFLINE` say."""
        return cls(
            endpoint=(environ.get("HF_ENDPOINT") or HUB_ENDPOINT).rstrip("/"),
            modelscope_endpoint=(environ.get("MODELSCOPE_ENDPOINT") or MODELSCOPE_ENDPOINT).rstrip("/"),
            cache=cache,
            offline=environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "on", "yes", "true"),
        )


@dataclass(frozen=True, slots=True)
class ModelId:
    """`[modelscope:]ORG/NAME[:FILE.gguf]`, taken apart."""

    hub: Literal["hub", "modelscope"]
    repo: str
    file: str | None = None

    @property
    def name(self) -> str:
        return self.file or self.repo.partition("/")[2]


@dataclass(frozen=True, slots=True)
class PulledFolder:
    """What a pull got: `path` (a folder or a GGUF file) and `source` are what `open_checkpoint` takes."""

    path: Path
    source: Source


def parse_id(text: str) -> ModelId:
    """Raises `BadRequest` (field `id`) if `text` is not a model's id."""
    hub, rest = ("modelscope", text[11:]) if text.startswith("modelscope:") else ("hub", text.removeprefix("hf:"))
    repo, colon, file = rest.partition(":")
    is_file = not colon or (
        file.endswith(".gguf") and "/" not in file and "\\" not in file and not file.startswith(".")
    )
    if not ID.fullmatch(repo) or ".." in repo or not is_file:
        raise BadRequest(
            f"'{text[:120]}' is not a model's id: ORG/NAME, ORG/NAME:FILE.gguf or modelscope:ORG/NAME", field="id"
        )
    return ModelId("modelscope" if hub == "modelscope" else "hub", repo, file or None)


def choose_files(model_id: ModelId, names: Iterable[str]) -> list[str]:
    """Of the files of a repository those to fetch; raises `ModelMissing` if the weights are not among them.

    Safetensors are taken before GGUF; of several GGUF files the id must name one.
    """
    names = list(names)
    top = [name for name in names if "/" not in name]
    weights = sorted(name for name in top if WEIGHTS.fullmatch(name))
    ggufs = sorted(name for name in top if name.endswith(".gguf"))
    if model_id.file is not None:
        if model_id.file not in ggufs:
            raise ModelMissing(f"{model_id.repo} has no file {model_id.file}; {_listed(ggufs)}")
        weights = [model_id.file]
    elif "model.safetensors" in weights:
        weights = ["model.safetensors"]
    elif not weights:
        if len(ggufs) != 1:
            raise ModelMissing(f"{model_id.repo}: {_listed(ggufs)}; name one as {model_id.repo}:FILE.gguf")
        weights = ggufs
    return sorted(SIDE_FILES.intersection(names)) + weights


def pull(
    model: str,
    *,
    settings: HubSettings,
    revision: str | None = None,
    progress: FileProgress | None = None,
) -> PulledFolder:
    """Fetch `model` at `revision` (a branch, tag or commit; by default the hub's main branch) into the cache.

    `progress` is called with the share of bytes there, 0 to 1. Raises `BadRequest` for a malformed id, `ModelMissing`
    if there is no such model or no way to the hub, `ModelInvalid` if what came is not what the hub announced, and
    `CannotWrite`.
    """
    model_id = parse_id(model)
    report = progress or (lambda share: None)
    if model_id.hub == "modelscope":
        from edgeqwen.convert.hub_modelscope import pull_modelscope

        return pull_modelscope(model_id, settings=settings, revision=revision, progress=report)
    from edgeqwen.convert.hub_huggingface import pull_huggingface

    return pull_huggingface(model_id, settings=settings, revision=revision, progress=report)


def pulled(model_id: ModelId, weights: Path, commit: str) -> PulledFolder:
    """What was got; `weights` is the last of the chosen files: a GGUF file is a model, another part of a folder."""
    path = weights if weights.name.endswith(".gguf") else weights.parent
    name = f"{model_id.repo}:{model_id.file}" if model_id.file else model_id.repo
    return PulledFolder(path, Source(model_id.hub, name, commit))


def is_reachable(endpoint: str, *, timeout_s: float = 3.0) -> bool:
    """Whether a hub answers at `endpoint` in time. A name server or proxy that hangs counts as no."""
    answered = threading.Event()

    def knock() -> None:
        try:
            request = urllib.request.Request(f"{endpoint}/api/models?limit=1", headers={"User-Agent": "edgeqwen"})
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                if reply.status == 200:
                    answered.set()
        except (OSError, ValueError):  # no route, refused, a proxy's 403, no URL
            return

    thread = threading.Thread(target=knock, daemon=True)  # name resolution knows no timeout, so it is left behind
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()


def _listed(ggufs: list[str]) -> str:
    if not ggufs:
        return "it holds no safetensors and no GGUF files"
    more = f" and {len(ggufs) - 8} more" if len(ggufs) > 8 else ""
    return f"it holds the GGUF files {', '.join(ggufs[:8])}{more}"

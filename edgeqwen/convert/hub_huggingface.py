"""Pulling from Hugging Face, or a mirror of it, with the hub's own library (it resumes, checks and caches)."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from edgeqwen.convert.hub import SIDE_FILES, FileProgress, HubSettings, ModelId, PulledFolder, choose_files, pulled
from edgeqwen.errors import CannotWrite, EdgeqwenError, ModelMissing

TIMEOUT_S: Final = 10.0
DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def pull_huggingface(
    model_id: ModelId, *, settings: HubSettings, revision: str | None, progress: FileProgress
) -> PulledFolder:
    """See `hub.pull`."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True  # read at its import, so a variable would come too late
    try:
        if settings.offline:
            return _from_cache(model_id, settings, revision)
        return _download(model_id, settings, revision, progress)
    except EdgeqwenError:
        raise
    except Exception as e:  # transport errors are of the HTTP library, which changes with the hub library's version
        raise _mapped(e, model_id, settings, revision) from e


def _download(model_id: ModelId, settings: HubSettings, revision: str | None, progress: FileProgress) -> PulledFolder:
    from huggingface_hub import HfApi

    info = HfApi(endpoint=settings.endpoint).model_info(
        model_id.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S
    )
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    commit = info.sha
    if not commit:
        raise ModelMissing(f"{settings.endpoint} names no commit for {model_id.repo}: it is not a hub")
    names = choose_files(model_id, sizes)
    total = max(1, sum(sizes[name] for name in names))
    done = 0
    paths: dict[str, Path] = {}
    for name in names:
        count = _Counter(done, total, progress)
        paths[name] = _fetch(model_id, name, settings=settings, revision=commit, count=count)
        done += sizes[name]
        progress(done / total)
    _fetch(
        model_id, names[0], settings=settings, revision=revision, count=None
    )  # so the cache knows the branch offline
    return pulled(model_id, paths[names[-1]], commit)


def _fetch(
    model_id: ModelId, name: str, *, settings: HubSettings, revision: str | None, count: _Counter | None
) -> Path:
    from huggingface_hub import hf_hub_download

    extra: dict[str, Any] = {}
    if "tqdm_class" in inspect.signature(hf_hub_download).parameters:  # newer versions of the library
        extra["tqdm_class"] = _meter_class(count.add if count else lambda num_bytes: None)
    return Path(
        hf_hub_download(
            model_id.repo,
            name,
            revision=revision,
            cache_dir=settings.cache,
            endpoint=settings.endpoint,
            etag_timeout=TIMEOUT_S,
            **extra,
        )
    )


def _from_cache(model_id: ModelId, settings: HubSettings, revision: str | None) -> PulledFolder:
    """What an earlier pull left; the hub library looks into its cache alone."""
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            model_id.repo,
            revision=revision,
            cache_dir=settings.cache,
            local_files_only=True,
            allow_patterns=[*SIDE_FILES, model_id.file or "model*.safetensors"],
        )
    )
    names = choose_files(model_id, [path.name for path in folder.iterdir()])
    return pulled(model_id, folder / names[-1], folder.name)


class _Counter:
    """Bytes of one file, reported as a share of all files."""

    def __init__(self, before: int, total: int, progress: FileProgress) -> None:
        self._done = before
        self._total = total
        self._progress = progress

    def add(self, num_bytes: float) -> None:
        self._done += int(num_bytes)
        self._progress(min(1.0, self._done / self._total))


def _meter_class(add: Callable[[float], None]) -> type:
    """What the hub library takes in the place of a progress bar's class; `add` gets the bytes as they come."""

    class Meter:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.total = kwargs.get("total")
            self.n = kwargs.get("initial") or 0
            if self.n:
                add(self.n)

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *exc: object) -> None:
            return None

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            add(n or 0)

        def set_description(self, *args: Any, **kwargs: Any) -> None:
            return None

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            return None

        def close(self) -> None:
            return None

    return Meter


def _mapped(error: Exception, model_id: ModelId, settings: HubSettings, revision: str | None) -> EdgeqwenError:
    """An exception of the hub library, or of the HTTP library under it, as one of ours."""
    from huggingface_hub import errors

    where, repo = settings.endpoint, model_id.repo
    if isinstance(error, errors.GatedRepoError):
        return ModelMissing(f"{repo} is gated: accept its terms at {where}/{repo} and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelMissing(f"{repo} was not found at {where}: check the id; a private model needs HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelMissing(f"{repo} has no revision '{revision}' at {where}")
    if settings.offline:
        return ModelMissing(f"{repo} is not in the cache, or not all of it, and HF_HUB_OFFLINE forbids fetching it")
    if isinstance(error, errors.HfHubHTTPError):
        return ModelMissing(f"{where} answered {error.response.status_code} for {repo}: try again later")
    is_of_disk = isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_ERRORS)
    if isinstance(error, OSError) and is_of_disk:
        place = error.filename or settings.cache or "the hub's cache"
        return CannotWrite(f"{place} cannot be written while {repo} is fetched: {error.strerror}")
    detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return ModelMissing(f"{where} cannot be reached for {repo} ({detail}): check the network, or set HF_ENDPOINT")

"""Pulling from ModelScope over its HTTP interface.

    GET /api/v1/models/ORG/NAME/repo/files?Revision=R&Recursive=true
        {"Code": 200, "Success": true, "Data": {"LatestCommitter": {"ShortId": ...},
         "Files": [{"Path", "Type": "blob"|"tree", "Size", "Sha256", "Revision"}, ...]}}
    GET /api/v1/models/ORG/NAME/repo?Revision=R&FilePath=PATH        (ranges work; redirects to the store)

`Revision` of a file is the commit that last changed it. Of the repository's own commit the listing tells the first
digits; the newest file's revision completes them. An unknown revision is answered with no files, not with an error.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote_plus

from edgeqwen.convert.download import RemoteFile, download, write_error
from edgeqwen.convert.hub import FileProgress, HubSettings, ModelId, PulledFolder, choose_files, pulled
from edgeqwen.errors import ModelInvalid, ModelMissing

DEFAULT_REVISION: Final = "master"
TIMEOUT_S: Final = 10.0
MAX_LISTING_BYTES: Final = 16 << 20
COMPLETE: Final = ".complete"


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of a repository by path, and the commit they are of (empty if the hub does not tell)."""

    files: dict[str, RemoteFile]
    commit: str


def pull_modelscope(
    model_id: ModelId, *, settings: HubSettings, revision: str | None, progress: FileProgress
) -> PulledFolder:
    """See `hub.pull`."""
    wanted = revision or DEFAULT_REVISION
    root = (settings.cache or Path.home() / ".cache" / "edgeqwen") / "modelscope" / model_id.repo.replace("/", "--")
    if settings.offline:
        return _from_cache(model_id, root, wanted)
    listing = _list_files(model_id, settings.modelscope_endpoint, wanted)
    names = choose_files(model_id, listing.files)
    folder = root / _folder_name(listing.commit or wanted)
    total = max(1, sum(listing.files[name].size for name in names))
    done = 0
    for name in names:
        share = partial(_report, progress, done, total)
        download(listing.files[name], folder / name, on_bytes=share)
        done += listing.files[name].size
        progress(done / total)
    _remember(root, wanted, folder)
    return pulled(model_id, folder / names[-1], folder.name)


def _report(progress: FileProgress, before: int, total: int, num_bytes: int) -> None:
    progress((before + num_bytes) / total)


def _list_files(model_id: ModelId, endpoint: str, revision: str) -> Listing:
    url = f"{endpoint}/api/v1/models/{model_id.repo}/repo/files?Revision={quote_plus(revision)}&Recursive=true"
    data = _get_json(url, model_id, endpoint)
    rows = [row for row in data.get("Files") or () if isinstance(row, dict) and row.get("Type") != "tree"]
    if not rows:
        raise ModelMissing(f"{model_id.repo} has no files in revision '{revision}' at {endpoint}")
    commit = _commit(data, rows)
    files: dict[str, RemoteFile] = {}
    for row in rows:
        path, size, sha256 = row.get("Path"), row.get("Size"), row.get("Sha256") or None
        if isinstance(path, str) and isinstance(size, int) and size >= 0:
            query = f"Revision={quote_plus(commit or revision)}&FilePath={quote_plus(path)}"
            files[path] = RemoteFile(f"{endpoint}/api/v1/models/{model_id.repo}/repo?{query}", size, sha256)
    return Listing(files, commit)


def _commit(data: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    latest = data.get("LatestCommitter") or {}
    if latest.get("Id"):
        return str(latest["Id"])
    short = str(latest.get("ShortId") or "")
    full = [str(row.get("Revision")) for row in rows if short and str(row.get("Revision")).startswith(short)]
    return full[0] if full else ""


def _get_json(url: str, model_id: ModelId, endpoint: str) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"User-Agent": "edgeqwen"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            answer = json.loads(reply.read(MAX_LISTING_BYTES))
    except urllib.error.HTTPError as e:
        if e.code in (401, 403, 404):
            raise ModelMissing(f"{model_id.repo} was not found at {endpoint}, or is not public: check the id") from e
        raise ModelMissing(f"{endpoint} answered {e.code} for {model_id.repo}: try again later") from e
    except (OSError, ValueError, RecursionError) as e:
        reason = getattr(e, "reason", e)
        message = f"{endpoint} cannot be reached for {model_id.repo} ({str(reason)[:200]})"
        raise ModelMissing(f"{message}: check the network, or set MODELSCOPE_ENDPOINT") from e
    data = answer.get("Data") if isinstance(answer, dict) else None
    if not isinstance(data, dict) or not answer.get("Success", True):
        raise ModelInvalid(f"{endpoint} gave no listing of {model_id.repo}: it is not a ModelScope hub")
    return data


def _from_cache(model_id: ModelId, root: Path, revision: str) -> PulledFolder:
    """What an earlier pull of this revision completed."""
    try:
        folder = root / (root / f"{_folder_name(revision)}{COMPLETE}").read_text(encoding="ascii")
        names = choose_files(model_id, [path.name for path in folder.iterdir()])
    except (OSError, ModelMissing) as e:
        raise ModelMissing(f"{model_id.repo} is not in the cache, and HF_HUB_OFFLINE forbids fetching it") from e
    return pulled(model_id, folder / names[-1], folder.name)


def _remember(root: Path, revision: str, folder: Path) -> None:
    """Note under the branch's name which commit it was."""
    try:
        (root / f"{_folder_name(revision)}{COMPLETE}").write_text(folder.name, encoding="ascii")
    except OSError as e:
        raise write_error(root, e) from e


def _folder_name(revision: str) -> str:
    """A revision as one path component."""
    return quote_plus(revision).lstrip(".") or "_"

"""A server on a local port that acts as Hugging Face and as ModelScope for one repository."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "Org/Tiny"


@dataclass
class Hub:
    """What the server has and how it behaves; `requests` holds `(method, path, range header)` of all that came.

    `cuts` maps a file to the numbers of bytes after which the first connections for it break off. `is_gated` answers
    like a model whose terms were not accepted. `sha256` overrides the digests that ModelScope's listing gives.
    """

    files: dict[str, bytes]
    cuts: dict[str, list[int]] = field(default_factory=dict)
    is_gated: bool = False
    has_ranges: bool = True
    status: int | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""
    repo: str = REPO

    def fetched(self, name: str) -> list[str | None]:
        """The ranges asked for of a file, in order."""
        return [ranges for method, path, ranges in self.requests if method == "GET" and path.endswith(name)]


@contextlib.contextmanager
def serve_hub(files: dict[str, bytes], **behaviour: Any) -> Iterator[Hub]:
    hub = Hub(files, **behaviour)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Tests look at `Hub.requests` instead."""

    def _route(self) -> None:
        url = urlsplit(self.path)
        self.hub.requests.append((self.command, unquote(self.path), self.headers.get("Range")))
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if self.hub.status is not None:
            self._json({"error": "broken"}, self.hub.status)
        elif url.path.startswith("/api/v1/models/"):
            self._modelscope(url.path.removeprefix("/api/v1/models/"), query)
        elif url.path == "/api/models":
            self._json([], 200)
        elif url.path.startswith("/api/models/"):
            self._model_info(url.path.removeprefix("/api/models/"))
        elif "/resolve/" in url.path:
            repo, _, rest = url.path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            self._resolve(repo, revision, name)
        else:
            self._json({"error": "not found"}, 404)

    def _model_info(self, path: str) -> None:
        repo, _, revision = path.partition("/revision/")
        if self._is_refused(repo, revision or "main"):
            return
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.files.items()]
        self._json(
            {"_id": "1", "id": self.hub.repo, "modelId": self.hub.repo, "sha": COMMIT, "siblings": siblings}, 200
        )

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        if self._is_refused(repo, revision):
            return
        if name not in self.hub.files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        self._file(name, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(self.hub.files[name]).hexdigest()}"'})

    def _is_refused(self, repo: str, revision: str) -> bool:
        if repo != self.hub.repo:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif self.hub.is_gated:
            self._json({"error": "Access is restricted"}, 401, {"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", COMMIT):
            self._json({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _modelscope(self, path: str, query: dict[str, str]) -> None:
        if not path.startswith(f"{self.hub.repo}/repo"):
            self._json({"Code": 10010205001, "Message": "not found", "Success": False}, 404)
        elif path.endswith("/files"):
            known = query["Revision"] in ("master", COMMIT)
            rows = [self._row(name, data) for name, data in self.hub.files.items()] if known else None
            latest = {"Id": "", "ShortId": COMMIT[:8]} if known else None
            self._json({"Code": 200, "Success": True, "Data": {"Files": rows, "LatestCommitter": latest}}, 200)
        elif query["FilePath"] in self.hub.files and query["Revision"] in ("master", COMMIT):
            self._file(query["FilePath"], {})
        else:
            self._json({"Code": 404, "Success": False}, 404)

    def _row(self, name: str, data: bytes) -> dict[str, Any]:
        digest = self.hub.sha256.get(name, hashlib.sha256(data).hexdigest())
        row = {"Path": name, "Name": name, "Type": "blob", "Size": len(data), "Sha256": digest}
        return {**row, "Revision": COMMIT if name == "config.json" else "f" * 40}

    def _file(self, name: str, headers: dict[str, str]) -> None:
        data, start = self.hub.files[name], 0
        ranges = self.headers.get("Range")
        if ranges and self.hub.has_ranges:
            start = int(ranges.removeprefix("bytes=").partition("-")[0])
        is_part = bool(ranges) and self.hub.has_ranges
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        for key, value in {**headers, "Content-Length": str(len(data) - start), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(name, [])
        if cuts:
            self.wfile.write(data[start : start + cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def _json(self, value: object, status: int, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

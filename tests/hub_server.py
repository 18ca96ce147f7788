"""A stand-in for the Hugging Face Hub on localhost: the few requests that `huggingface_hub` makes, from a dictionary.

Serves `GET /api/models/ID/revision/REV`, `GET /api/models/ID/tree/REV` and `HEAD`, `GET /ID/resolve/REV/FILE` with the
headers the client reads (ETag, X-Repo-Commit, X-Error-Code), byte ranges, tokens, and connections that break.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A model repository with one commit on `main`.

    Attributes:
        files: content by name.
        gated: files need a token in `granted`; names are public.
        private: everything needs a token in `granted`.
        breaks: by file, how many times its transfer breaks off half-way.
        claims: by file, the bytes that listings say instead of its own.
    """

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    granted: frozenset[str] = frozenset()
    breaks: dict[str, int] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        state = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in self.files.items()}, sort_keys=True)
        return hashlib.sha1(state.encode()).hexdigest()


@dataclass
class Hub:
    """What the server holds, and what it was asked: (method, path, Range header)."""

    repositories: dict[str, Repository]
    valid_tokens: frozenset[str] = frozenset()
    url: str = ""
    down: bool = False
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def fetched(self, name: str) -> list[str | None]:
        """The Range headers of every GET of a file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free port; `hub.url` is the value for HF_ENDPOINT."""

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.state.requests.append((self.command, path, self.headers.get("Range")))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.state.down:
            return self._error(503, "", "Service unavailable")
        if token and token not in self.state.valid_tokens:
            return self._error(401, "", "Invalid credentials in Authorization header")
        parts = path.removeprefix("api/models/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.state.repositories.get(name)
        if repository is None or (repository.private and token not in repository.granted):
            return self._error(404, "RepoNotFound", "Repository not found")
        if len(rest) > 1 and rest[1] not in ("main", repository.commit):
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        if path.startswith("api/models/"):
            return self._listing(name, repository, tree=rest[:1] == ["tree"])
        if repository.gated and token not in repository.granted:
            return self._error(403 if token else 401, "GatedRepo", "Access to this model is restricted")
        return self._file(repository, "/".join(rest[2:]))

    def _listing(self, name: str, repository: Repository, tree: bool) -> None:
        files = repository.files.items()
        if tree:
            body: object = [
                {"type": "file", "path": path, "size": repository.claims.get(path, len(data)), "oid": _etag(data)}
                for path, data in files
            ]
        else:
            siblings = [{"rfilename": path} for path, _ in files]
            body = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings, "tags": []}
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: Repository, name: str) -> None:
        data = repository.files.get(name)
        if data is None:
            return self._error(404, "EntryNotFound", f"{name} does not exist")
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        breaks = self.command == "GET" and repository.breaks.get(name, 0) > 0
        if breaks:
            repository.breaks[name] -= 1
        return self._answer(
            206 if start else 200, data[start:], headers, sent=len(data[start:]) // 2 if breaks else None
        )

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer(status, json.dumps({"error": message}).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        """Answer with a body, of which only the first `sent` bytes are written before the connection is closed."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
        self.close_connection = sent is not None


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

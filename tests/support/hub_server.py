"""A server that speaks the few routes of the Hugging Face hub that a download takes, for repositories in memory."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

INFO = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(/revision/(?P<revision>.+))?")
TREE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(frozen=True, eq=False)
class Commit:
    """The files of a commit by their names."""

    files: dict[str, bytes]

    @cached_property
    def id(self) -> str:
        """Forty hex digits, as git has them."""
        return hashlib.sha1(repr([(name, etag(self.files[name])) for name in sorted(self.files)]).encode()).hexdigest()


def etag(content: bytes) -> str:
    """What stands for a file's content."""
    return hashlib.sha1(content).hexdigest()


@dataclass
class Hub:
    """What the server has, how it fails, and what it was asked for."""

    url: str = ""
    repositories: dict[str, dict[str, Commit]] = field(default_factory=dict)
    """Commits by the branches and tags that name them, for each repository."""
    gated: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    """What is said of a file's size where that is a lie."""
    broken: set[str] = field(default_factory=set)
    """Files whose sending ends in their middle, after which the hub has nothing but errors for the rest."""
    asked: list[str] = field(default_factory=list)
    """The paths of all requests."""
    fetched: list[str] = field(default_factory=list)
    """The files that were sent."""

    def commits(self, repository: str) -> dict[str, Commit]:
        """The commits of a repository by every revision that names one: a branch, a tag, or the commit itself."""
        named = self.repositories[repository]
        return named | {commit.id: commit for commit in named.values()}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at `hub.url`, until the block ends."""
    handler = type("HubHandler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is its own."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.split("?")[0])
        self.hub.asked.append(path)
        for route, answer in ((TREE, self._tree), (INFO, self._info), (FILE, self._file)):
            if match := route.fullmatch(path):
                repository, revision = match["id"], match["revision"] or "main"
                if repository in self.hub.gated:
                    self._refuse(403, "GatedRepo")
                elif repository not in self.hub.repositories:
                    self._refuse(404, "RepoNotFound")
                elif revision not in self.hub.commits(repository):
                    self._refuse(404, "RevisionNotFound")
                else:
                    answer(repository, self.hub.commits(repository)[revision], match)
                return
        self._refuse(404, "EntryNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _info(self, repository: str, commit: Commit, match: re.Match[str]) -> None:
        siblings = [{"rfilename": name, "size": self._size(name, content)} for name, content in commit.files.items()]
        self._send_json({"id": repository, "sha": commit.id, "siblings": siblings})

    def _tree(self, repository: str, commit: Commit, match: re.Match[str]) -> None:
        entries = [
            {"type": "file", "path": name, "size": self._size(name, content), "oid": etag(content)}
            for name, content in commit.files.items()
        ]
        self._send_json(entries)

    def _size(self, name: str, content: bytes) -> int:
        return self.hub.sizes.get(name, len(content))

    def _file(self, repository: str, commit: Commit, match: re.Match[str]) -> None:
        if match["file"] not in commit.files:
            self._refuse(404, "EntryNotFound")
            return
        content = commit.files[match["file"]]
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        breaks = self.command == "GET" and match["file"] in self.hub.broken
        if begin and breaks:
            self._refuse(500, "Broken")
            return
        if self.command == "GET":
            self.hub.fetched.append(match["file"])
        self._send(206 if begin else 200, content[begin:], headers, cut=breaks)

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

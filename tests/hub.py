"""A small hub on loopback that speaks Hugging Face's protocol, for `HF_ENDPOINT`: what its clients ask of it, and no more.

Repositories are of files in memory; each `add` is a commit of its main branch. Large files are answered as the hub answers them: a redirect
to a store that knows ranges and no login.
"""

import hashlib
import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LARGE_BYTES = 64 * 1024
"""Files from here on lie in the store."""

REVISION = "(refs/[^/]+/[^/]+|[^/]+)"

KINDS = {"models": "model", "datasets": "dataset"}


@dataclass
class Repository:
    """One repository; `commits` in the order in which they came."""

    kind: str
    name: str
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    allowed: set[str] = field(default_factory=set)
    """Users who may read it where it is gated or private."""

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch, a tag or a commit stands for."""
        return self.refs.get(revision) or (revision if revision in self.commits else None)


class Hub:
    """Its content, and every request that it had: `GET /api/models/a/b`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = url.replace("127.0.0.1", "localhost")
        """Where large files lie: another host, as a client sees it."""
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.users: dict[str, str] = {}
        """Token → user."""
        self.requests: list[str] = []
        self.broken = False
        """Whether it answers everything with an error of its own."""

    def add(
        self, name: str, files: Path | Mapping[str, bytes], *, kind: str = "model", gated: bool = False, private: bool = False,
        allowed: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        """Commit `files`, of a folder or by name, to the repository's main branch; returns the commit."""
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file()}
        repository = self.repositories.setdefault((kind, name), Repository(kind, name))
        repository.gated, repository.private = gated, private
        repository.allowed |= set(allowed)
        content = json.dumps({name: sha1(data) for name, data in files.items()}, sort_keys=True)
        commit = sha1(f"{kind} {name} {len(repository.commits)} {content}".encode())
        repository.commits[commit] = dict(files)
        repository.refs["main"] = commit
        return commit

    def tag(self, name: str, tag: str, commit: str, *, kind: str = "model") -> None:
        """Call `commit` `tag` too."""
        self.repositories[kind, name].refs[tag] = commit

    def environment(self, cache: Path, *, token: str = "", offline: bool = False) -> dict[str, str]:
        """Variables for a process that is to use this hub, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_TOKEN": token, "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_CACHE": str(cache / "hub"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip


@contextmanager
def hub() -> Generator[Hub]:
    """One that serves for the length of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    server.daemon_threads = True
    content = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.content = content  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield content
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use(found: Hub, monkeypatch: pytest.MonkeyPatch, folder: Path, *, token: str = "", offline: bool = False) -> None:
    """Let this process use it, with a cache of its own in `folder`."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HOME", str(folder / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))


def sha1(data: bytes) -> str:
    """As git names content, near enough for a client that takes it as a word."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.content  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base has it
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.broken:
            self._send(500, b"out of order", {"X-Error-Message": "out of order"})
        elif path == "/api/whoami-v2":
            user = self._user()
            self._json({"type": "user", "name": user} if user else {"error": "Invalid credentials"}, 200 if user else 401)
        elif found := re.fullmatch(r"/store/([0-9a-f]{64})", path):
            self._stored(found[1])
        elif found := re.fullmatch(rf"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/{REVISION}(?:/(.*))?)?", path):
            self._described(KINDS[found[1]], *found.groups()[1:])
        elif found := re.fullmatch(rf"/(datasets/)?([^/]+/[^/]+)/resolve/{REVISION}/(.+)", path):
            self._resolved("dataset" if found[1] else "model", *found.groups()[1:])
        else:
            self._send(404, b"", {"X-Error-Message": "no such page"})

    def _user(self) -> str:
        return self.hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "), "")

    def _repository(self, kind: str, name: str, *, content: bool) -> Repository | None:
        """The repository that this user may see, else None, and the answer is given. `content`: its files are asked for."""
        found = self.hub.repositories.get((kind, name))
        user = self._user()
        if found is None or (found.private and user not in found.allowed):
            self._error(404 if user else 401, "RepoNotFound", "Repository not found" if user else "Invalid username or password.")
            return None
        if content and found.gated and user not in found.allowed:
            told = f"Access to {kind} {name} is restricted" + (" and you are not in the authorized list" if user else "")
            self._error(403 if user else 401, "GatedRepo", told)
            return None
        return found

    def _described(self, kind: str, name: str, what: str | None, revision: str | None, below: str | None) -> None:
        repository = self._repository(kind, name, content=False)
        if repository is None:
            return
        commit = repository.commit_of(revision or "main")
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = repository.commits[commit]
        if what == "tree":
            self._json([_entry(file, data) for file, data in files.items() if not below or file.startswith(f"{below}/")])
        elif what == "paths-info":
            asked = _asked(self.body, self.headers.get("Content-Type", ""))
            folders = {str(parent) for file in files for parent in Path(file).parents} - {"."}
            told = [_entry(file, data) for file, data in files.items() if file in asked]
            self._json([*told, *({"type": "directory", "path": each, "oid": sha1(each.encode())} for each in folders & asked)])
        else:
            siblings = [{"rfilename": file, **_sizes(data)} for file, data in files.items()]
            self._json({
                "_id": sha1(name.encode())[:24], "id": name, "sha": commit, "private": repository.private, "disabled": False,
                "gated": "manual" if repository.gated else False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
            })  # fmt: skip

    def _resolved(self, kind: str, name: str, revision: str, file: str) -> None:
        repository = self._repository(kind, name, content=True)
        if repository is None:
            return
        commit = repository.commit_of(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        data = repository.commits[commit].get(file)
        told = {"X-Repo-Commit": commit}
        if data is None:
            self._error(404, "EntryNotFound", "Entry not found", told)
        elif len(data) < LARGE_BYTES:
            self._send(200, data, {**told, "ETag": f'"{sha1(data)}"'}, ranges=True)
        else:
            digest = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "Location": f"{self.hub.store}/store/{digest}"}
            self._send(302, b"", {**told, **linked})

    def _stored(self, digest: str) -> None:
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if len(data) >= LARGE_BYTES and hashlib.sha256(data).hexdigest() == digest:
                        self._send(200, data, {"ETag": f'"{digest}"'}, ranges=True)
                        return
        self._send(404, b"", {})

    def _error(self, code: int, error: str, message: str, headers: Mapping[str, str] = {}) -> None:
        told = {"X-Error-Code": error, "X-Error-Message": message}
        self._send(code, json.dumps({"error": message}).encode(), {**headers, **told, "Content-Type": "application/json"})

    def _json(self, value: object, code: int = 200) -> None:
        self._send(code, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, data: bytes, headers: Mapping[str, str], *, ranges: bool = False) -> None:
        total, told = len(data), dict(headers)
        if ranges:
            told["Accept-Ranges"] = "bytes"
            if code == 200 and (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
                begin, end = int(asked[1]), int(asked[2] or total - 1)
                if begin >= total:
                    code, data = 416, b""
                    told["Content-Range"] = f"bytes */{total}"
                else:
                    code, data = 206, data[begin : end + 1]
                    told["Content-Range"] = f"bytes {begin}-{min(end, total - 1)}/{total}"
        self.send_response(code)
        for key, value in told.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _sizes(data: bytes) -> dict[str, Any]:
    told: dict[str, Any] = {"size": len(data), "blobId": sha1(data)}
    if len(data) >= LARGE_BYTES:
        told["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return told


def _entry(file: str, data: bytes) -> dict[str, Any]:
    """As a listing of a tree has it."""
    sizes = _sizes(data)
    entry: dict[str, Any] = {"type": "file", "path": file, "oid": sizes["blobId"], "size": sizes["size"]}
    if lfs := sizes.get("lfs"):
        entry["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
    return entry


def _asked(body: bytes, content_type: str) -> set[str]:
    """The paths that a client asks about, as JSON or as a form."""
    if "json" in content_type:
        return set(json.loads(body)["paths"])
    return {unquote(part.partition("=")[2].replace("+", " ")) for part in body.decode().split("&") if part.startswith("paths=")}


def model_files(*, weights: int = 2 * LARGE_BYTES) -> dict[str, bytes]:
    """A model folder for jobs whose engines and trainer are scripted: its weights are so many bytes without a meaning."""
    from rubato.actors.training.base_model import CONFIG, make_tokenizer, write_tokenizer

    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    config = json.dumps({**CONFIG, "vocab_size": make_tokenizer().get_vocab_size()}).encode()
    return {**files, "config.json": config, "model.safetensors": b"w" * weights, "README.md": b"# a model", "pytorch_model.bin": b"b" * 100}

"""Copies of checkpoints away from the head's disk: in a folder or a bucket, by fsspec, which is imported once a mirror is named.

    URL/step_40.3.9f2c61aa/…               a checkpoint of step 40, copied by the trainer of term 3, whose token is 9f2c61aa
    URL/step_40.3.9f2c61aa/complete.json   written last: sizes and digests of all files of the copy; without it there is no copy
    URL/epoch_3.9f2c61aa                   that trainer's claim: of several the highest term copies, then the highest token

No file is written by two trainers, so one that was replaced and does not know it spoils nothing. Everything here blocks.

`python -m rubato.actors.checkpoints.mirror look|bring FOLDER` is the launcher's: the URL comes by stdin, and one line of JSON goes out.
"""

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.checkpoint import MANIFEST, sync_folder, write_through
from rubato.runtime.errors import ConfigError

KEY = "checkpoint.mirror"
COMPLETE = "complete.json"
LINEAGE = "lineage"
"""File beside a run's checkpoints: the name under which its mirror knows it, through every launch and folder."""
BESIDE = ("metrics.jsonl", "evals.jsonl")
"""Files of the run folder that go with each copy: the rows of the steps that it covers."""
STAGED = ".brought"
"""Where what is brought lies until it is whole, in the run folder."""

NAMED = re.compile(r"step_([0-9]{1,15})\.([0-9]{1,15})\.([0-9a-f]{8})")
CLAIMED = re.compile(r"epoch_([0-9]{1,15})\.([0-9a-f]{8})")

EXTRAS: Mapping[str, tuple[str, str]] = {
    "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"),
    "abfs": ("adlfs", ""), "az": ("adlfs", ""), "oss": ("ossfs", ""),
}  # fmt: skip
"""Scheme of an object store, which has no folders → the package that speaks it, and the extra that brings that."""

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 16 << 20
"""What an object store is sent at once, and what a copy takes of memory."""
MOST_COMPLETE_BYTES = 64 << 20
"""Of a complete.json that is read: some hundred thousand files."""


class MirrorError(Exception):
    """A mirror can't be read or written; a sentence without secrets."""


class GivenUp(MirrorError):
    """The copy under way stalled, and another try may have begun."""


class Gone(MirrorError):
    """The checkpoint that was to be copied is not there any more."""


class Superseded(MirrorError):
    """A later trainer copies to this mirror."""


class Claim(NamedTuple):
    """A trainer that copies; of two the later one is greater."""

    term: int
    token: str

    @property
    def name(self) -> str:
        return f"epoch_{self.term}.{self.token}"


class Copy(NamedTuple):
    """One copy of a checkpoint, whole or not; of two the one to go on from is greater."""

    claim: Claim
    step: int

    @property
    def name(self) -> str:
        return f"step_{self.step}.{self.claim.term}.{self.claim.token}"


class Complete(msgspec.Struct):
    """What a whole copy holds."""

    step: int
    lineage: str
    files: dict[str, tuple[int, str]]
    """Path within it → size and hex BLAKE2b-256; those of the checkpoint."""
    beside: dict[str, tuple[int, str]] = {}
    """The same of files of the run folder."""
    seed: int | None = None
    """`run.seed` of the run; None in copies of versions that did not keep it."""


class Looked(msgspec.Struct):
    """What `look` and `bring` found, or why they failed."""

    error: str = ""
    step: int = -1
    """Of the newest whole copy; -1: there is none."""
    lineage: str = ""
    seed: int | None = None
    """Of the run that was brought."""
    passed_over: list[str] = []
    """A sentence for each newer copy that is not whole."""


def shown(url: str) -> str:
    """`url` without a password or a query, for what is told and logged."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may hold a password
        return f"{url.partition('://')[0]}://…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")) if "://" in url else url


def check_url(url: str) -> None:
    """Raises ConfigError for what is no URL of a mirror, or needs a package that is missing. Imports none of them."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if not scheme:
        if not os.path.isabs(url):
            raise ConfigError(
                f"{KEY}={shown(url)} is neither a whole path nor a URL. Write /folder, s3://bucket/folder or gs://bucket/folder."
            )
        return
    try:
        netloc, path = urlsplit(url)[1:3]
    except ValueError:
        raise ConfigError(f"{KEY}={shown(url)} is no URL: what stands behind :// can't be read. Write s3://bucket/folder.") from None
    if scheme == "memory":
        raise ConfigError(f"{KEY}={shown(url)} is the memory of the process that writes there, and goes with it. Write /folder or s3://…")
    if scheme == "file":
        if netloc or path.rstrip("/") == "":
            raise ConfigError(f"{KEY}={shown(url)} is no whole path. Write file:///folder.")
        return
    package, extra = EXTRAS.get(scheme, ("", ""))
    if not package:
        package = _package_of(scheme, url)
    if package and find_spec(package) is None:
        with_what = f"rubato-rl[{extra}]" if extra else package
        raise ConfigError(
            f"{KEY}={shown(url)}: {scheme}:// needs {package}, which is not installed. Install it with: pip install '{with_what}'"
        )
    if scheme in EXTRAS and not netloc:
        raise ConfigError(f"{KEY}={shown(url)} names no bucket. Write {scheme}://BUCKET/FOLDER.")


def _package_of(scheme: str, url: str) -> str:
    """The module of fsspec that speaks `scheme`, or the package that it says is needed."""
    from fsspec.registry import known_implementations, registry

    known = known_implementations.get(scheme)
    if known is None and scheme not in registry:
        raise ConfigError(f"{KEY}={shown(url)}: there is no {scheme}:// among what fsspec knows. Write /folder, s3://… or gs://….")
    module = str(known["class"]).partition(".")[0] if known else ""
    return module if module != "fsspec" else ""


class Mirror:
    """One URL. Its methods raise MirrorError, and nothing else where the other side fails."""

    def __init__(self, url: str, moved: Callable[[], None] = lambda: None) -> None:
        self.shown = shown(url)
        self.moved = moved
        """Called whenever bytes went through; it may raise to end what runs."""
        self._url = url
        with self._told("can't be reached"):
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        self._has_folders = (url.partition("://")[0] if "://" in url else "file") not in EXTRAS

    def probe(self) -> None:
        """Write and remove a file: what a mirror is for must not show only at the first checkpoint."""
        if self._has_folders:
            parent = self._root.rstrip("/").rpartition("/")[0]
            with self._told("can't be reached"):
                there = self._fs.exists(parent or "/")
            if not there:
                raise MirrorError(f"{KEY}={self.shown}: there is no {parent}")
        path = f"probe.{secrets.token_hex(4)}"
        with self._told("can't be written"):
            self._write(path, b"x")
            self._fs.rm_file(self._path(path))

    def claims(self) -> list[Claim]:
        return [Claim(int(found[1]), found[2]) for name in self._names() if (found := CLAIMED.fullmatch(name))]

    def claim(self, mine: Claim) -> None:
        """From here on trainers that claimed before write no complete.json. Raises Superseded to one of them."""
        self.hold(mine)
        with self._told("can't be written"):
            self._write(mine.name, b"")
        for old in self.hold(mine):
            with self._told("can't be written"), suppress(FileNotFoundError):
                self._fs.rm_file(self._path(old.name))

    def hold(self, mine: Claim) -> list[Claim]:
        """Earlier claims. Raises Superseded where there is a later one."""
        claims = self.claims()
        if (newest := max([*claims, mine])) > mine:
            raise Superseded(f"{KEY}={self.shown}: a trainer of term {newest.term} took over from that of term {mine.term}")
        return [claim for claim in claims if claim < mine]

    def copies(self) -> list[Copy]:
        """All of them, whole or not, the one to go on from last."""
        return sorted(Copy(Claim(int(f[2]), f[3]), int(f[1])) for name in self._names() if (f := NAMED.fullmatch(name)))

    def complete(self, copy: Copy) -> Complete | None:
        """What a whole copy holds; None where it is torn."""
        with self._told("can't be read"):
            path = self._path(f"{copy.name}/{COMPLETE}")
            try:
                if self._fs.size(path) > MOST_COMPLETE_BYTES:
                    return None
                content = self._fs.cat_file(path)
            except FileNotFoundError:
                return None
        try:
            return msgspec.json.decode(content, type=Complete)
        except msgspec.MsgspecError:
            return None

    def put(self, copy: Copy, folder: Path, lineage: str, beside: Sequence[Path] = (), *, seed: int | None = None) -> None:
        """Copy the checkpoint in `folder`, and the files `beside`; complete.json comes last. Raises Gone, Superseded, and MirrorError."""
        try:
            manifest = checkpoints.manifest_of(folder)
            names = [*manifest.files, MANIFEST]
            files = {name: self._send(folder / name, f"{copy.name}/{name}") for name in names}
            rows = {path.name: self._send(path, f"{copy.name}/run/{path.name}") for path in beside if path.exists()}
        except (OSError, msgspec.MsgspecError) as error:
            raise Gone(f"checkpoint {folder} can't be copied: {error}") from error
        if wrong := [name for name, digest in manifest.files.items() if files[name][1] != digest]:
            raise MirrorError(f"checkpoint {folder} can't be copied: {wrong[0]} differs from its {MANIFEST}")
        self.hold(copy.claim)
        with self._told("can't be written"):
            self._write(f"{copy.name}/{COMPLETE}", msgspec.json.encode(Complete(copy.step, lineage, files, rows, seed)))

    def bring(self, copy: Copy, found: Complete, to: Path) -> None:
        """Write a whole copy to the new folder `to`: the checkpoint to checkpoints/step_N, the files beside it directly."""
        folder = to / "checkpoints" / f"step_{copy.step}"
        if other := sorted(found.beside.keys() - set(BESIDE)):  # code of the run's own folder is run
            raise MirrorError(f"{self.shown}/{copy.name} is altered: its {COMPLETE} has {other[0]!r} beside the checkpoint")
        try:
            for name, known in found.files.items():
                self._fetch(f"{copy.name}/{name}", _within(folder, name), known)
            for name, known in found.beside.items():
                self._fetch(f"{copy.name}/run/{name}", _within(to, name), known)
            manifest = checkpoints.manifest_of(folder)
        except (OSError, msgspec.MsgspecError) as error:
            raise MirrorError(f"{self.shown}/{copy.name} can't be brought to {to}: {error}") from error
        if manifest.step != copy.step or any(found.files.get(name, (0, ""))[1] != digest for name, digest in manifest.files.items()):
            raise MirrorError(f"{self.shown}/{copy.name} is altered: its {MANIFEST} tells of other files")

    def remove(self, copy: Copy) -> None:
        """Its complete.json goes first."""
        with self._told("can't be written"):
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(f"{copy.name}/{COMPLETE}"))
            with suppress(FileNotFoundError):
                self._fs.rm(self._path(copy.name), recursive=True)

    # -- within -------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        with self._told("can't be read"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        if self._has_folders:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, content)
        self.moved()

    def _send(self, source: Path, name: str) -> tuple[int, str]:
        """The size and digest of what was sent. Raises OSError where the source can't be opened."""
        with source.open("rb") as file, self._told("can't be written"):
            path = self._path(name)
            if self._has_folders:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            to = self._fs.open(path, "wb", block_size=BLOCK_BYTES)
            with ExitStack() as undo:
                undo.push(lambda kind, error, traceback: self._drop(to, path, again=isinstance(error, GivenUp)))
                found = self._pumped(file, to)
                to.close()
                undo.pop_all()
            return found

    def _drop(self, to: Any, path: str, *, again: bool) -> None:
        """What was sent of the file `path` gets no name there, and goes; `again`: unless another try may have sent it anew."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(Exception):  # what ended the copy is told
            if not isinstance(to, AbstractBufferedFile):
                to.close()
                if not again:
                    self._fs.rm_file(path)
                return
            try:
                if not again:  # where files grow in place it removes what has that name
                    to.discard()
            finally:
                to.closed = True  # to close it, as its finalizer does, would complete it

    def _fetch(self, name: str, to: Path, known: tuple[int, str]) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("wb") as file:
            with self._told("can't be read"), self._fs.open(self._path(name), "rb", block_size=BLOCK_BYTES) as source:
                found = self._pumped(source, file)
            file.flush()
            os.fsync(file.fileno())
        if found != tuple(known):
            raise MirrorError(f"{self.shown}/{name} is truncated or altered: its size or digest differs from {COMPLETE}'s")

    def _pumped(self, source: Any, to: Any) -> tuple[int, str]:
        size, digest = 0, blake2b(digest_size=32)
        while chunk := source.read(CHUNK_BYTES):
            to.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            self.moved()
        return size, digest.hexdigest()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Whatever another side's client raises becomes one sentence."""
        try:
            yield
        except MirrorError:
            raise
        except Exception as error:  # noqa: BLE001 - each client has errors of its own, and none may end training
            raise MirrorError(f"{KEY}={self.shown} {what}: {self._plain(error)}") from None

    def _plain(self, error: Exception) -> str:
        known = {errno.ENOSPC: "it is full", errno.EDQUOT: "its quota is used up"}
        if isinstance(error, OSError) and error.errno in known:
            return known[error.errno]
        said = " ".join(str(error).split())
        parts = urlsplit(self._url) if "://" in self._url else None
        for secret in filter(None, (self._url, parts and parts.query, parts and parts.password)):
            said = said.replace(secret, self.shown if secret == self._url else "***")
        said = re.sub(r"(?<=://)[^/@\s]+(?=@)", "***", said)
        return f"{said[:300] or 'no reason given'} ({type(error).__name__})"


def _within(folder: Path, name: str) -> Path:
    """The file `name` of `folder`. Raises MirrorError for a name that leads elsewhere."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise MirrorError(f"{name!r} is no file of a checkpoint")
    return path


def newest_whole(mirror: Mirror) -> tuple[Copy | None, Complete | None, list[str]]:
    """The copy to go on from, and a sentence for each later one that is torn."""
    torn: list[str] = []
    for copy in reversed(mirror.copies()):
        if found := mirror.complete(copy):
            return copy, found, torn
        torn.append(f"{mirror.shown}/{copy.name} is torn: it has no {COMPLETE}")
    return None, None, torn


def look(url: str) -> Looked:
    """What a mirror holds, after a file was written there. Raises MirrorError."""
    mirror = Mirror(url)
    mirror.probe()
    copy, found, torn = newest_whole(mirror)
    return Looked("", copy.step, found.lineage, found.seed, torn) if copy and found else Looked(passed_over=torn)


def bring(url: str, folder: Path) -> Looked:
    """Bring the newest whole copy into the run folder `folder`, which has no checkpoints.

    The folder is marked with a later term than that of any trainer that claimed the mirror, and the trainer of the run there draws one later
    still: when it claims the mirror, those copy no more. Until then nothing changes there, for the launch may still be refused. Raises
    MirrorError.
    """
    mirror, staged, passed_over = Mirror(url), folder / STAGED, list[str]()
    for copy in reversed(mirror.copies()):
        shutil.rmtree(staged, ignore_errors=True)
        found = mirror.complete(copy)
        if found is None:
            passed_over.append(f"{mirror.shown}/{copy.name} is torn: it has no {COMPLETE}")
            continue
        staged.mkdir()
        try:
            mirror.bring(copy, found, staged)
        except MirrorError as error:
            passed_over.append(str(error))
            continue
        write_through(staged / "checkpoints" / LINEAGE, found.lineage.encode())
        checkpoints.take_over(staged / "checkpoints", max([copy.claim, *mirror.claims()]).term + 1)
        for path in staged.iterdir():
            path.rename(folder / path.name)
        staged.rmdir()
        sync_folder(folder)
        return Looked("", copy.step, found.lineage, found.seed, passed_over)
    shutil.rmtree(staged, ignore_errors=True)
    if passed_over:
        raise MirrorError(f"{passed_over[0]}, and there is no other whole copy")
    raise MirrorError(f"{KEY}={mirror.shown} holds no checkpoint to go on from")


def lineage_of(folder: Path) -> str:
    """Of the run whose checkpoints lie in `folder`; empty where it never had a mirror."""
    try:
        return (folder / LINEAGE).read_text()[:64]
    except FileNotFoundError:
        return ""


def main(argv: Sequence[str], given: BinaryIO) -> int:
    url = given.read(1 << 16).decode()
    try:
        found = look(url) if argv[0] == "look" else bring(url, Path(argv[1]))
    except (MirrorError, OSError) as error:
        found = Looked(str(error))
    print(msgspec.json.encode(found).decode())  # noqa: T201 - what the launcher reads
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.buffer))

"""What a Tinker server keeps on disk, so that nothing it acknowledged is lost. All calls block.

RUN/tinker/models/MODEL/model.json                    whose it is, and its shape
                        covered                       the newest operation that a file of the trainer covers
                        ops/SEQ-DIGEST                an operation, MessagePack: until a file of the trainer covers it
                        results/SEQ-DIGEST-VERSION-CHANGED.KIND  what came of it, as clients read it
                        saves/SEQ                     what Save wrote
                        names/weights/NAME            which of them has the name
RUN/tinker/sampled.jsonl                              versions that sequences were sampled under, see ages.py
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from rubato.actors.messages.tinker import Operation

RecordT = TypeVar("RecordT")

Kind = Literal["json", "pb", "failed"]
"""JSON, Protocol Buffers, or an error in JSON."""

SEQ_DIGITS = 10

DIGEST_BYTES = 8

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Of what is saved."""

Area = Literal["weights", "sampler_weights"]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An operation, and what its client is told once it is carried out."""

    operation: Operation
    answer: dict[str, Any] = {}
    area: Area = "weights"
    name: str = ""
    """Of what a Save wrote; empty: none."""
    ttl_s: float | None = None
    metadata: dict[str, str] | None = None
    sampler: str = ""
    """Id of the sampling session that is to come of it; empty: none."""
    samples: tuple[tuple[str, ...], ...] = ()
    """Of each datum, the names of the sampled sequences that its client says it is made of."""
    overwrite: bool = False
    """What has the name makes room."""


_entry = msgspec.msgpack.Decoder(Entry)


def digest_of(packed: bytes) -> str:
    """By which a repeated operation is known."""
    return blake2b(packed, digest_size=DIGEST_BYTES).hexdigest()


def packed(entry: Entry) -> bytes:
    """As it stands in the journal."""
    return msgspec.msgpack.encode(entry)


def write(path: Path, data: bytes) -> None:
    """Whole or not at all, and there for good once this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}"
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Pending(NamedTuple):
    """An operation in the journal."""

    seq: int
    digest: str
    size: int


class Result(NamedTuple):
    """What came of an operation; `version` is where the model stands after it, and `changed` whether by it."""

    seq: int
    digest: str
    version: int
    changed: bool
    kind: Kind
    size: int

    @property
    def failed(self) -> bool:
        return self.kind == "failed"


class Told(NamedTuple):
    """A result as a client reads it."""

    body: bytes
    kind: Kind


class Owned(msgspec.Struct, frozen=True):
    """A model, as the server knows it."""

    id: str
    tenant: str
    session: str
    base: str
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    metadata: dict[str, Any] | None = None
    unloaded: bool = False


class Named(msgspec.Struct, frozen=True):
    """What was saved under a name."""

    seq: int
    version: int
    created: float
    """Seconds since 1970, as `expires`."""
    expires: float | None = None
    metadata: dict[str, str] | None = None


class ModelJournal:
    """Of one model, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- the model ---------------------------------------------------------------------------------------------------

    def describe(self, owned: Owned) -> None:
        write(self.folder / "model.json", msgspec.json.encode(owned))

    def owned(self) -> Owned | None:
        """None where there is no model that was described to its end."""
        return _read(self.folder / "model.json", Owned)

    # -- operations --------------------------------------------------------------------------------------------------

    def keep(self, seq: int, data: bytes) -> None:
        write(self.folder / "ops" / f"{seq:0{SEQ_DIGITS}d}-{digest_of(data)}", data)

    def pending(self) -> list[Pending]:
        """All that are there, in their order."""
        return sorted(self._pending())

    def _pending(self) -> Iterator[Pending]:
        for path in _files(self.folder / "ops"):
            seq, _, digest = path.name.partition("-")
            yield Pending(int(seq), digest, path.stat().st_size)

    def entry(self, each: Pending) -> Entry:
        return _entry.decode((self.folder / "ops" / f"{each.seq:0{SEQ_DIGITS}d}-{each.digest}").read_bytes())

    def drop(self, operations: Iterable[Pending]) -> None:
        for each in operations:
            (self.folder / "ops" / f"{each.seq:0{SEQ_DIGITS}d}-{each.digest}").unlink(missing_ok=True)

    def cover(self, seq: int) -> None:
        """A file of the trainer covers all up to this one."""
        write(self.folder / "covered", b"%d" % seq)

    def covered(self) -> int:
        """-1: none."""
        try:
            return int((self.folder / "covered").read_bytes())
        except (OSError, ValueError):
            return -1

    # -- results -----------------------------------------------------------------------------------------------------

    def settle(self, result: Result, body: bytes) -> None:
        write(self._path(result), body)

    def results(self) -> list[Result]:
        """All that are kept, in their order."""
        found: list[Result] = []
        for path in _files(self.folder / "results"):
            seq, digest, version, changed = path.stem.split("-", 3)
            kind: Any = path.suffix[1:]
            found.append(Result(int(seq), digest, int(version), changed == "1", kind, path.stat().st_size))
        return sorted(found)

    def told(self, result: Result) -> Told | None:
        """None where it is kept no more."""
        try:
            return Told(self._path(result).read_bytes(), result.kind)
        except FileNotFoundError:
            return None

    def forget(self, results: Iterable[Result]) -> None:
        for each in results:
            self._path(each).unlink(missing_ok=True)

    def _path(self, result: Result) -> Path:
        name = f"{result.seq:0{SEQ_DIGITS}d}-{result.digest}-{result.version}-{result.changed:d}.{result.kind}"
        return self.folder / "results" / name

    # -- what was saved ----------------------------------------------------------------------------------------------

    def save_folder(self, seq: int) -> Path:
        return self.folder / "saves" / str(seq)

    def name(self, area: Area, name: str, named: Named) -> None:
        """What had the name before goes."""
        before = self.named(area, name)
        write(self.folder / "names" / area / name, msgspec.json.encode(named))
        if before is not None and before.seq != named.seq:
            self.drop_save(before.seq)

    def named(self, area: Area, name: str) -> Named | None:
        return _read(self.folder / "names" / area / name, Named)

    def names(self) -> list[tuple[Area, str, Named]]:
        areas: tuple[Area, ...] = ("weights", "sampler_weights")
        there: list[tuple[Area, str]] = [(area, path.name) for area in areas for path in _files(self.folder / "names" / area)]
        return [(area, name, named) for area, name in there if (named := self.named(area, name)) is not None]

    def unname(self, area: Area, name: str) -> None:
        """And what was saved under it goes."""
        named = self.named(area, name)
        (self.folder / "names" / area / name).unlink(missing_ok=True)
        if named is not None:
            self.drop_save(named.seq)

    def saves(self) -> list[int]:
        """Of all that lie there, named or not, the seq of each."""
        return sorted(int(path.name) for path in _entries(self.folder / "saves") if path.name.isdigit())

    def drop_save(self, seq: int) -> None:
        shutil.rmtree(self.save_folder(seq), ignore_errors=True)

    def end(self) -> None:
        """The model is unloaded: what is left is what has a name."""
        kept = {named.seq for _, _, named in self.names()}
        for seq in self.saves():
            if seq not in kept:
                self.drop_save(seq)
        for name in ("ops", "results"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if not kept:
            shutil.rmtree(self.folder, ignore_errors=True)


class Book:
    """Append-only records of one kind, of which the newest of each key counts."""

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        self._path = path
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    def read(self) -> list[Any]:
        """In the order in which they were written. What a killed server left half-written, at the end, is passed over."""
        found: list[Any] = []
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                found.append(self._decoder.decode(line))
            except msgspec.MsgspecError:
                continue
        return found

    def rewrite(self, records: Iterable[Any]) -> None:
        """Keep these alone."""
        write(self._path, b"".join(msgspec.json.encode(each) + b"\n" for each in records))

    def add(self, *records: Any) -> None:
        """They are there for good once this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as file:
            file.write(b"".join(b"\n" + msgspec.json.encode(each) + b"\n" for each in records))
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []


def _files(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_file()]

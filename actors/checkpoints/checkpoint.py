"""Checkpoints on disk: one folder per step, complete or absent, every file listed with its digest."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from rubato.runtime.errors import has_no_room

MANIFEST = "manifest.json"
RECEIPTS = "receipts.msgpack"
"""What the SampleBuffer said of the samples of the steps that a checkpoint covers, a list of byte strings: it alone reads them."""

TERM = "epoch"
"""Name of the mark of the trainer that took a folder of checkpoints over."""

NAMED = re.compile(r"step_([0-9]+)")
"""Name of a checkpoint's folder; folders of other names are left alone."""

UNNAMED = re.compile(r"\.?waiting_[0-9]+\.([0-9]+)")
"""A checkpoint that does not count yet, with the term of its trainer."""


class CheckpointError(Exception):
    """A checkpoint can't be written or read: which, why, and what to do."""


class Replaced(Exception):
    """A trainer that was replaced finds its successor's mark."""


class Manifest(msgspec.Struct):
    """What a checkpoint folder claims to hold."""

    step: int
    term: int = msgspec.field(name="epoch")
    """Of the trainer, by the name under which it is stored."""
    files: dict[str, str]
    """Path within it → hex BLAKE2b-256."""


def write(
    folder: Path,
    files: Mapping[str, bytes],
    *,
    step: int,
    term: int,
    receipts: Sequence[bytes] = (),
    fill: Callable[[Path], Mapping[str, str]] | None = None,
) -> None:
    """Write `files` and the `receipts` into a new `folder`, all flushed to disk, then make it appear under its name.

    `fill` has others write into the folder that it is given, and returns the digest of each of their files.

    Leaves every earlier checkpoint as it was when the disk refuses: raises OSError where it is full, which passes, else CheckpointError.
    """
    building = folder.with_name(f".{folder.name}.building")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        contents = {**files, RECEIPTS: msgspec.msgpack.encode(receipts)}
        folders = {(building / name).parent for name in contents}
        for each in folders:
            each.mkdir(parents=True, exist_ok=True)
        digests = {name: write_through(building / name, content) for name, content in contents.items()}
        digests |= fill(building) if fill is not None else {}
        write_through(building / MANIFEST, msgspec.json.encode(Manifest(step, term, digests)))
        for each in folders:
            sync_folder(each)
        rename(building, folder)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        if has_no_room(error):
            raise
        raise CheckpointError(
            f"checkpoint {folder} could not be written: {error.strerror or error}. The one before it is intact: mend that and --resume."
        ) from error


def take_over(folder: Path, term: int) -> None:
    """From here on trainers of older terms than `term` name no checkpoint under `folder`. Blocks; raises Replaced to one of them."""
    folder.mkdir(parents=True, exist_ok=True)
    if (newest := newest_term(folder)) > term:
        raise Replaced(f"a trainer of term {newest} has taken over from term {term} in {folder}")
    draft = folder / f".epoch.{term}"
    draft.write_text(f"{term}")
    draft.replace(folder / TERM)


def newest_term(folder: Path) -> int:
    """Of the trainers that took `folder` over; 0: none did. Blocks."""
    marker = folder / TERM
    return int(marker.read_text()) if marker.exists() else 0


def name(folder: Path, to: Path, term: int) -> None:
    """Make the complete `folder` appear as `to`: it counts from here on.

    Blocks; raises Replaced to a trainer that was replaced, by which `folder` may be gone.
    """
    take_over(to.parent, term)
    try:
        rename(folder, to)
    except FileNotFoundError:
        raise Replaced(f"checkpoint {folder} is gone: a trainer of a later term removed it") from None


def rename(folder: Path, to: Path) -> None:
    """Make the complete `folder` appear as `to`, in place of what stands there. Raises OSError, and leaves that, where `folder` is gone."""
    aside = to.with_name(f".{to.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        to.rename(aside)
    try:
        folder.rename(to)
    except OSError:
        with suppress(OSError):
            aside.rename(to)
        raise
    sync_folder(to.parent)
    shutil.rmtree(aside, ignore_errors=True)


def check(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint. Raises CheckpointError for a missing, truncated or altered one."""
    try:
        manifest = manifest_of(folder)
        for name, digest in manifest.files.items():
            if digest_of_file(folder / name) != digest:
                raise CheckpointError(f"checkpoint {folder}: {name} is truncated or altered (its digest differs from {MANIFEST}'s)")
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}") from error
    return manifest


def manifest_of(folder: Path) -> Manifest:
    """What a checkpoint says of itself. Blocks; raises OSError or MsgspecError."""
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)


def newest_receipts(folder: Path) -> list[bytes]:
    """The receipts of the newest checkpoint under `folder` whose receipts are intact; none where there is none. Blocks."""
    for path in reversed(by_step(folder)):
        with suppress(OSError, msgspec.MsgspecError):
            content = (path / RECEIPTS).read_bytes()
            manifest = manifest_of(path)
            if manifest.files.get(RECEIPTS) == digest_of(content):
                return msgspec.msgpack.decode(content, type=list[bytes])
    return []


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint under `folder`, and a sentence for each newer one that was passed over."""
    passed_over: list[str] = []
    for path in reversed(by_step(folder)):
        try:
            check(path)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return path, passed_over
    return None, passed_over


def prune(folder: Path, keep: int, term: int, stay: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those of the steps in `stay`, and what a process that was killed had begun to write
    or never named, as `drop_unnamed`."""
    old = [path for path in by_step(folder)[:-keep] if step_of(path) not in stay]
    for path in (*old, *folder.glob(".*.replaced")):
        shutil.rmtree(path, ignore_errors=True)
    drop_unnamed(folder, term)


def drop_unnamed(folder: Path, term: int) -> None:
    """Remove what trainers of terms up to `term` had begun or never named. One that wakes and would name it finds it whole or gone.

    What a newer one has begun stays: the caller itself may have been replaced while it was stopped.
    """
    for path in folder.glob("waiting_*"):
        with suppress(OSError):
            if _term_of(path) <= term:
                path.rename(path.with_name(f".{path.name}.dropped"))
    for path in (*folder.glob(".*.building"), *folder.glob(".*.dropped")):
        if _term_of(path) <= term:
            shutil.rmtree(path, ignore_errors=True)


def _term_of(path: Path) -> int:
    found = UNNAMED.match(path.name)
    return int(found[1]) if found else 0


def by_step(folder: Path) -> list[Path]:
    """Checkpoints under `folder`, oldest step first, whether complete or not."""
    named = [(found, path) for path in folder.glob("step_*") if (found := NAMED.fullmatch(path.name))]
    return [path for _, path in sorted((int(found[1]), path) for found, path in named)]


def step_of(path: Path) -> int:
    """The step of a checkpoint that `by_step` found."""
    return int(path.name.removeprefix("step_"))


def last(folder: Path) -> Path | None:
    """The newest checkpoint under `folder`, whether complete or not."""
    return next(reversed(by_step(folder)), None) if os.path.isdir(folder) else None


def write_through(path: Path, content: bytes) -> str:
    """Write a file, on disk when this returns, and return its hex BLAKE2b-256. Blocks; raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest_of(content)


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def digest_of_file(path: Path) -> str:
    """As `write_through` returns it, of a file that is there. Blocks; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=32)).hexdigest()


def sync_folder(folder: Path) -> None:
    """What was named in `folder` stays named. Blocks; raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

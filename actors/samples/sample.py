"""What a sample is called, what is remembered of it, and how its payload is kept: in the Store, or in a file where it is large."""

import hashlib
import os
from pathlib import Path

import msgspec

from actors.messages.samples import Trajectory

INLINE_BYTES = 64 * 1024
"""The Store takes payloads up to this size."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """What the ledger tells of a sample, kept beside its payload."""

    attempt: int
    task: int
    version_first: int = -1
    """-1 where no trajectory came."""
    reward: float | None = None
    tokens: int = 0
    """Sampled tokens."""
    turns: int = 0
    wall_s: float = 0.0
    reason: str = ""


class Filed(msgspec.Struct, frozen=True):
    """Stands in the Store for a payload that lies in `file` of the samples folder; `digest` is its hex BLAKE2b-256."""

    file: str
    digest: str


class PayloadLost(Exception):
    """A filed payload is missing or differs from its digest."""


def group_id(number: int) -> str:
    """Padded, so that the order of names is the order of age."""
    return f"g{number:08d}"


def trajectory_id(group: str, member: int) -> str:
    return f"{group}.{member}"


def split_id(trajectory: str) -> tuple[str, int]:
    """Group and member of a trajectory id; raises ValueError for any other text."""
    group, dot, member = trajectory.rpartition(".")
    if not dot or not member.isdecimal():
        raise ValueError(f"{trajectory!r} is no trajectory id")
    return group, int(member)


def seed_of(purpose: str, run_seed: int, task: int) -> int:
    """31-bit seed of a task's environment. Held-out tasks are the same in every run, so that their results compare."""
    text = f"eval/{task}" if purpose == "eval" else f"{purpose}/{run_seed}/{task}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def note_of(trajectory: Trajectory) -> bytes:
    ticket = trajectory.ticket
    note = Note(
        attempt=ticket.attempt,
        task=ticket.task,
        version_first=trajectory.version_first,
        reward=trajectory.reward,
        tokens=sum(segment.mask.count(1) for segment in trajectory.segments),
        turns=trajectory.turns,
        wall_s=trajectory.wall_s,
    )
    return msgspec.msgpack.encode(note)


def file_payload(folder: Path, name: str, payload: bytes) -> bytes:
    """Write `payload` to `folder`, on disk when this returns, and return what the Store keeps instead. Blocks; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.{os.urandom(4).hex()}.partial"  # a put that is asked again writes beside itself
    with partial.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / name)
    listing = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(listing)
    finally:
        os.close(listing)
    return msgspec.msgpack.encode(Filed(name, _digest(payload)))


def is_filed(stored: bytes) -> bool:
    """A Filed travels as a MessagePack map, a Trajectory as an array."""
    return stored[0] >> 4 == 0x8


def read_payload(folder: Path, stored: bytes) -> bytes:
    """The payload itself. Blocks; raises PayloadLost."""
    filed = msgspec.msgpack.decode(stored, type=Filed)
    path = folder / filed.file
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise PayloadLost(f"sample file {path} can't be read: {error}") from error
    if _digest(payload) != filed.digest:
        raise PayloadLost(f"sample file {path} does not match its digest")
    return payload


def remove_payloads(folder: Path, trajectories: list[str]) -> None:
    """Delete the files of all attempts of samples that ended. Blocks; a file that is gone already is no error."""
    ended = {tuple(trajectory.split(".")) for trajectory in trajectories}
    for path in folder.iterdir() if folder.is_dir() else ():
        if tuple(path.name.split(".")[:2]) in ended:
            path.unlink(missing_ok=True)


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=32).hexdigest()

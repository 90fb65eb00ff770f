"""Blobs: immutable, named, versioned, checksummed buffers; written once, mapped or pulled by the processes that need them.

The digest of a blob is SHA-256 over the SHA-256 of each 4 MiB piece, so that pieces are hashed side by side and checked one by one.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol, TypeVar

from rubato.runtime.errors import RubatoError

ResultT = TypeVar("ResultT")

PIECE_BYTES = 4 << 20
"""Also what travels between hosts at once."""

DIGEST_BYTES = 32
THREADS = min(4, os.cpu_count() or 1)
"""More share the memory's bandwidth and gain nothing."""

INLINE_BYTES = 256 * 1024
"""Below, going to a thread costs more than the work."""

MAX_BLOB_BYTES = 1 << 40

INDEX_MARK = b"\xffPARTS\r\n"
"""Begins a blob that is the index of one in parts (runtime/blobs/parts.py)."""

KEPT = 2
"""Versions of a name that stay, the newest and the one before: a reader may be late by one publish."""


def piece_digest(piece: memoryview | bytes) -> bytes:
    """Of one piece. Releases the GIL."""
    return hashlib.sha256(piece).digest()


def join_digests(pieces: Sequence[bytes] | bytes) -> str:
    """The digest of the whole, in hex, from those of its pieces in order."""
    return hashlib.sha256(pieces if isinstance(pieces, bytes) else b"".join(pieces)).hexdigest()


def piece_digests(content: memoryview | bytes) -> list[bytes]:
    """Of every piece, one after another; none for what is empty."""
    view = memoryview(content)
    return [piece_digest(view[start : start + PIECE_BYTES]) for start in range(0, len(view), PIECE_BYTES)]


def digest_of(content: memoryview | bytes) -> str:
    """The digest of a whole blob, in hex."""
    return join_digests(piece_digests(content))


async def spread(count: int, work: Callable[[int], ResultT], size_bytes: int, pool: Executor | None = None) -> list[ResultT]:
    """`work(0)` … `work(count - 1)` in order, done by several threads at once where that pays; off the event loop."""
    if size_bytes <= INLINE_BYTES:
        return [work(index) for index in range(count)]

    def some(first: int) -> list[ResultT]:
        return [work(index) for index in range(first, count, THREADS)]

    loop = asyncio.get_running_loop()
    shares = await asyncio.gather(*(loop.run_in_executor(pool, some, n) for n in range(min(THREADS, count))))
    return [shares[index % THREADS][index // THREADS] for index in range(count)]


async def piece_digests_beside(content: memoryview) -> list[bytes]:
    """`piece_digests`, off the event loop."""

    def one(index: int) -> bytes:
        return piece_digest(content[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])

    return await spread(-(-len(content) // PIECE_BYTES), one, len(content))


class BlobError(RubatoError):
    """The boundary between an actor and the blobs of its host."""


class BlobMissing(BlobError):
    """That version was never put, or is freed already: ask for the newest."""


class BlobCorrupt(BlobError):
    """The content does not have its digest; it must not be used."""


class BlobInfo(NamedTuple):
    """What a reader checks: `digest` as runtime/blobs/blob.py makes it; empty for a blob put without, which stays on its host."""

    name: str
    version: int
    term: int
    digest: str
    size_bytes: int

    async def check(self, content: memoryview) -> None:
        """Raises BlobCorrupt where `content` does not have the digest; passes what has none. Hashed off the event loop."""
        if self.digest and join_digests(await piece_digests_beside(content)) != self.digest:
            raise BlobCorrupt(f"blob {self.name} version {self.version} does not have its digest {self.digest[:12]}…")


class Draft:
    """A blob that is being written, in the memory in which it will be read."""

    def __init__(self, info: BlobInfo, memory: memoryview, show: Callable[[BlobInfo], Awaitable[BlobInfo]], segment: int = -1) -> None:
        self.segment = segment
        """By which other processes of the host write into it too, with `BlobStore.shared`."""
        self.memory = memory
        """Writable. It is used for nothing else while there is a reference to it, or to a slice of it."""
        self._info = info
        self._show = show

    async def publish(self, digest: str) -> BlobInfo:
        """Show it; nothing may be written any more. Returns the standing blob where that has a higher term."""
        return await self._show(self._info._replace(digest=digest))


class BlobStore(Protocol):
    """Owned by the node agent, so a blob outlives the process that wrote it. Keeps the newest two versions of a name.

    Raises `BlobMissing` for what was never put or is already freed, `BlobCorrupt` when the digest does not match.
    """

    async def draft(self, name: str, version: int, term: int, size_bytes: int) -> Draft:
        """Room for a blob of this size. A draft that is let go of without `publish` leaves nothing."""
        ...

    async def shared(self, segment: int, size_bytes: int) -> memoryview:
        """The memory, writable, of a draft of this size that another process of this host began and has not published."""
        ...

    async def put(self, name: str, version: int, term: int, parts: Sequence[memoryview | bytes], *, checked: bool = True) -> BlobInfo:
        """Concatenate `parts` into version `version`. The same version under a higher term replaces it; under a lower one is
        ignored, and the standing one is returned. Without `checked` it gets no digest: readers on this host alone can use it."""
        ...

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        """A version, read-only and not copied; its digest, if it has one, is checked unless `check` is off.

        The content stays as it is for as long as the memoryview, or anything made from it without a copy, lives: only then is
        the memory used again, whatever is put or freed meanwhile.
        """
        ...

    async def newest(self, name: str) -> BlobInfo | None: ...

    async def forget(self, name: str) -> None:
        """Free every version of it on this host; what was got stays for who has it."""
        ...

    async def close(self) -> None:
        """Let go of everything; what `get` returned must not be used any more."""
        ...


def missing(name: str, version: int) -> BlobMissing:
    """The same sentence from every implementation, as for the check below."""
    return BlobMissing(f"blob {name} version {version} was never put, or is freed already")


def check_blob(name: str, version: int) -> None:
    """Raises BlobError for what no blob is called."""
    if not name or version < 0:
        raise BlobError(f"a blob needs a name and a version from 0, got {name!r} and {version}")


def by_age(blobs: Sequence[BlobInfo]) -> list[BlobInfo]:
    """Oldest first. A later term is newer whatever the version: its writer began again from an older one."""
    return sorted(blobs, key=lambda info: (info.term, info.version))

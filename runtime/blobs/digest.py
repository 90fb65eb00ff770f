"""The digest of a blob: SHA-256 over the SHA-256 of each 4 MiB piece, so that pieces are hashed side by side and checked one by one."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

ResultT = TypeVar("ResultT")

PIECE_BYTES = 4 << 20
"""Also what travels between hosts at once."""

DIGEST_BYTES = 32
THREADS = min(4, os.cpu_count() or 1)
"""More share the memory's bandwidth and gain nothing."""

INLINE_BYTES = 256 * 1024
"""Below, going to a thread costs more than the work."""


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


async def spread(
    count: int, work: Callable[[int], ResultT], size_bytes: int, pool: Executor | None = None
) -> list[ResultT]:
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

"""Cuts buffers into the parts of one ZeroMQ message and puts them together again, by a table of sizes that is checked, never trusted.

A part of 16 MiB moves without a copy on either side. Far larger ones fall off a cliff: their memory is mapped, faulted in and
unmapped anew for each message, which costs more than cutting them up and copying them together once.
"""

from collections.abc import Iterator, Sequence

import msgspec

from bus.codec import MAX_BUFFERS, MAX_BUFFERS_BYTES
from bus.errors import BadFrame

WHOLE_BYTES = 16 * 1024 * 1024
CHUNK_BYTES = 4 * 1024 * 1024
MAX_PARTS = 1 + MAX_BUFFERS + MAX_BUFFERS_BYTES // CHUNK_BYTES
"""Parts of one message beside its frame: the table, and at most this many pieces."""

_decode_table = msgspec.msgpack.Decoder(list[int]).decode


def cut(buffers: Sequence[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """The parts that follow a frame: the sizes of its buffers as a MessagePack array, then the buffers in order."""
    yield msgspec.msgpack.encode([len(buffer) for buffer in buffers])
    for buffer in buffers:
        size = len(buffer)
        if size <= WHOLE_BYTES:
            yield buffer
        else:
            view = memoryview(buffer)
            yield from (view[start : start + CHUNK_BYTES] for start in range(0, size, CHUNK_BYTES))


def join(parts: Sequence[memoryview]) -> list[memoryview]:
    """The buffers again, read-only. Allocates only what has already arrived. Raises BadFrame when parts and table disagree."""
    if not parts:
        return []
    try:
        sizes = _decode_table(parts[0])
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadFrame(f"the table of buffer sizes is malformed: {error}") from None
    pieces = iter(parts[1:])
    buffers = [_gather(size, pieces) for size in sizes]
    if next(pieces, None) is not None:
        raise BadFrame("more buffers arrived than the table names")
    return buffers


def _gather(size: int, pieces: Iterator[memoryview]) -> memoryview:
    """Take pieces until they fill `size` exactly; every buffer has one piece at least."""
    taken: list[memoryview] = []
    have = 0
    while not taken or have < size:
        piece = next(pieces, None)
        if piece is None:
            raise BadFrame(f"a buffer of {size} bytes ended after {have}")
        taken.append(piece)
        have += len(piece)
    if have != size:
        raise BadFrame(f"a buffer of {size} bytes arrived with {have}")
    return (taken[0] if len(taken) == 1 else memoryview(b"".join(taken))).toreadonly()

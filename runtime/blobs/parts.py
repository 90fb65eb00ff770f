"""Blobs in parts: what several hosts have written of one content, and how another host makes it whole.

In place of the content the blob is an index, which names a part on each host: a blob too, with the digest and the delta of any. A part is
sections, one from each of its writers: the size of the head (8 bytes, little-endian), the head (a MessagePack array of where each piece belongs
in the content and how many bytes it has), and the pieces one after another. Heads and pieces are filled up to 8 bytes.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rubato.bus.message import Request
from rubato.runtime.blobs.blob import INDEX_MARK, BlobCorrupt, BlobError, BlobInfo, BlobMissing, BlobStore, spread
from rubato.runtime.blobs.blob_messages import NotPulled, Pulled

ALIGN = 8

Piece = tuple[int, int]
"""Where it begins in the content, and how many bytes it has."""
Found = tuple[int, memoryview]
"""Where a piece begins in the content, and the piece."""


class JoinParts(Request[Pulled | NotPulled], frozen=True):
    """Make the whole of the blob in parts `name`, whose index and parts lie on your host. Asked often, it is made once."""

    idempotent: ClassVar[bool] = True
    name: str
    version: int
    term: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Of the same version and term as its index."""

    node: str
    """The node agent of the host that wrote it."""
    name: str
    digest: str
    size_bytes: int
    delta: str = ""
    delta_bytes: int = 0


class Index(msgspec.Struct, frozen=True, array_like=True):
    """`size_bytes` are those of the whole content."""

    size_bytes: int
    parts: tuple[Part, ...]

    @property
    def delta_bytes(self) -> int:
        """What travels of it where deltas do; 0 where all parts travel whole."""
        return sum(part.delta_bytes or part.size_bytes for part in self.parts) if any(part.delta for part in self.parts) else 0

    def encoded(self) -> bytes:
        return INDEX_MARK + msgspec.msgpack.encode(self)


def index_in(content: memoryview) -> Index:
    """Raises BlobCorrupt where it is none."""
    try:
        return msgspec.msgpack.decode(content[len(INDEX_MARK) :], type=Index)
    except msgspec.MsgspecError as error:
        raise BlobCorrupt(f"the index of a blob in parts can't be read: {error}") from None


def part_name(name: str, number: int) -> str:
    return f"{name}.part{number}"


def whole_name(name: str) -> str:
    """Of the blob that has the content of `name`, on a host that made it whole. It never leaves the host: it has no digest."""
    return f"{name}.whole"


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same bytes in as few pieces as can be, and none that is empty."""
    found = list[Piece]()
    for begin, num in pieces:
        if found and sum(found[-1]) == begin:
            found[-1] = found[-1][0], found[-1][1] + num
        elif num:
            found.append((begin, num))
    return found


def section_head(pieces: Sequence[Piece]) -> bytes:
    """What stands in front of the pieces of a section."""
    head = msgspec.msgpack.encode(pieces)
    return len(head).to_bytes(8, "little") + head + bytes(-len(head) % ALIGN)


def section_bytes(pieces: Sequence[Piece]) -> int:
    """Size of a section."""
    num_bytes = sum(num for _, num in pieces)
    return len(section_head(pieces)) + num_bytes + -num_bytes % ALIGN


def pieces_in(part: memoryview) -> list[Found]:
    """All pieces of a part. Raises BlobCorrupt."""
    found, at = list[Found](), 0
    while at < len(part):
        size = int.from_bytes(part[at : at + 8], "little")
        try:
            pieces = msgspec.msgpack.decode(part[at + 8 : at + 8 + size], type=list[Piece])
        except msgspec.MsgspecError as error:
            raise BlobCorrupt(f"the head of a part can't be read: {error}") from None
        at += 8 + size + -size % ALIGN
        for begin, num in pieces:
            found.append((begin, part[at : at + num]))
            if num < 0 or len(found[-1][1]) != num:
                raise BlobCorrupt(f"a part ends before its piece of {num} bytes at {begin}")
            at += num
        at += -at % ALIGN
    return found


def place_of(piece: Found) -> int:
    """What pieces are sorted by."""
    return piece[0]


def cut(pieces: Sequence[Found], begin: int, end: int) -> list[Found]:
    """What of the content's bytes from `begin` to `end` lies in `pieces`, which are sorted."""
    found = list[Found]()
    for at, piece in pieces[max(0, bisect_right(pieces, begin, key=place_of) - 1) :]:
        if at >= end:
            break
        if part := piece[max(0, begin - at) : end - at]:
            found.append((max(at, begin), part))
    return found


class Joins:
    """The blobs in parts that one host makes whole, each once at a time."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._lock = asyncio.Lock()

    async def join(self, request: JoinParts) -> Pulled | NotPulled:
        async with self._lock:
            whole = await self._blobs.newest(whole_name(request.name))
            had = (whole.term, whole.version) if whole else (-1, -1)
            try:
                if had > (request.term, request.version):
                    raise BlobMissing(f"version {had[1]} has replaced it")
                if had < (request.term, request.version):
                    await join(self._blobs, request.name, request.version, request.term)
            except BlobError as error:
                return NotPulled(f"blob {request.name} version {request.version} could not be made of its parts: {error}")
        return Pulled(())


async def join(blobs: BlobStore, name: str, version: int, term: int) -> BlobInfo:
    """Make it whole. Raises BlobMissing, and BlobCorrupt where a part is not what it should be, or the parts are not the whole."""
    index, parts = index_in(await _got(blobs, name, version, term, "")), list[memoryview]()
    for part in index.parts:
        parts.append(await _got(blobs, part.name, version, term, part.digest))
    pieces = sorted((piece for part in parts for piece in pieces_in(part)), key=place_of)
    ends = [begin + len(piece) for begin, piece in pieces]
    if [begin for begin, _ in pieces] != [0, *ends][:-1] or ends[-1:] != [index.size_bytes]:
        raise BlobCorrupt(f"the parts of blob {name} version {version} are not all of its {index.size_bytes} bytes, each once")
    # What was made before goes first: its memory is used again, unless it is still read.
    await blobs.forget(whole_name(name))
    draft = await blobs.draft(whole_name(name), version, term, index.size_bytes)
    await _copy(pieces, draft.memory)
    await _forget_older(blobs, name, len(index.parts))
    return await draft.publish("")


async def _got(blobs: BlobStore, name: str, version: int, term: int, digest: str) -> memoryview:
    info, content = await blobs.get(name, version)
    if info.term != term or (digest and info.digest != digest):
        raise BlobMissing(f"blob {name} version {version} of term {term} was replaced")
    return content


async def _copy(pieces: Sequence[Found], memory: memoryview) -> None:
    """Off the event loop, and without the GIL where a piece is large."""
    import numpy

    target = numpy.asarray(memory)

    def one(number: int) -> None:
        begin, piece = pieces[number]
        numpy.copyto(target[begin : begin + len(piece)], numpy.asarray(piece))

    await spread(len(pieces), one, len(memory))


async def _forget_older(blobs: BlobStore, name: str, number: int) -> None:
    """Free parts of a time when there were more of them."""
    while await blobs.newest(part_name(name, number)) is not None:
        await blobs.forget(part_name(name, number))
        number += 1

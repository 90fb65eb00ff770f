"""A process's way to the blobs of its host: maps each segment once, and tells the agent when the last view of a blob is gone.

A view's lifetime is its drop token: `get` hands out memory whose owner, when Python frees it, sends the token back. So memory is
never used again while a reader still has it, and no reader has to remember to release anything.

What it and the agent say to each other, a packet each, is at the top; docs/bus.md has the protocol.
"""

import asyncio
import contextlib
import mmap
import os
import socket
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import msgspec

from rubato.runtime.blobs.blob import (
    PIECE_BYTES,
    BlobError,
    BlobInfo,
    BlobMissing,
    Draft,
    check_blob,
    join_digests,
    missing,
    piece_digest,
    spread,
)

MAX_PACKET = 4096
"""Bytes: names are short, and contents travel as file descriptors."""


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Lend me a segment of at least this size to write into."""

    size_bytes: int


class Share(msgspec.Struct, tag=True, array_like=True):
    """Lend me, to write into it too, the segment of at least this size that another process of this host was lent and has not published."""

    segment: int
    size_bytes: int


class Publish(msgspec.Struct, tag=True, array_like=True):
    """The segment holds this blob; show it. I write no more."""

    segment: int
    info: BlobInfo


class Get(msgspec.Struct, tag=True, array_like=True):
    """Lend me the segment of this version; -1 asks for the newest one's description alone."""

    name: str
    version: int


class Forget(msgspec.Struct, tag=True, array_like=True):
    """Free every version of this name; answered by `Absent`."""

    name: str


class Drop(msgspec.Struct, tag=True, array_like=True):
    """I use that segment no more, once: the token that one `Begin`, `Share` or `Get` gave. Not answered."""

    segment: int


class Room(msgspec.Struct, tag=True, array_like=True):
    """A segment to write into, lent until it is dropped."""

    segment: int
    capacity: int
    gone: tuple[int, ...] = ()
    """Segments this connection mapped that exist no more: unmap them."""


class Found(msgspec.Struct, tag=True, array_like=True):
    """What the agent holds; `segment` is lent until it is dropped, or -1 where none was asked for."""

    info: BlobInfo
    segment: int = -1
    capacity: int = 0
    gone: tuple[int, ...] = ()


class Absent(msgspec.Struct, tag=True, array_like=True):
    """No such blob."""


class Denied(msgspec.Struct, tag=True, array_like=True):
    """The request makes no sense."""

    why: str


RequestPacket = Begin | Share | Publish | Get | Forget | Drop

ReplyPacket = Room | Found | Absent | Denied

encode = msgspec.msgpack.Encoder().encode

decode_request = msgspec.msgpack.Decoder(RequestPacket).decode

decode_reply = msgspec.msgpack.Decoder(ReplyPacket).decode

ReplyT = TypeVar("ReplyT", Room, Found)

Lent = tuple[ReplyPacket, memoryview]
"""An answer and the segment it lends, whole; empty where it lends none."""


class BlobClient:
    """One per process. Requests are answered in the order in which they were made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: _Connection | None = None

    async def draft(self, name: str, version: int, term: int, size_bytes: int) -> Draft:
        check_blob(name, version)
        reply, memory = await self._ask(Begin(size_bytes), Room, name, version)
        info = BlobInfo(name, version, term, "", size_bytes)
        return Draft(info, memory[:size_bytes], partial(self._show, reply.segment), reply.segment)

    async def shared(self, segment: int, size_bytes: int) -> memoryview:
        _, memory = await self._ask(Share(segment, size_bytes), Room, f"in segment {segment}", 0)
        return memory[:size_bytes]

    async def put(self, name: str, version: int, term: int, parts: Sequence[memoryview | bytes], *, checked: bool = True) -> BlobInfo:
        views = [view for part in parts if (view := memoryview(part)).nbytes]
        views = [view if view.ndim == 1 and view.format == "B" else view.cast("B") for view in views]
        draft = await self.draft(name, version, term, sum(map(len, views)))
        return await draft.publish(await _fill(draft.memory, views, checked=checked))

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        if version < 0:
            raise missing(name, version)
        reply, memory = await self._ask(Get(name, version), Found, name, version)
        info, content = reply.info, memory[: reply.info.size_bytes]
        if check:
            await info.check(content)
        return info, content

    async def newest(self, name: str) -> BlobInfo | None:
        try:
            return (await self._ask(Get(name, -1), Found, name, -1))[0].info
        except BlobMissing:
            return None

    async def forget(self, name: str) -> None:
        with contextlib.suppress(BlobMissing):
            await self._ask(Forget(name), Found, name, -1)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.hang_up("it was closed here")
            self._connection = None

    async def _show(self, segment: int, info: BlobInfo) -> BlobInfo:
        return (await self._ask(Publish(segment, info), Found, info.name, info.version))[0].info

    async def _ask(self, request: RequestPacket, wanted: type[ReplyT], name: str, version: int) -> tuple[ReplyT, memoryview]:
        """The answer and what it lends. Raises BlobError for any other answer than `wanted`."""
        try:
            if self._connection is None or self._connection.is_over:
                self._connection = _Connection(self._path)
            reply, memory = await self._connection.ask(request)
        except OSError as error:
            raise BlobError(f"the node agent's blobs at {self._path} can't be reached: {error.strerror or error}") from error
        if isinstance(reply, wanted):
            return reply, memory
        if isinstance(reply, Absent):
            raise missing(name, version)
        raise BlobError(reply.why if isinstance(reply, Denied) else f"the agent answered {type(reply).__name__}")


class _Connection:
    """One connection to the agent and what is mapped by way of it. Its end is the end of every token, so it is never cut for a
    cancelled request: memory lent to that one goes back when the answer comes, since no caller takes it."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._waiting: deque[asyncio.Future[Lent]] = deque()
        self._maps: dict[int, mmap.mmap] = {}
        self._owed: deque[int] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self.is_over = False

    def ask(self, request: RequestPacket) -> "asyncio.Future[Lent]":
        """Its answer, later. Raises OSError, also for an agent that does not keep up with what it is asked."""
        self._pay()
        try:
            self._socket.send(encode(request))
        except BrokenPipeError as error:
            self.hang_up("it closed the connection")
            raise ConnectionResetError("it closed the connection") from error
        future: asyncio.Future[Lent] = self._loop.create_future()
        self._waiting.append(future)
        return future

    def drop(self, number: int) -> None:
        """Give one token back. Called by any thread, at any moment: sending a packet is one system call."""
        try:
            self._socket.send(encode(Drop(number)))
        except BlockingIOError:
            self._owed.append(number)
        except OSError:
            return  # the connection is over, and every token with it

    def hang_up(self, why: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._maps.clear()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionResetError(why))

    def _pay(self) -> None:
        for _ in range(len(self._owed)):
            self.drop(self._owed.popleft())

    def _readable(self) -> None:
        try:
            while True:
                packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET, 1)
                if not packet:
                    raise ConnectionResetError("it closed the connection")
                self._arrived(decode_reply(packet), fds)
        except BlockingIOError:
            return
        except OSError as error:
            self.hang_up(str(error.strerror or error))

    def _arrived(self, reply: ReplyPacket, fds: list[int]) -> None:
        if isinstance(reply, Room | Found):
            for number in reply.gone:
                self._maps.pop(number, None)  # unmapped when its last view goes
            if fds:
                self._maps[reply.segment] = _map(fds[0], reply.capacity, writable=isinstance(reply, Room))
        lent = self._view(reply) if isinstance(reply, Room | Found) and reply.segment >= 0 else memoryview(b"")
        future = self._waiting.popleft()
        if not future.done():
            future.set_result((reply, lent))

    def _view(self, reply: Room | Found) -> memoryview:
        """The segment that was lent; its token goes back when the last reference to any of it is gone."""
        import numpy

        owner = numpy.frombuffer(self._maps[reply.segment], numpy.uint8)
        owner.flags.writeable = isinstance(reply, Room)
        weakref.finalize(owner, self.drop, reply.segment).atexit = False
        return owner.data


def _map(fd: int, capacity: int, *, writable: bool) -> mmap.mmap:
    try:
        mapped = mmap.mmap(fd, capacity, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):  # kernels built without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


async def _fill(memory: memoryview, parts: Sequence[memoryview], *, checked: bool) -> str:
    """Copy `parts` one after another into `memory`, several pieces at once, and return the digest of what was written."""
    import numpy

    starts = list(accumulate(map(len, parts), initial=0))
    target = numpy.asarray(memory)
    sources = [numpy.asarray(part) for part in parts]

    def piece(index: int) -> bytes:
        begin, end = index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, len(target))
        at, part = begin, bisect_right(starts, begin) - 1
        while at < end:
            upto = min(end, starts[part + 1])
            numpy.copyto(target[at:upto], sources[part][at - starts[part] : upto - starts[part]])  # without the GIL
            at, part = upto, part + 1
        return piece_digest(memory[begin:end]) if checked else b""

    digests = await spread(-(-len(target) // PIECE_BYTES), piece, len(target))
    return join_digests(digests) if checked else ""

"""Blobs of one host: the node agent owns the segments they lie in, every process maps them.

Wire: one SOCK_SEQPACKET connection per client, one MessagePack struct per packet, memory as file descriptors beside it. A descriptor comes
with a reply only when its connection has not had it before: each process maps a segment once. A writer is lent a segment, fills it and names
its digest; only then is it visible. A client that dies gives back everything it was lent: half-written blobs and drop tokens alike.

Segments stay mapped in their users and are used again once no process reads them: a fresh mapping costs a page fault per page and an
unmapping at the end, more than copying the pages. So a segment belongs to the writer that first asked for it, who keeps it mapped;
once its blob is freed and every reader has dropped it, that writer gets it back.
"""

import asyncio
import fcntl
import os
import socket
from collections import Counter
from pathlib import Path

import msgspec

from rubato.runtime.blobs.blob import KEPT, MAX_BLOB_BYTES, BlobInfo, by_age
from rubato.runtime.blobs.client import (
    MAX_PACKET,
    Absent,
    Begin,
    Denied,
    Drop,
    Forget,
    Found,
    Publish,
    ReplyPacket,
    RequestPacket,
    Room,
    Share,
    decode_request,
    encode,
)

MAX_GONE = 256
"""Segments named in one reply; the rest come with the next."""

Answer = tuple[ReplyPacket | None, "MemorySegment | None"]
"""A reply, and the segment that it lends."""

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: a writable mapping stays writable, and no further one can be made. Python names it from 3.13 on."""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE

PAGE_BYTES = 4096

HUGE_BYTES = 2 << 20

SPARES = 2
"""Free segments kept per writer: the next version's, and one whose reader was slow."""


class BlobServer:
    """Runs in the node agent's event loop. Keeps the newest two versions of each name; mapped ones live on for their readers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._clients: set[socket.socket] = set()
        self._blobs: dict[str, dict[int, tuple[BlobInfo, MemorySegment]]] = {}
        self._slab = Slab()

    @property
    def num_segments(self) -> int:
        """Memory files that exist: shown, lent or spare."""
        return self._slab.num_segments

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)  # left by an agent that was killed
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.listen(256)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        for client in list(self._clients):
            self._hang_up(client)
        self._blobs.clear()
        self._slab.close()

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except (BlockingIOError, OSError):
            return
        client.setblocking(False)
        self._clients.add(client)
        self._slab.join(client)
        asyncio.get_running_loop().add_reader(client.fileno(), self._readable, client)

    def _readable(self, client: socket.socket) -> None:
        try:
            packet = client.recv(MAX_PACKET)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet = b""
        try:
            if not packet:
                raise ConnectionError
            reply, segment = self._answer(decode_request(packet), client)
            if reply is not None:
                is_new = segment is not None and self._slab.is_new_to(client, segment)
                socket.send_fds(client, [encode(reply)], [segment.fd] if is_new and segment else [])
        except (OSError, KeyError, msgspec.MsgspecError):  # it closed, does not read its answers, or talks nonsense
            self._hang_up(client)

    def _answer(self, request: RequestPacket, client: socket.socket) -> Answer:
        """The reply, and the segment it lends. Raises KeyError for a token that the client does not hold."""
        if isinstance(request, Begin):
            return self._begin(request, client)
        if isinstance(request, Share):
            return self._share(request, client)
        if isinstance(request, Publish):
            return self._finish(request, client), None
        if isinstance(request, Drop):
            self._slab.drop(client, request.segment)
            return None, None
        if isinstance(request, Forget):
            for _, segment in self._blobs.pop(request.name, {}).values():
                self._slab.hide(segment)
            return Absent(), None
        versions = self._blobs.get(request.name, {})
        if request.version < 0 and versions:
            return Found(by_age([info for info, _ in versions.values()])[-1]), None
        if request.version not in versions:
            return Absent(), None
        info, segment = versions[request.version]
        self._slab.lend(client, segment)
        gone = self._slab.gone_for(client, MAX_GONE)
        return Found(info, segment.number, segment.capacity, gone), segment

    def _begin(self, request: Begin, client: socket.socket) -> Answer:
        if not 0 <= request.size_bytes <= MAX_BLOB_BYTES:
            return Denied(f"a blob has between 0 and {MAX_BLOB_BYTES} bytes, not {request.size_bytes}"), None
        try:
            segment = self._slab.lend_to_write(client, request.size_bytes)
        except OSError as error:
            return Denied(f"no memory file of {request.size_bytes} bytes: {error.strerror}"), None
        return Room(segment.number, segment.capacity, self._slab.gone_for(client, MAX_GONE)), segment

    def _share(self, request: Share, client: socket.socket) -> Answer:
        segment = self._slab.unshown(request.segment)
        if segment is None or not 0 <= request.size_bytes <= segment.capacity:
            return Denied(f"segment {request.segment} is no draft of {request.size_bytes} bytes"), None
        self._slab.lend(client, segment)
        return Room(segment.number, segment.capacity, self._slab.gone_for(client, MAX_GONE)), segment

    def _finish(self, request: Publish, client: socket.socket) -> Found | Denied:
        info = request.info
        segment = self._slab.written_by(client, request.segment)
        if segment is None:
            return Denied(f"segment {request.segment} was not lent to this writer, or is shown already")
        if not info.name or info.version < 0 or not 0 <= info.size_bytes <= segment.capacity:
            return Denied(f"a blob needs a name, a version and a size within its segment, got {info}")
        versions = self._blobs.setdefault(info.name, {})
        replaced = versions.get(info.version)
        if replaced is not None and replaced[0].term > info.term:  # a newer writer was faster
            return Found(replaced[0])
        try:
            segment.seal()
        except OSError as error:
            return Denied(f"the segment could not be sealed: {error.strerror}")
        segment.is_shown = True
        versions[info.version] = (info, segment)
        dropped = [replaced] if replaced else []
        dropped += [versions.pop(old.version) for old in by_age([each for each, _ in versions.values()])[:-KEPT]]
        for _, old in dropped:
            self._slab.hide(old)
        return Found(info)

    def _hang_up(self, client: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(client.fileno())
        self._clients.discard(client)
        self._slab.leave(client)
        client.close()


class MemorySegment:
    """One memory file. `users` counts the tokens that are out; `is_shown` whether a blob lies in it."""

    def __init__(self, number: int, capacity: int, writer: object) -> None:
        self.number, self.capacity, self.writer = number, capacity, writer
        self.fd = os.memfd_create("rubato-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, capacity)
        self.users = 0
        self.is_shown = False
        self.is_sealed = False

    def seal(self) -> None:
        """From here on only its writer's mapping can change it. Raises OSError."""
        if not self.is_sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.is_sealed = True


class Slab:
    """All segments of a host. A user (any hashable: a connection) holds tokens; what it held ends with it."""

    def __init__(self) -> None:
        self._segments: dict[int, MemorySegment] = {}
        self._tokens: dict[object, Counter[int]] = {}
        self._spares: dict[object, list[MemorySegment]] = {}
        self._knows: dict[object, set[int]] = {}
        self._gone: dict[object, list[int]] = {}
        self._last = 0

    def join(self, user: object) -> None:
        self._tokens[user], self._spares[user], self._knows[user], self._gone[user] = Counter(), [], set(), []

    def leave(self, user: object) -> None:
        """Everything `user` held is dropped, as if it had said so; segments that it wrote are freed once no process reads them."""
        tokens, spares = self._tokens.pop(user), self._spares.pop(user)
        del self._knows[user], self._gone[user]
        for segment in spares:
            self._free(segment)
        for number, count in tokens.items():
            segment = self._segments[number]
            segment.users -= count
            self._settle(segment)

    def lend_to_write(self, user: object, size_bytes: int) -> MemorySegment:
        """A segment without users, of at least `size_bytes`; one token of it goes to `user`."""
        spares = self._spares[user]
        fitting = [s for s in spares if size_bytes <= s.capacity <= capacity_for(2 * size_bytes)]
        if fitting:
            segment = min(fitting, key=lambda s: s.capacity)
            spares.remove(segment)
        else:
            for unfit in spares:
                self._free(unfit)
            spares.clear()
            self._last += 1
            segment = self._segments[self._last] = MemorySegment(self._last, capacity_for(size_bytes), user)
        return self.lend(user, segment)

    def lend(self, user: object, segment: MemorySegment) -> MemorySegment:
        """One more token of `segment` goes to `user`."""
        self._tokens[user][segment.number] += 1
        segment.users += 1
        return segment

    def drop(self, user: object, number: int) -> None:
        """`user` gives one token back. Raises KeyError where it holds none."""
        tokens = self._tokens[user]
        if tokens[number] < 1:
            raise KeyError(number)
        tokens[number] -= 1
        if not tokens[number]:
            del tokens[number]
        segment = self._segments[number]
        segment.users -= 1
        self._settle(segment)

    def written_by(self, user: object, number: int) -> MemorySegment | None:
        """The segment, if `user` holds it and may write into it."""
        segment = self._segments.get(number)
        usable = segment is not None and segment.writer is user and not segment.is_shown and self._tokens[user][number] > 0
        return segment if usable else None

    def unshown(self, number: int) -> MemorySegment | None:
        """The segment, if it is lent to its writer and no blob lies in it yet."""
        segment = self._segments.get(number)
        return segment if segment is not None and segment.users and not segment.is_shown else None

    def hide(self, segment: MemorySegment) -> None:
        """Its blob is freed; the segment goes back once every token of it is dropped."""
        segment.is_shown = False
        self._settle(segment)

    def is_new_to(self, user: object, segment: MemorySegment) -> bool:
        """Whether `user` needs its descriptor; asked once per answer, as it is known to `user` from then on."""
        if segment.number in self._knows[user]:
            return False
        self._knows[user].add(segment.number)
        return True

    def gone_for(self, user: object, most: int) -> tuple[int, ...]:
        """Segments that `user` has mapped and that exist no more, each told once."""
        gone = self._gone[user]
        told, self._gone[user] = gone[:most], gone[most:]
        return tuple(told)

    def close(self) -> None:
        for segment in list(self._segments.values()):
            self._free(segment)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def _settle(self, segment: MemorySegment) -> None:
        """A segment without users becomes its writer's spare, or is freed."""
        if segment.users or segment.is_shown:
            return
        spares = self._spares.get(segment.writer)
        if spares is None or len(spares) >= SPARES:
            self._free(segment)
        else:
            spares.append(segment)

    def _free(self, segment: MemorySegment) -> None:
        del self._segments[segment.number]
        os.close(segment.fd)
        for user, known in self._knows.items():
            if segment.number in known:
                known.discard(segment.number)
                self._gone[user].append(segment.number)


def capacity_for(size_bytes: int) -> int:
    """Whole pages, huge ones where it is large; never nothing, as no empty file can be mapped."""
    unit = HUGE_BYTES if size_bytes >= HUGE_BYTES else PAGE_BYTES
    return max(1, -(-size_bytes // unit)) * unit

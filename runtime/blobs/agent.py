"""Blobs of one host: the node agent owns the segments they lie in, every process maps them.

Wire: one SOCK_SEQPACKET connection per client, packets as in runtime/blobs/wire.py. A writer is lent a segment, fills it and names
its digest; only then is it visible. A client that dies gives back everything it was lent: half-written blobs and drop tokens alike.
"""

import array
import asyncio
import socket
from pathlib import Path

import msgspec

from runtime.blobs.blob import BlobInfo
from runtime.blobs.memory import KEPT
from runtime.blobs.slab import MemorySegment, Slab
from runtime.blobs.wire import (
    MAX_GONE,
    MAX_PACKET,
    Absent,
    Begin,
    Denied,
    Drop,
    Found,
    Publish,
    ReplyPacket,
    RequestPacket,
    Room,
    decode_request,
    encode,
)

MAX_BLOB_BYTES = 1 << 40

Answer = tuple[ReplyPacket | None, MemorySegment | None]


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
                fds = (
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd]))]
                    if is_new and segment
                    else []
                )
                client.sendmsg([encode(reply)], fds)
        except (OSError, KeyError, msgspec.MsgspecError):  # it closed, does not read its answers, or talks nonsense
            self._hang_up(client)

    def _answer(self, request: RequestPacket, client: socket.socket) -> Answer:
        """The reply, and the segment it lends. Raises KeyError for a token that the client does not hold."""
        if isinstance(request, Begin):
            return self._begin(request, client)
        if isinstance(request, Publish):
            return self._finish(request, client), None
        if isinstance(request, Drop):
            self._slab.drop(client, request.segment)
            return None, None
        versions = self._blobs.get(request.name, {})
        if request.version < 0 and versions:
            return Found(versions[max(versions)][0]), None
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

    def _finish(self, request: Publish, client: socket.socket) -> Found | Denied:
        info = request.info
        segment = self._slab.written_by(client, request.segment)
        if segment is None:
            return Denied(f"segment {request.segment} was not lent to this writer, or is shown already")
        if not info.name or info.version < 0 or not 0 <= info.size_bytes <= segment.capacity:
            return Denied(f"a blob needs a name, a version and a size within its segment, got {info}")
        versions = self._blobs.setdefault(info.name, {})
        replaced = versions.get(info.version)
        if replaced is not None and replaced[0].epoch > info.epoch:  # a newer writer was faster
            return Found(replaced[0])
        try:
            segment.seal()
        except OSError as error:
            return Denied(f"the segment could not be sealed: {error.strerror}")
        self._slab.show(segment)
        versions[info.version] = (info, segment)
        dropped = [replaced] if replaced else []
        dropped += [versions.pop(old) for old in sorted(versions)[:-KEPT]]
        for _, old in dropped:
            self._slab.hide(old)
        return Found(info)

    def _hang_up(self, client: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(client.fileno())
        self._clients.discard(client)
        self._slab.leave(client)
        client.close()

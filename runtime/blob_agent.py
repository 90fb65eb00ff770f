"""Blobs of one host: sealed memory files that the node agent owns and every process maps.

Wire: one SOCK_SEQPACKET connection per client, one MessagePack struct per packet, file descriptors beside it (SCM_RIGHTS).
A writer gets an empty memory file, fills it, and names its digest; only then is it sealed and visible. What dies half-way
leaves nothing, because nobody else holds the file.
"""

import array
import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.blob_memory import KEPT, digest_of
from runtime.blobs import BlobCorrupt, BlobError, BlobInfo, BlobMissing

MAX_PACKET = 4096
MAX_BLOB_BYTES = 1 << 40
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
CHUNK_BYTES = 8 << 20
"""Written per system call, so that a thread that writes gigabytes can be cancelled between two of them."""


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Give me an empty file of this size."""

    name: str
    version: int
    epoch: int
    size_bytes: int


class Finish(msgspec.Struct, tag=True, array_like=True):
    """The file is filled; seal it and show it."""

    digest: str


class Get(msgspec.Struct, tag=True, array_like=True):
    """Give me the file of this version; -1 asks for the newest one's description alone."""

    name: str
    version: int


class Found(msgspec.Struct, tag=True, array_like=True):
    """What the agent holds; a descriptor comes beside it where one was asked for."""

    info: BlobInfo


class Absent(msgspec.Struct, tag=True, array_like=True):
    """No such blob."""


class Denied(msgspec.Struct, tag=True, array_like=True):
    """The request makes no sense."""

    why: str


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Begin | Finish | Get).decode
_decode_reply = msgspec.msgpack.Decoder(Found | Absent | Denied).decode


class _Writer:
    """One client's connection, and the file it is filling."""

    def __init__(self) -> None:
        self.begun: Begin | None = None
        self.fd = -1

    def drop(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.begun, self.fd = None, -1


class BlobServer:
    """Runs in the node agent's event loop. Keeps the newest two versions of each name; mapped ones live on in their readers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._clients: dict[socket.socket, _Writer] = {}
        self._blobs: dict[str, dict[int, tuple[BlobInfo, int]]] = {}

    async def start(self) -> None:
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.listen(256)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for client in list(self._clients):
            self._hang_up(client)
        for versions in self._blobs.values():
            for _, fd in versions.values():
                os.close(fd)
        self._blobs.clear()

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except (BlockingIOError, OSError):
            return
        client.setblocking(False)
        self._clients[client] = _Writer()
        asyncio.get_running_loop().add_reader(client.fileno(), self._readable, client)

    def _readable(self, client: socket.socket) -> None:
        try:
            packet = client.recv(MAX_PACKET)
            if not packet:
                raise ConnectionError
            reply, fd = self._answer(_decode_request(packet), self._clients[client])
            fds = [] if fd < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            client.sendmsg([_encode(reply)], fds)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError):
            self._hang_up(client)

    def _answer(self, request: Begin | Finish | Get, writer: _Writer) -> tuple[Found | Absent | Denied, int]:
        if isinstance(request, Begin):
            return self._begin(request, writer)
        if isinstance(request, Finish):
            return self._finish(request, writer), -1
        versions = self._blobs.get(request.name, {})
        if request.version < 0 and versions:
            return Found(versions[max(versions)][0]), -1
        if request.version not in versions:
            return Absent(), -1
        return Found(versions[request.version][0]), versions[request.version][1]

    def _begin(self, request: Begin, writer: _Writer) -> tuple[Found | Denied, int]:
        if not 0 <= request.size_bytes <= MAX_BLOB_BYTES or not request.name or request.version < 0:
            return Denied(f"a blob needs a name, a version and a size, got {request}"), -1
        known = self._blobs.get(request.name, {}).get(request.version)
        if known is not None and known[0].epoch > request.epoch:
            return Found(known[0]), -1
        writer.drop()
        writer.begun, writer.fd = (
            request,
            os.memfd_create(f"rubato:{request.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),
        )
        os.ftruncate(writer.fd, request.size_bytes)
        return Found(BlobInfo(request.name, request.version, request.epoch, "", request.size_bytes)), writer.fd

    def _finish(self, request: Finish, writer: _Writer) -> Found | Denied:
        begun = writer.begun
        if begun is None:
            return Denied("nothing was begun on this connection")
        try:
            fcntl.fcntl(writer.fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            writer.drop()
            return Denied(f"the file could not be sealed ({error.strerror}): is it still mapped for writing?")
        info = BlobInfo(begun.name, begun.version, begun.epoch, request.digest, begun.size_bytes)
        versions = self._blobs.setdefault(begun.name, {})
        replaced = versions.pop(begun.version, None)
        versions[begun.version] = (info, writer.fd)
        writer.begun, writer.fd = None, -1
        dropped = [replaced] if replaced else []
        dropped += [versions.pop(old) for old in sorted(versions)[:-KEPT]]
        for _, fd in dropped:
            os.close(fd)
        return Found(info)

    def _hang_up(self, client: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(client.fileno())
        self._clients.pop(client).drop()
        client.close()


class BlobClient:
    """A process's way to the blobs of its host. One request at a time; waiting ones queue in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def put(self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes]) -> BlobInfo:
        size = sum(map(len, parts))
        async with self._turn:
            reply, fd = await self._ask(Begin(name, version, epoch, size))
            if fd < 0:  # the same version under a higher epoch stands already
                return _found(reply, name, version)
            try:
                digest = await _in_thread(_fill, fd, parts)
            finally:
                os.close(fd)
            reply, _ = await self._ask(Finish(digest))
        return _found(reply, name, version)

    async def get(self, name: str, version: int) -> tuple[BlobInfo, memoryview]:
        async with self._turn:
            reply, fd = await self._ask(Get(name, version))
        info = _found(reply, name, version)
        try:
            content = _mapped(fd, info.size_bytes)
        finally:
            os.close(fd)
        if await _in_thread(digest_of, content) != info.digest:
            raise BlobCorrupt(f"blob {name} version {version} does not have its digest {info.digest[:12]}…")
        return info, content

    async def newest(self, name: str) -> BlobInfo | None:
        async with self._turn:
            reply, _ = await self._ask(Get(name, -1))
        return None if isinstance(reply, Absent) else _found(reply, name, -1)

    async def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _ask(self, request: Begin | Finish | Get) -> tuple[Found | Absent | Denied, int]:
        try:
            connection = self._connected()
            connection.sendmsg([_encode(request)])
            await _readable(connection)
            packet, fds, _, _ = socket.recv_fds(connection, MAX_PACKET, 1)
        except OSError as error:
            await self.close()
            raise BlobError(
                f"the node agent's blobs at {self._path} can't be reached: {error.strerror or error}"
            ) from error
        if not packet:
            await self.close()
            raise BlobError(f"the node agent closed the connection at {self._path}")
        return _decode_reply(packet), fds[0] if fds else -1

    def _connected(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(str(self._path))
            connection.setblocking(False)
            self._socket = connection
        return self._socket


def _found(reply: Found | Absent | Denied, name: str, version: int) -> BlobInfo:
    if isinstance(reply, Absent):
        raise BlobMissing(f"blob {name} version {version} was never put, or is freed already")
    if isinstance(reply, Denied):
        raise BlobError(reply.why)
    return reply.info


def _mapped(fd: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")


def _fill(fd: int, parts: Sequence[memoryview | bytes]) -> str:
    """Write `parts` one after another and return the digest of what was written."""
    import hashlib

    digest, offset = hashlib.blake2b(digest_size=32), 0
    for part in parts:
        view = memoryview(part).cast("B")
        digest.update(view)
        for start in range(0, len(view), CHUNK_BYTES):
            offset += os.pwrite(fd, view[start : start + CHUNK_BYTES], offset)
    return digest.hexdigest()


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())


async def _in_thread(fn: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, fn, *args)

"""Blobs of one host: sealed memory files that the node agent owns and every process maps.

Wire: one SOCK_SEQPACKET connection per client, one MessagePack struct per packet, file descriptors beside it (SCM_RIGHTS).
A writer gets an empty memory file, fills it, and names its digest; only then is it sealed and visible. What dies half-way
leaves nothing, because nobody else holds the file.
"""

import array
import asyncio
import fcntl
import hashlib
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.blob_memory import KEPT, check_blob, digest_of, missing
from runtime.blob_wire import (
    MAX_PACKET,
    Absent,
    Begin,
    Denied,
    Finish,
    Found,
    Get,
    decode_reply,
    decode_request,
    encode,
)
from runtime.blobs import BlobCorrupt, BlobError, BlobInfo

MAX_BLOB_BYTES = 1 << 40
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
CHUNK_BYTES = 8 << 20
"""Written per system call."""


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
        self._path.unlink(missing_ok=True)  # left by an agent that was killed
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
            reply, fd = self._answer(decode_request(packet), self._clients[client])
            fds = [] if fd < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            client.sendmsg([encode(reply)], fds)
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
        writer.begun, writer.fd = request, os.memfd_create("rubato-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
        replaced = versions.get(begun.version)
        if replaced is not None and replaced[0].epoch > begun.epoch:  # a newer writer was faster
            writer.drop()
            return Found(replaced[0])
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


class _File:
    """A descriptor that is closed when nobody uses it: a thread may go on filling it after its caller was cancelled."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class BlobClient:
    """A process's way to the blobs of its host. One request at a time; waiting ones queue in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def put(self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes]) -> BlobInfo:
        check_blob(name, version)
        views = [memoryview(part) for part in parts]
        async with self._turn:
            reply, file = await self._ask(Begin(name, version, epoch, sum(view.nbytes for view in views)))
            if file.fd < 0:  # the same version under a higher epoch stands already
                return _found(reply, name, version)
            digest = await _in_thread(_fill, file, views)
            reply, _ = await self._ask(Finish(digest))
        return _found(reply, name, version)

    async def get(self, name: str, version: int) -> tuple[BlobInfo, memoryview]:
        if version < 0:
            raise missing(name, version)
        async with self._turn:
            reply, file = await self._ask(Get(name, version))
        info = _found(reply, name, version)
        content = _mapped(file.fd, info.size_bytes)
        if await _in_thread(digest_of, content) != info.digest:
            raise BlobCorrupt(f"blob {name} version {version} does not have its digest {info.digest[:12]}…")
        return info, content

    async def newest(self, name: str) -> BlobInfo | None:
        async with self._turn:
            reply, _ = await self._ask(Get(name, -1))
        return None if isinstance(reply, Absent) else _found(reply, name, -1)

    async def close(self) -> None:
        self._hang_up()

    async def _ask(self, request: Begin | Finish | Get) -> tuple[Found | Absent | Denied, _File]:
        answered = False
        try:
            connection = self._connected()
            connection.sendmsg([encode(request)])
            await _readable(connection)
            packet, fds, _, _ = socket.recv_fds(connection, MAX_PACKET, 1)
            if not packet:
                raise ConnectionResetError("it closed the connection")
            answered = True
        except OSError as error:
            raise BlobError(
                f"the node agent's blobs at {self._path} can't be reached: {error.strerror or error}"
            ) from error
        finally:
            if not answered:  # cancelled, too: the reply must not be taken for that of the next request
                self._hang_up()
        return decode_reply(packet), _File(fds[0] if fds else -1)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(str(self._path))
            self._socket.setblocking(False)
        return self._socket


def _found(reply: Found | Absent | Denied, name: str, version: int) -> BlobInfo:
    if isinstance(reply, Absent):
        raise missing(name, version)
    if isinstance(reply, Denied):
        raise BlobError(reply.why)
    return reply.info


def _mapped(fd: int, size: int) -> memoryview:
    # Private, because Linux before 6.7 maps no write-sealed file as shared, not even read-only.
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)) if size else memoryview(b"")


def _fill(file: _File, parts: Sequence[memoryview]) -> str:
    """Write `parts` one after another and return the digest of what was written."""
    digest, offset = hashlib.blake2b(digest_size=32), 0
    for part in parts:
        view = part.cast("B") if part.nbytes else memoryview(b"")
        digest.update(view)
        start = 0
        while start < len(view):
            start += os.pwrite(file.fd, view[start : start + CHUNK_BYTES], offset + start)
        offset += len(view)
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

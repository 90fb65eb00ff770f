"""Blobs across processes: a writer that dies leaves nothing half-done, and what it finished outlives it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from hashlib import blake2b
from pathlib import Path

import pytest

from runtime.blob_agent import BlobClient, BlobServer
from runtime.blob_wire import MAX_PACKET, Absent, Begin, Denied, Finish, Found, Get, decode_reply, encode
from runtime.blobs import BlobCorrupt, BlobError

WRITER = """
import asyncio, os, socket, sys
from pathlib import Path
from runtime.blob_agent import BlobClient
from runtime.blob_wire import MAX_PACKET, Begin, encode

async def main():
    await BlobClient(Path(sys.argv[1])).put("whole", 1, 0, [b"x" * 5_000_000])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    connection.send(encode(Begin("half", 1, 0, 1000)))
    _, fds, _, _ = socket.recv_fds(connection, MAX_PACKET, 1)
    os.write(fds[0], b"y" * 500)
    print("half-way", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.fixture
async def path(tmp_path: Path) -> AsyncGenerator[Path]:
    """The socket of a server."""
    path = tmp_path / "blobs.sock"
    server = BlobServer(path)
    await server.start()
    yield path
    await server.close()


@pytest.fixture
async def client(path: Path) -> AsyncGenerator[BlobClient]:
    client = BlobClient(path)
    yield client
    await client.close()


class RawClient:
    """Speaks the wire by hand, so that it can lie and stop half-way."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(str(path))

    async def ask(self, packet: Begin | Finish | Get | bytes) -> tuple[Found | Absent | Denied | None, int]:
        """The reply and its descriptor (-1: none); None when the server hung up."""
        self.socket.send(packet if isinstance(packet, bytes) else encode(packet))
        reply, fds, _, _ = await asyncio.to_thread(socket.recv_fds, self.socket, MAX_PACKET, 1)
        return decode_reply(reply) if reply else None, fds[0] if fds else -1


@pytest.fixture
def raw(path: Path):
    raw = RawClient(path)
    yield raw
    raw.socket.close()


async def test_a_writer_that_is_killed_leaves_what_it_finished_and_nothing_half_done(path: Path, client: BlobClient):
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(path), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert writer.stdout is not None
    assert await writer.stdout.readline() == b"half-way\n"

    os.kill(writer.pid, signal.SIGKILL)
    await writer.wait()

    assert await client.newest("half") is None
    _, content = await client.get("whole", 1)
    assert content == b"x" * 5_000_000
    await until(lambda: blob_files() == 2)  # the whole one: the agent's, and the mapping here


async def test_a_cancelled_put_shows_nothing_and_writes_into_nobody_elses_file(client: BlobClient, tmp_path: Path):
    put = asyncio.get_running_loop().create_task(client.put("w", 1, 0, [bytes(64 << 20)]))
    await until(lambda: blob_files() == 2)  # the agent's and the client's: its thread may write now
    put.cancel()
    await asyncio.gather(put, return_exceptions=True)
    marker = tmp_path / "marker"
    others = [marker.open("wb") for _ in range(8)]  # these take the free descriptor numbers

    await client.put("v", 1, 0, [b"next"])

    assert await client.newest("w") is None
    assert (await client.get("v", 1))[1] == b"next"
    await until(lambda: blob_files() == 2)  # the second blob's, as above: the first one's are closed
    assert marker.stat().st_size == 0
    for file in others:
        file.close()


async def test_of_two_writers_of_a_version_the_higher_epoch_stands_whoever_finishes_last(
    path: Path, raw: RawClient, client: BlobClient
):
    _, fd = await raw.ask(Begin("w", 1, 1, 3))
    os.pwrite(fd, b"old", 0)
    os.close(fd)
    await client.put("w", 1, 2, [b"new"])

    reply, _ = await raw.ask(Finish(blake2b(b"old", digest_size=32).hexdigest()))

    assert isinstance(reply, Found)
    assert reply.info.epoch == 2
    assert (await client.get("w", 1))[1] == b"new"


async def test_a_content_that_is_not_what_its_writer_said_is_refused(raw: RawClient, client: BlobClient):
    _, fd = await raw.ask(Begin("w", 1, 0, 3))
    os.pwrite(fd, b"abc", 0)
    os.close(fd)
    await raw.ask(Finish("00" * 32))

    with pytest.raises(BlobCorrupt, match="blob w version 1 does not have its digest 000000000000"):
        await client.get("w", 1)


async def test_a_writer_can_not_change_what_it_finished(raw: RawClient):
    _, fd = await raw.ask(Begin("w", 1, 0, 3))
    os.pwrite(fd, b"abc", 0)

    await raw.ask(Finish(blake2b(b"abc", digest_size=32).hexdigest()))

    with pytest.raises(PermissionError):
        os.pwrite(fd, b"xyz", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


async def test_requests_that_make_no_sense_are_denied_and_noise_is_hung_up_on(raw: RawClient, client: BlobClient):
    before, _ = await raw.ask(Finish("00"))
    nameless, _ = await raw.ask(Begin("", 1, 0, 3))
    endless, _ = await raw.ask(Begin("w", 1, 0, 1 << 60))
    noise, _ = await raw.ask(b"\xc1\xc1")

    assert isinstance(before, Denied)
    assert isinstance(nameless, Denied)
    assert isinstance(endless, Denied)
    assert noise is None
    assert (await client.put("w", 1, 0, [b"x"])).size_bytes == 1


async def test_an_agent_that_is_gone_is_named(tmp_path: Path):
    nowhere = BlobClient(tmp_path / "no.sock")

    with pytest.raises(BlobError, match=r"blobs at .*/no\.sock can't be reached: No such file"):
        await nowhere.newest("w")


async def test_a_client_reaches_the_next_agent_at_the_same_place(tmp_path: Path):
    path = tmp_path / "blobs.sock"
    first = BlobServer(path)
    await first.start()
    client = BlobClient(path)
    await client.put("w", 1, 0, [b"x"])
    await first.close()

    with pytest.raises(BlobError):
        await client.newest("w")
    second = BlobServer(path)
    await second.start()

    assert await client.newest("w") is None
    await client.close()
    await second.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - descriptors tell nobody that they are closed
            await asyncio.sleep(0)


def blob_files() -> int:
    """How many descriptors of blobs this process has: the server's, the clients' and the mappings'."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "rubato-blob" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found

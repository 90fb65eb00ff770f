"""Blobs across processes: the dead leave nothing half-done and hold nothing back, and memory that somebody reads is not used again."""

import asyncio
import mmap
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from rubato.runtime.blobs.blob import BlobCorrupt, BlobError, BlobInfo, digest_of
from rubato.runtime.blobs.client import MAX_PACKET, Begin, BlobClient, Denied, Drop, Found, Get, Publish, Room, decode_reply, encode
from rubato.runtime.blobs.server import BlobServer

ROOT = Path(__file__).parents[2]

WRITER = """
import asyncio, sys
from pathlib import Path
from rubato.runtime.blobs.client import BlobClient

async def main():
    client = BlobClient(Path(sys.argv[1]))
    await client.put("whole", 1, 0, [b"x" * 5_000_000])
    half = await client.draft("half", 1, 0, 1000)
    half.memory[:500] = b"y" * 500
    print("half-way", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""

READER = """
import asyncio, sys
from pathlib import Path
from rubato.runtime.blobs.client import BlobClient

async def main():
    _, view = await BlobClient(Path(sys.argv[1])).get("w", 1)
    print(len(view), flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[BlobServer]:
    server = BlobServer(tmp_path / "blobs.sock")
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def client(server: BlobServer, tmp_path: Path) -> AsyncGenerator[BlobClient]:
    client = BlobClient(tmp_path / "blobs.sock")
    yield client
    await client.close()


class RawClient:
    """Speaks the wire by hand, so that it can lie and stop half-way."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(str(path))

    async def ask(self, packet: Begin | Publish | Get | Drop | bytes):
        """The reply and its descriptor (-1: none); None when the server hung up."""
        self.socket.send(packet if isinstance(packet, bytes) else encode(packet))
        reply, fds, _, _ = await asyncio.to_thread(socket.recv_fds, self.socket, MAX_PACKET, 1)
        return decode_reply(reply) if reply else None, fds[0] if fds else -1

    async def write(self, content: bytes) -> int:
        """A segment that holds `content`, not shown yet."""
        room, fd = await self.ask(Begin(len(content)))
        assert isinstance(room, Room)
        os.pwrite(fd, content, 0)
        os.close(fd)
        return room.segment


@pytest.fixture
def raw(server: BlobServer, tmp_path: Path):
    raw = RawClient(tmp_path / "blobs.sock")
    yield raw
    raw.socket.close()


async def test_a_writer_that_is_killed_leaves_what_it_finished_and_nothing_half_done(
    server: BlobServer, client: BlobClient, tmp_path: Path
):
    writer = await started(WRITER, tmp_path)
    assert await writer.stdout.readline() == b"half-way\n"
    assert server.num_segments == 2

    os.kill(writer.pid, signal.SIGKILL)
    await writer.wait()

    await until(lambda: server.num_segments == 1)
    assert await client.newest("half") is None
    _, content = await client.get("whole", 1)
    assert content == b"x" * 5_000_000


async def test_memory_is_used_again_once_its_last_reader_has_let_go_and_not_before(server: BlobServer, client: BlobClient, tmp_path: Path):
    reader = BlobClient(tmp_path / "blobs.sock")
    await client.put("w", 1, 0, [b"1" * 5_000_000])
    _, held = await reader.get("w", 1)
    for version in range(2, 30):
        await client.put("w", version, 0, [b"%d" % (version % 10) * 5_000_000])
    at_most = server.num_segments
    assert held == b"1" * 5_000_000

    del held
    await reader.newest("w")
    for version in range(30, 60):
        await client.put("w", version, 0, [b"0" * 5_000_000])

    assert at_most <= 5  # two versions kept, the one that was read, and what its writer has to spare
    assert server.num_segments <= 4
    await reader.close()


async def test_the_token_of_a_reader_that_is_killed_goes_with_it(server: BlobServer, client: BlobClient, tmp_path: Path):
    await client.put("w", 1, 0, [b"1" * 5_000_000])
    reader = await started(READER, tmp_path)
    assert await reader.stdout.readline() == b"5000000\n"
    for version in (2, 3):
        await client.put("w", version, 0, [b"x" * 5_000_000])
    assert server.num_segments == 3

    os.kill(reader.pid, signal.SIGKILL)
    await reader.wait()
    await client.newest("w")

    await client.put("w", 4, 0, [b"x" * 5_000_000])  # into what the dead reader held
    await client.newest("w")
    assert server.num_segments == 3


async def test_each_process_maps_a_segment_once_and_unmaps_what_is_gone(client: BlobClient, tmp_path: Path):
    reader = BlobClient(tmp_path / "blobs.sock")
    for version in range(20):
        await client.put("w", version, 0, [bytes(3_000_000)])
        await reader.get("w", version)
    assert num_maps() <= 8  # four segments, in the writer and in the reader
    for version in range(20, 23):
        await client.put("w", version, 0, [b"small"])

    await client.put("w", 23, 0, [bytes(9_000_000)])
    await client.put("w", 24, 0, [bytes(9_000_000)])
    await reader.get("w", 24)

    await until(lambda: num_maps() <= 6)
    await reader.close()


async def test_a_cancelled_put_shows_nothing_and_writes_into_nobody_elses_memory(server: BlobServer, client: BlobClient):
    put = asyncio.get_running_loop().create_task(client.put("w", 1, 0, [b"\1" * (64 << 20)]))
    await until(lambda: server.num_segments == 1)
    put.cancel()
    await asyncio.gather(put, return_exceptions=True)

    await client.put("v", 1, 0, [bytes(64 << 20)])

    assert await client.newest("w") is None
    assert (await client.get("v", 1))[1] == bytes(64 << 20)


async def test_the_token_of_a_cancelled_get_is_given_back(server: BlobServer, client: BlobClient):
    await client.put("w", 1, 0, [b"one"])
    for _ in range(20):
        call = asyncio.get_running_loop().create_task(client.get("w", 1))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    for version in (2, 3, 4, 5):
        await client.put("w", version, 0, [b"x"])

    await client.newest("w")

    assert server.num_segments <= 4


async def test_of_two_writers_of_a_version_the_higher_term_stands_whoever_finishes_last(raw: RawClient, client: BlobClient):
    segment = await raw.write(b"old")
    await client.put("w", 1, 2, [b"new"])

    reply, _ = await raw.ask(Publish(segment, BlobInfo("w", 1, 1, digest_of(b"old"), 3)))

    assert isinstance(reply, Found)
    assert reply.info.term == 2
    assert (await client.get("w", 1))[1] == b"new"


async def test_a_content_that_is_not_what_its_writer_said_is_refused(raw: RawClient, client: BlobClient):
    segment = await raw.write(b"abc")
    await raw.ask(Publish(segment, BlobInfo("w", 1, 0, "00" * 32, 3)))

    with pytest.raises(BlobCorrupt, match="blob w version 1 does not have its digest 000000000000"):
        await client.get("w", 1)


async def test_a_reader_can_not_change_what_it_reads(raw: RawClient, client: BlobClient):
    await client.put("w", 1, 0, [b"abc"])
    _, fd = await raw.ask(Get("w", 1))
    _, view = await client.get("w", 1)

    with pytest.raises(PermissionError):
        os.pwrite(fd, b"xyz", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 3)
    with pytest.raises(TypeError):
        view[0] = 0
    os.close(fd)


async def test_requests_that_make_no_sense_are_denied_and_noise_is_hung_up_on(raw: RawClient, client: BlobClient):
    nothing_begun, _ = await raw.ask(Publish(1, BlobInfo("w", 1, 0, "", 3)))
    endless, _ = await raw.ask(Begin(1 << 60))
    segment = await raw.write(b"abc")
    nameless, _ = await raw.ask(Publish(segment, BlobInfo("", 1, 0, "", 3)))
    too_long, _ = await raw.ask(Publish(segment, BlobInfo("w", 1, 0, "", 1 << 30)))
    noise, _ = await raw.ask(b"\xc1\xc1")

    assert [type(r) for r in (nothing_begun, endless, nameless, too_long)] == [Denied] * 4
    assert noise is None
    assert (await client.put("w", 1, 0, [b"x"])).size_bytes == 1


async def test_a_token_can_be_given_back_once_only(raw: RawClient, client: BlobClient):
    await client.put("w", 1, 0, [b"abc"])
    found, fd = await raw.ask(Get("w", 1))
    os.close(fd)
    assert isinstance(found, Found)

    raw.socket.send(encode(Drop(found.segment)))
    hung_up, _ = await raw.ask(Drop(found.segment))

    assert hung_up is None
    assert (await client.get("w", 1))[1] == b"abc"


async def test_an_agent_that_is_gone_is_named(tmp_path: Path):
    nowhere = BlobClient(tmp_path / "no.sock")

    with pytest.raises(BlobError, match=r"blobs at .*/no\.sock can't be reached: No such file"):
        await nowhere.newest("w")


async def test_a_client_reaches_the_next_agent_at_the_same_place_and_keeps_what_it_reads(tmp_path: Path):
    path = tmp_path / "blobs.sock"
    first = BlobServer(path)
    await first.start()
    client = BlobClient(path)
    await client.put("w", 1, 0, [b"x"])
    _, held = await client.get("w", 1)
    await first.close()

    with pytest.raises(BlobError):
        await client.newest("w")
    second = BlobServer(path)
    await second.start()
    await client.put("w", 2, 0, [b"y"])

    assert (await client.newest("w")).version == 2
    assert held == b"x"
    await client.close()
    await second.close()


async def started(code: str, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(folder / "blobs.sock"),
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the agent's books tell nobody that they changed
            await asyncio.sleep(0)


def num_maps() -> int:
    """How many segments of blobs are mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:rubato-blob")

"""The gate carries any byte stream between two hosts, over links with keys, and holds back a side that does not read."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from rubato.bus.codec import Envelope
from rubato.bus.keys import Keys, new_keys
from rubato.runtime.launch import gate as gates
from rubato.runtime.launch.gate import (
    GateClient,
    GateFrame,
    GateServer,
    GateStream,
    StreamBegun,
    StreamData,
    StreamEnded,
    StreamTaken,
    way_through,
    way_to,
)


@pytest.fixture
async def far_end(tmp_path: Path) -> AsyncGenerator[asyncio.Queue]:
    """What stands for Redis: it sends back what it reads, and nothing before it is told to."""
    asked: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        go = asyncio.Event()
        asked.put_nowait(go)
        await go.wait()
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "far")
    yield asked
    server.close()


@asynccontextmanager
async def gate(folder: Path, keys: Keys, *, theirs: Keys | None = None, run: str = "run"):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        connect = way_to(f"unix://{folder / 'far'}?password=p")
        assert connect is not None
        server = GateServer("run", "tcp://127.0.0.1:*", keys, connect, tasks)
        await server.start()
        client = GateClient(run, server.address, theirs or keys, folder / "near", "gate@test")
        await client.start()
        try:
            yield server, client
        finally:
            await client.close()
            await server.close()


async def test_bytes_arrive_whole_and_in_order_in_both_directions(tmp_path, far_end):
    sent = bytes(range(256)) * 20_000
    async with gate(tmp_path, new_keys()):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        writer.write(sent)
        (await far_end.get()).set()
        back = await reader.readexactly(len(sent))
        writer.close()

    assert back == sent


async def test_a_side_that_does_not_read_is_sent_no_more_than_its_window(tmp_path, far_end, monkeypatch):
    posted = 0
    post = GateStream.post

    def counted(self: GateStream, frame: GateFrame) -> None:
        nonlocal posted
        posted += len(frame.data) if isinstance(frame, StreamData) else 0
        post(self, frame)

    monkeypatch.setattr(GateStream, "post", counted)
    async with gate(tmp_path, new_keys()) as (_, client):
        _, writer = await asyncio.open_unix_connection(tmp_path / "near")
        writer.write(bytes(8 * gates.WINDOW_BYTES))
        go = await far_end.get()
        [stream] = client._streams.values()
        while stream._window >= gates.PIECE_BYTES:  # noqa: ASYNC110 - until its window is used up
            await asyncio.sleep(0.01)
        in_flight = posted
        go.set()
        writer.transport.abort()

    # The far socket's own buffer took some before its owner stopped reading.
    assert in_flight <= 2 * gates.WINDOW_BYTES


async def test_the_end_of_either_side_is_the_end_of_the_other(tmp_path, far_end):
    async with gate(tmp_path, new_keys()) as (server, client):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        writer.write(b"x")
        (await far_end.get()).set()
        assert await reader.readexactly(1) == b"x"
        writer.write_eof()
        rest = await reader.read()
        writer.close()
        await writer.wait_closed()
        while server._streams or client._streams:  # noqa: ASYNC110 - their sockets close a tick or two later
            await asyncio.sleep(0.01)

    assert rest == b""


async def test_where_nobody_listens_behind_the_gate_a_connection_ends_at_once(tmp_path):
    async with gate(tmp_path, new_keys()):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(("reason", "run"), [("key", "run"), ("run", "another run")])
async def test_a_host_with_other_keys_or_of_another_run_gets_nowhere_and_is_counted(tmp_path, reason, run, far_end):
    keys = new_keys()
    theirs = keys._replace(client=new_keys().client) if reason == "key" else keys
    async with gate(tmp_path, keys, theirs=theirs, run=run) as (server, _):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        assert await reader.read() == b""
        writer.close()

        assert server._transport.refusals.counts.get(reason)
        assert far_end.empty()


@pytest.mark.parametrize(
    "said",
    [
        *([StreamData(n, b""), StreamTaken(n, -5), StreamEnded(n)] for n in (1, 7)),
        ["nonsense", ("StreamData", 1, 5), ("StreamData", "1", b"")],
    ],
    ids=["its own", "none", "malformed"],
)
async def test_a_peer_that_talks_nonsense_may_begin_anew(tmp_path, said, far_end):
    async with gate(tmp_path, new_keys()) as (server, client):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        writer.write(b"good")
        (await far_end.get()).set()
        assert await reader.readexactly(4) == b"good"
        for frame in said:
            body = msgspec.Raw(msgspec.msgpack.encode(frame))
            client._transport.post(server.address, Envelope.tell("gate", 0, "GateFrame", b"", body, ""))
        other_reader, other = await asyncio.open_unix_connection(tmp_path / "near")
        other.write(b"still")
        (await far_end.get()).set()
        assert await other_reader.readexactly(5) == b"still"
        writer.close()
        other.close()


class Far:
    """What stands for Redis and counts its connections; it says `says` and hangs up, or waits where that is empty."""

    def __init__(self, says: bytes = b"") -> None:
        self.live = 0
        self._says = says

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.live += 1
        writer.write(self._says)
        if not self._says:
            with suppress(ConnectionError):
                await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.live -= 1


@asynccontextmanager
async def far(folder: Path, says: bytes = b""):
    end = Far(says)
    server = await asyncio.start_unix_server(end.serve, folder / "far")
    try:
        yield end
    finally:
        server.close()


def say(client: GateClient, server: GateServer, frame: GateFrame) -> None:
    body = msgspec.Raw(msgspec.msgpack.encode(frame))
    client._transport.post(server.address, Envelope.tell("gate", 0, "GateFrame", b"", body, ""))


async def test_what_a_side_said_before_it_hung_up_arrives_whole_at_one_that_reads_slowly(tmp_path):
    said = bytes(range(256)) * 20_000
    async with far(tmp_path, said), gate(tmp_path, new_keys()):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near", limit=1 << 16)
        found = bytearray()
        while data := await reader.read(1 << 17):
            found += data
            await asyncio.sleep(0.002)
        writer.close()

    assert found == said


async def test_a_number_that_is_given_twice_leaves_no_connection_behind(tmp_path):
    async with far(tmp_path) as end:
        async with gate(tmp_path, new_keys()) as (server, client):
            for _ in range(20):
                for frame in (StreamBegun(7), StreamEnded(7), StreamBegun(7), StreamData(7, b"x"), StreamBegun(7)):
                    say(client, server, frame)
                await asyncio.sleep(0.005)
            say(client, server, StreamEnded(7))
            while server._streams:  # noqa: ASYNC110 - its sockets close a tick or two later
                await asyncio.sleep(0.01)
        while end.live:  # noqa: ASYNC110 - their other ends see it
            await asyncio.sleep(0.01)


async def test_what_begins_while_a_gate_closes_does_not_keep_it(tmp_path):
    async with far(tmp_path), gate(tmp_path, new_keys()) as (server, client):
        _, writer = await asyncio.open_unix_connection(tmp_path / "near")
        while not server._streams:  # noqa: ASYNC110 - until the other side has heard of it
            await asyncio.sleep(0.01)
        for end, begin in ((server, lambda: server.asked((b"another", 1))), (client, client._accepted)):
            async with asyncio.TaskGroup() as tasks:
                closing = tasks.create_task(end.close())
                await asyncio.sleep(0)
                begin()
                await closing

            assert not end._streams
        writer.close()


async def test_a_gate_whose_tasks_are_ending_begins_nothing_and_closes(tmp_path):
    async with far(tmp_path), asyncio.timeout(30):
        with pytest.raises(ExceptionGroup):
            await in_a_group_that_fails(tmp_path)


async def in_a_group_that_fails(folder: Path) -> None:
    keys, connect = new_keys(), way_to(f"unix://{folder / 'far'}")
    assert connect is not None
    async with asyncio.TaskGroup() as tasks:
        server = GateServer("run", "tcp://127.0.0.1:*", keys, connect, tasks)
        await server.start()
        client = GateClient("run", server.address, keys, folder / "near", "gate@test")
        await client.start()
        tasks.create_task(failing())
        try:
            await asyncio.Event().wait()
        finally:
            reader, writer = await asyncio.open_unix_connection(folder / "near")
            assert await reader.read() == b""
            writer.close()
            await client.close()
            await server.close()
            assert not server._streams


async def failing() -> None:
    raise RuntimeError("something of the launcher's")


async def test_a_side_that_only_listens_any_more_is_at_its_end(tmp_path):
    async with far(tmp_path) as end, gate(tmp_path, new_keys()) as (server, client):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        writer.write(b"x")
        writer.write_eof()
        assert await reader.read() == b""
        while server._streams or client._streams or end.live:  # noqa: ASYNC110 - their sockets close a tick or two later
            await asyncio.sleep(0.01)
        writer.close()


def test_only_a_server_that_its_host_alone_reaches_needs_the_gate():
    assert way_to("unix:///tmp/redis.sock?password=p") is not None
    assert way_to("redis://:p@127.0.0.1:6379/0") is not None
    assert way_to("redis://:p@10.0.0.5:6379") is None
    assert way_to("rediss://u:p@state.cluster:6379") is None


@pytest.mark.parametrize("url", ["unix:///r.sock?username=u&password=p%2Fq", "redis://u:p%2Fq@127.0.0.1:6379"])
def test_user_and_password_go_along(url):
    assert way_through(url, Path("/s")) == "unix:///s?username=u&password=p%2Fq"

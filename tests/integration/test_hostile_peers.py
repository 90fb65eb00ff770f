"""Peers that misbehave on a real socket: each is turned away and counted, memory stays bounded, and the others are served."""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
import zmq

import rubato.bus.link
from rubato.bus.codec import MAX_FRAME_BYTES, Envelope, EnvelopeKind
from rubato.bus.keys import new_keys
from rubato.bus.link import PROTOCOL, Greeting, Identity, Peer
from rubato.bus.transport import Delivery
from rubato.bus.zmq import ZmqTransport

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


class Engine:
    """An endpoint that answers nobody, and what it was told."""

    def __init__(self, bind: str) -> None:
        self.transport = ZmqTransport(Identity("run", "engine-1", 1, "5c4e"), bind)
        self.arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self.downs: asyncio.Queue[tuple[Peer, str]] = asyncio.Queue()

    async def start(self) -> "Engine":
        await self.transport.start(self.arrived.put_nowait, lambda peer, reason, refusal: self.downs.put_nowait((peer, reason)))
        return self

    async def counted(self, reason: str, times: int = 1) -> None:
        async with asyncio.timeout(10):
            while self.transport.refusals.counts.get(reason, 0) < times:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.01)

    async def serves(self, folder: Path) -> bool:
        """Whether an honest peer that comes now is heard."""
        peer = await Engine(f"ipc://{folder}/peer-{os.urandom(4).hex()}").start()
        peer.transport.post(self.transport.address, envelope(77))
        async with asyncio.timeout(10):
            while (await self.arrived.get()).envelope.id != 77:
                pass
        await peer.transport.close()
        return True


@pytest.fixture
async def engine(tmp_path) -> AsyncGenerator[Engine]:
    engine = await Engine(f"ipc://{tmp_path}/engine").start()
    yield engine
    await engine.transport.close()


def envelope(number: int, body: bytes = b"\xc0") -> Envelope:
    return Envelope(EnvelopeKind.ASK, number, "engine-1", 1, "Echo", 0, b"", msgspec.Raw(body))


def hello(*, run: str = "run", schema: str = "", protocol: int = PROTOCOL) -> bytes:
    greeting = msgspec.msgpack.encode(Greeting(protocol, run, "stranger", 1, schema))
    first = Envelope(EnvelopeKind.HELLO, 0, "", 0, "", 0, b"", msgspec.Raw(greeting))
    return msgspec.msgpack.encode([first])


async def connect(engine: Engine) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has shaken hands in ZMTP and said nothing more."""
    reader, writer = await asyncio.open_unix_connection(engine.transport.address.removeprefix("ipc://"))
    writer.write(GREETING + READY)
    await reader.readexactly(64)
    return reader, writer


@pytest.mark.parametrize(
    ("reason", "greeting"),
    [
        ("run", hello(run="another")),
        ("schema", hello(schema="0000")),
        ("protocol", hello(protocol=99)),
        ("greeting", msgspec.msgpack.encode([envelope(1)])),
        ("frame", b"\x91\x90"),
    ],
)
async def test_a_peer_that_is_not_of_this_job_is_counted_by_reason(engine, reason, greeting, tmp_path):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(engine.transport.address)
        stranger.send(greeting)
        await engine.counted(reason)

        assert engine.transport.refusals.counts == {reason: 1}
        assert await engine.serves(tmp_path)


async def test_a_client_without_a_fingerprint_is_admitted(engine):
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(engine.transport.address)
        client.send(hello())
        client.send(msgspec.msgpack.encode([envelope(5)]))
        async with asyncio.timeout(10):
            assert (await engine.arrived.get()).envelope.id == 5


@pytest.mark.parametrize("announced", [MAX_FRAME_BYTES + 1, 2**40, 2**63 - 1])
async def test_an_oversize_frame_ends_its_connection_before_anything_is_allocated(engine, announced, tmp_path):
    reader, writer = await connect(engine)
    before = resident_bytes()
    writer.write(b"\x02" + announced.to_bytes(8, "big") + bytes(4096))
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()
    await engine.counted("handshake")

    assert await engine.serves(tmp_path)
    assert resident_bytes() - before < MAX_FRAME_BYTES // 4


async def test_a_message_cut_off_between_its_parts_is_never_seen(engine, tmp_path):
    reader, writer = await connect(engine)
    first = hello()
    writer.write(b"\x00" + len(first).to_bytes(1, "big") + first)
    begun = msgspec.msgpack.encode([envelope(1)])
    writer.write(b"\x01" + len(begun).to_bytes(1, "big") + begun)
    await writer.drain()
    async with asyncio.timeout(10):
        await reader.read(100)  # WELCOME: what came before the half message was read
        writer.transport.abort()
        await engine.downs.get()

    assert engine.arrived.empty()
    assert await engine.serves(tmp_path)


async def test_a_flood_of_connections_is_capped_and_those_that_were_there_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(rubato.bus.link, "MAX_CONNECTIONS", 40)
    engine = await Engine("tcp://127.0.0.1:*").start()
    port = int(engine.transport.address.rpartition(":")[2])
    early = await Engine(f"ipc://{tmp_path}/early").start()
    early.transport.post(engine.transport.address, envelope(1))
    async with asyncio.timeout(10):
        await engine.arrived.get()

    flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    await engine.counted("full", 161)
    early.transport.post(engine.transport.address, envelope(2))
    async with asyncio.timeout(10):
        assert (await engine.arrived.get()).envelope.id == 2
    for connection in flood:
        connection.close()
    await engine.counted("handshake", 39)
    assert await engine.serves(tmp_path)
    await early.transport.close()
    await engine.transport.close()


async def test_a_stranger_that_never_finishes_its_handshake_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(rubato.bus.link, "HANDSHAKE_MS", 100)
    engine = await Engine("tcp://127.0.0.1:*").start()
    port = int(engine.transport.address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GREETING[:30])
    async with asyncio.timeout(10):
        await reader.read()
    await engine.counted("handshake")
    writer.close()
    await engine.transport.close()


async def test_a_peer_that_never_reads_is_hung_up_on_and_what_waited_for_it_is_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(rubato.bus.link, "MAX_QUEUED", 50)
    engine = await Engine(f"ipc://{tmp_path}/engine").start()
    _, writer = await connect(engine)
    for frame in (hello(), msgspec.msgpack.encode([envelope(1)])):
        writer.write(b"\x00" + len(frame).to_bytes(1, "big") + frame)
    async with asyncio.timeout(20):
        peer = (await engine.arrived.get()).peer
        before = resident_bytes()
        while engine.downs.empty():
            engine.transport.post(peer, envelope(1, msgspec.msgpack.encode(bytes(100_000))))
            await asyncio.sleep(0)
        assert (await engine.downs.get())[0] == peer
    writer.transport.abort()

    assert engine.transport.refusals.counts["slow"] >= 1
    assert resident_bytes() - before < 100 * 100_000 + 32 * 1024 * 1024
    assert await engine.serves(tmp_path)
    await engine.transport.close()


async def test_with_keys_a_flood_of_strangers_is_refused_each_by_name(tmp_path):
    keys = new_keys()
    engine = Engine("tcp://127.0.0.1:*")
    engine.transport = ZmqTransport(Identity("run", "engine-1", 1), "tcp://127.0.0.1:*", keys=keys)
    await engine.start()
    with zmq.Context() as context:
        strangers = [context.socket(zmq.DEALER) for _ in range(50)]
        for stranger in strangers:
            theirs = new_keys().client
            stranger.linger = 0
            stranger.curve_serverkey = keys.server.public.encode()
            stranger.curve_publickey, stranger.curve_secretkey = theirs.public.encode(), theirs.secret.encode()
            stranger.connect(engine.transport.address)
        await engine.counted("key", 50)
        for stranger in strangers:
            stranger.close()
    await engine.transport.close()

    assert engine.arrived.empty()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

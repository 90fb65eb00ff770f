"""What only real sockets and processes show: sudden death, strangers on the endpoint, descriptors that are used again."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import uvloop
import zmq

from rubato.bus.codec import Envelope, EnvelopeKind
from rubato.bus.errors import BadAddress
from rubato.bus.link import PROTOCOL, Greeting, Identity, Peer
from rubato.bus.transport import Delivery
from rubato.bus.zmq import ZmqTransport

ROOT = Path(__file__).parents[2]

ECHO = """
import asyncio, sys, uvloop
from rubato.bus.codec import EnvelopeKind
from rubato.bus.link import Identity
from rubato.bus.zmq import ZmqTransport

async def main():
    transport = ZmqTransport(Identity("run", "engine-1", 1), sys.argv[1])
    def answer(delivery):
        asked = delivery.envelope
        transport.post(delivery.peer, asked.reply(EnvelopeKind.OK, 1, "Echo", asked.body), delivery.buffers)
    await transport.start(answer, lambda peer, reason, refusal: None)
    print("ready", flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


class Watched:
    """A transport and what it was told."""

    def __init__(self, name: str, bind: str) -> None:
        self.transport = ZmqTransport(Identity("run", name, 1), bind)
        self.arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self.downs: asyncio.Queue[tuple[Peer, str]] = asyncio.Queue()

    async def __aenter__(self) -> "Watched":
        await self.transport.start(self.arrived.put_nowait, lambda peer, reason, refusal: self.downs.put_nowait((peer, reason)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()


def envelope(kind: EnvelopeKind, number: int, body: bytes = b"\xc0") -> Envelope:
    return Envelope(kind, number, "engine-1", 1, "Echo", 0, b"", msgspec.Raw(body))


def hello(run: str = "run") -> bytes:
    greeting = msgspec.msgpack.encode(Greeting(PROTOCOL, run, "stranger", 1))
    return msgspec.msgpack.encode([envelope(EnvelopeKind.HELLO, 0, greeting)])


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """A function that runs a coroutine on the stock loop, and on the one used in production."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


def test_ports_come_from_the_range_and_when_it_is_used_up_a_sentence_says_so(run):
    first = next(port for port in range(31000, 60000, 3) if not any(map(_is_taken, range(port, port + 2))))
    where = f"tcp://127.0.0.1:{first}-{first + 1}"

    async def scenario():
        async with Watched("one", where) as one, Watched("two", where) as two:
            with pytest.raises(BadAddress) as caught:
                await Watched("three", where).__aenter__()
            return one.transport.address, two.transport.address, str(caught.value)

    assert run(scenario()) == (
        f"tcp://127.0.0.1:{first}",
        f"tcp://127.0.0.1:{first + 1}",
        f"{where} cannot be bound: all of its ports are in use; widen the range",
    )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def echo(tmp_path):
    """Another process that answers; its address and the process."""
    address = f"ipc://{tmp_path}/echo"
    process = subprocess.Popen([sys.executable, "-c", ECHO, address], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield address, process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_process_is_reported_within_milliseconds_and_once(run, echo, tmp_path):
    address, process = echo

    async def scenario() -> tuple[float, int]:
        async with asyncio.timeout(20), Watched("proxy-1", f"ipc://{tmp_path}/proxy") as proxy:
            proxy.transport.post(address, envelope(EnvelopeKind.ASK, 1), [bytes(1_000_000)])
            assert len((await proxy.arrived.get()).buffers[0]) == 1_000_000
            loop = asyncio.get_running_loop()
            killed_at = loop.time()
            process.send_signal(signal.SIGKILL)
            peer, reason = await proxy.downs.get()
            took_s = loop.time() - killed_at
            assert (peer, reason) == (address, "the peer closed the connection or died")
            await asyncio.sleep(0.1)
            return took_s, proxy.downs.qsize()

    took_s, more = run(scenario())

    assert took_s < 0.5
    assert more == 0


def test_a_socket_left_behind_by_a_killed_process_can_be_bound_again(run, echo):
    address, process = echo
    process.kill()
    process.wait()

    async def scenario() -> str:
        async with Watched("engine-1", address) as engine:
            return engine.transport.address

    assert run(scenario()) == address


def test_many_asks_with_large_and_small_bodies_are_all_answered_in_order(run, echo, tmp_path):
    address, _ = echo

    async def scenario() -> list[int]:
        async with asyncio.timeout(30), Watched("proxy-1", f"ipc://{tmp_path}/proxy") as proxy:
            for number in range(5000):
                body = msgspec.msgpack.encode(bytes((number * 7919) % 3000))
                proxy.transport.post(address, envelope(EnvelopeKind.ASK, number, body))
                if number % 13 == 0:
                    await asyncio.sleep(0)
            return [(await proxy.arrived.get()).envelope.id for _ in range(5000)]

    assert run(scenario()) == list(range(5000))


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"noise"],
        [b"\x90"],
        [hello("other run")],
        [hello()[:-3]],
        [b"\xdd\xff\xff\xff\xff"],
        [hello(), b"no table"],
        [hello(), b"\x91\xce\xff\xff\xff\xff", b"x"],
        [b"", *[b""] * 5000],
    ],
    ids=["empty", "noise", "no envelopes", "run", "cut off", "huge", "table", "sizes", "many parts"],
)
def test_a_stranger_is_refused_and_the_peers_of_the_run_are_served_meanwhile(run, parts, tmp_path):
    address = f"ipc://{tmp_path}/engine"

    async def scenario() -> bytes:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        async with asyncio.timeout(20), Watched("engine-1", address) as engine:
            stranger.connect(address)
            stranger.send_multipart(parts)
            stranger.send_multipart([b"more"])
            async with Watched("proxy-1", f"ipc://{tmp_path}/proxy") as proxy:
                proxy.transport.post(address, envelope(EnvelopeKind.ASK, 5))
                assert (await engine.arrived.get()).envelope.id == 5
            assert isinstance((await engine.downs.get())[0], bytes)
            await asyncio.sleep(0.05)
            assert (engine.arrived.qsize(), engine.downs.qsize()) == (0, 0)
            answer = stranger.recv(zmq.NOBLOCK)
            with pytest.raises(zmq.Again):
                stranger.recv(zmq.NOBLOCK)
            stranger.close()
        context.term()
        return answer

    answer = run(scenario())

    assert msgspec.msgpack.decode(answer)[0][0] == EnvelopeKind.REFUSED


def test_a_peer_that_turns_to_noise_is_reported_down_once(run, tmp_path):
    address = f"ipc://{tmp_path}/engine"

    async def scenario() -> tuple[str, int]:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        async with asyncio.timeout(20), Watched("engine-1", address) as engine:
            stranger.connect(address)
            stranger.send(hello())
            stranger.send(msgspec.msgpack.encode([envelope(EnvelopeKind.TELL, 1)]))
            delivery = await engine.arrived.get()
            stranger.send(b"noise")
            peer, reason = await engine.downs.get()
            assert peer == delivery.peer
            stranger.send(msgspec.msgpack.encode([envelope(EnvelopeKind.TELL, 2)]))
            stranger.close()
            await asyncio.sleep(0.1)
            assert engine.arrived.empty()
            context.term()
            return reason, engine.downs.qsize()

    reason, more = run(scenario())

    assert "a frame must be an array" in reason
    assert more == 0


def test_every_end_of_a_link_is_heard_although_descriptors_are_used_again(run, tmp_path):
    address = f"ipc://{tmp_path}/engine"

    async def scenario() -> tuple[int, int, set[Peer]]:
        async with asyncio.timeout(20), Watched("engine-1", address) as engine:
            lasting = Watched("proxy-0", f"ipc://{tmp_path}/p0")
            await lasting.__aenter__()
            lasting.transport.post(address, envelope(EnvelopeKind.TELL, 0))
            await engine.arrived.get()
            context = zmq.Context()
            for number in range(200):
                visitor = context.socket(zmq.DEALER)
                visitor.connect(address)
                visitor.send(hello())
                visitor.send(msgspec.msgpack.encode([envelope(EnvelopeKind.TELL, number)]))
                if number % 3 == 0:
                    await asyncio.sleep(0)
                visitor.close(linger=10_000)
            arrived = [await engine.arrived.get() for _ in range(200)]
            downs = [await engine.downs.get() for _ in range(200)]
            lasting.transport.post(address, envelope(EnvelopeKind.TELL, 999))
            assert (await engine.arrived.get()).envelope.id == 999
            await lasting.__aexit__()
            context.term()
            await engine.downs.get()
            return len({d.peer for d in arrived}), len({peer for peer, _ in downs}), set(engine.transport._links)

    visitors, ended, left = run(scenario())

    assert (visitors, ended, left) == (200, 200, set())


def test_fifty_peers_talk_to_one_endpoint(run, tmp_path):
    address = f"ipc://{tmp_path}/engine"

    async def scenario() -> int:
        async with asyncio.timeout(20), Watched("engine-1", address) as engine:
            peers = [Watched(f"env_manager-{n}", f"ipc://{tmp_path}/e{n}") for n in range(50)]
            for peer in peers:
                await peer.__aenter__()
            for number, peer in enumerate(peers):
                for _ in range(4):
                    peer.transport.post(address, envelope(EnvelopeKind.ASK, number))
            for _ in range(200):
                delivery = await engine.arrived.get()
                engine.transport.post(delivery.peer, envelope(EnvelopeKind.OK, delivery.envelope.id))
            for number, peer in enumerate(peers):
                assert [(await peer.arrived.get()).envelope.id for _ in range(4)] == [number] * 4
            for peer in peers:
                await peer.__aexit__()
            return len({(await engine.downs.get())[0] for _ in peers})

    assert run(scenario()) == 50

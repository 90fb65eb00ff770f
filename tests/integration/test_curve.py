"""Keys on tcp: peers with them talk, everybody else is turned away, counted and named, while the others are served."""

import asyncio
import socket

import msgspec
import pytest
import zmq

from rubato.bus.codec import Envelope, EnvelopeKind
from rubato.bus.errors import BadAddress, BadKeys
from rubato.bus.keys import KeyPair, Keys, check_keys, new_keys
from rubato.bus.link import Identity, Peer
from rubato.bus.transport import Delivery
from rubato.bus.zmq import ZmqTransport

LOOPBACK = "tcp://127.0.0.1:*"


class Watched:
    """A transport and what it was told."""

    def __init__(self, name: str, bind: str, keys: Keys | None, public: str = "") -> None:
        self.transport = ZmqTransport(Identity("run", name, 1), bind, public=public, keys=keys)
        self.arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self.downs: asyncio.Queue[tuple[Peer, str]] = asyncio.Queue()

    async def __aenter__(self) -> "Watched":
        await self.transport.start(self.arrived.put_nowait, lambda peer, reason, refusal: self.downs.put_nowait((peer, reason)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()

    async def hears(self, other: "Watched", address: str, number: int) -> bool:
        """Whether what `other` posts to `address` arrives here."""
        other.transport.post(address, envelope(number))
        async with asyncio.timeout(10):
            return (await self.arrived.get()).envelope.id == number

    async def refused(self, reason: str, times: int = 1) -> None:
        """Return once `reason` was counted that often: strangers end on libzmq's thread, and say nothing to us directly."""
        async with asyncio.timeout(10):
            while self.transport.refusals.counts.get(reason, 0) < times:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.01)


def envelope(number: int) -> Envelope:
    return Envelope(EnvelopeKind.TELL, number, "engine-1", 1, "Echo", 0, b"", msgspec.Raw(b"\xc0"))


async def test_peers_with_the_jobs_keys_talk_over_tcp_and_over_ipc_to_one_endpoint(tmp_path):
    keys = new_keys()
    near, far = Watched("near-1", f"ipc://{tmp_path}/near", keys), Watched("far-1", LOOPBACK, keys)
    async with Watched("engine-1", f"ipc://{tmp_path}/engine", keys, public=LOOPBACK) as engine, near, far:
        public = engine.transport.public_address

        assert public.startswith("tcp://127.0.0.1:")
        assert await engine.hears(near, engine.transport.address, 1)
        assert await engine.hears(far, public, 2)
        assert engine.transport.refusals.counts == {}


async def test_a_client_with_an_unknown_key_is_refused_and_named(tmp_path):
    keys = new_keys()
    thief = keys._replace(client=new_keys().client)
    async with Watched("engine-1", LOOPBACK, keys) as engine, Watched("thief-1", f"ipc://{tmp_path}/t", thief) as other:
        other.transport.post(engine.transport.address, envelope(1))
        async with asyncio.timeout(10):
            whom, reason = await other.downs.get()
        await engine.refused("key")

        assert (whom, reason) == (engine.transport.address, "the peer refused our keys")
        [news] = [n for n in engine.transport.refusals.news() if n.reason == "key"]
        assert news.sentence == f"127.0.0.1 presented the unknown key {thief.client.public}"
        assert engine.arrived.empty()
        peer = await _peer(keys, tmp_path)
        assert await engine.hears(peer, engine.transport.address, 7)
        await peer.transport.close()
        assert engine.transport.refusals.counts == {"key": 1}


async def _peer(keys: Keys | None, folder) -> Watched:
    return await Watched("peer-1", f"ipc://{folder}/peer", keys).__aenter__()


@pytest.mark.parametrize("who", ["without keys", "with another job's keys"])
async def test_a_client_that_does_not_know_the_servers_key_is_cut_off_and_counted(who, tmp_path):
    keys = new_keys()
    stranger = None if who == "without keys" else new_keys()
    async with Watched("engine-1", LOOPBACK, keys) as engine:
        other = await _peer(stranger, tmp_path)
        other.transport.post(engine.transport.address, envelope(1))
        async with asyncio.timeout(10):
            peer, _ = await other.downs.get()
        await engine.refused("handshake")
        await other.transport.close()

        assert peer == engine.transport.address
        assert engine.arrived.empty()


async def test_an_endpoint_without_keys_is_not_taken_for_one_of_the_job(tmp_path):
    async with Watched("impostor-1", LOOPBACK, None) as impostor:
        peer = await _peer(new_keys(), tmp_path)
        peer.transport.post(impostor.transport.address, envelope(1))
        async with asyncio.timeout(10):
            assert (await peer.downs.get())[0] == impostor.transport.address
        await peer.transport.close()

        assert impostor.arrived.empty()


async def test_noise_on_the_port_is_counted(tmp_path):
    async with Watched("engine-1", LOOPBACK, new_keys()) as engine:
        port = int(engine.transport.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" * 10)
            await engine.refused("handshake")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "[::]"])
async def test_binding_beyond_this_host_without_keys_is_refused_with_the_command_that_makes_them(host):
    with pytest.raises(BadAddress, match="Make them with: rubato keys new --run RUN"):
        await Watched("engine-1", f"tcp://{host}:*", None).__aenter__()


async def test_with_keys_every_address_of_the_host_may_be_bound(tmp_path):
    keys = new_keys()
    async with Watched("engine-1", "tcp://0.0.0.0:*", keys) as engine:
        port = engine.transport.address.rpartition(":")[2]
        peer = await _peer(keys, tmp_path)
        assert await engine.hears(peer, f"tcp://127.0.0.1:{port}", 3)
        await peer.transport.close()


async def test_what_could_not_be_bound_leaves_no_socket_and_no_handler_behind(tmp_path):
    keys = new_keys()
    taken = zmq.Context()
    holder = taken.socket(zmq.ROUTER)
    port = holder.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(BadAddress, match="cannot be bound"):
        await Watched("engine-1", f"ipc://{tmp_path}/e", keys, public=f"tcp://127.0.0.1:{port}").__aenter__()
    holder.close()
    taken.term()

    assert list(tmp_path.iterdir()) == []


def test_a_damaged_pair_is_named_and_no_secret_is_ever_printed():
    keys = new_keys()
    check_keys(keys)

    with pytest.raises(BadKeys, match="the client pair is damaged"):
        check_keys(keys._replace(client=KeyPair(keys.client.public, keys.server.secret)))
    with pytest.raises(BadKeys, match="the server pair is damaged"):
        check_keys(keys._replace(server=KeyPair("x", "y")))
    assert keys.server.secret not in repr(keys)
    assert keys.client.secret not in f"{keys}"

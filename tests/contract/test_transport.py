"""What every Transport promises; the memory one is allowed in place of the real one because it passes this."""

import asyncio
import itertools
import os
from collections.abc import Sequence

import msgspec
import pytest

from rubato.bus.codec import MAX_FRAME_BYTES, Envelope, EnvelopeKind
from rubato.bus.errors import BadAddress, BadFrame
from rubato.bus.link import PROTOCOL, Greeting, Identity, Peer
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.transport import Delivery, Transport
from rubato.bus.zmq import ZmqTransport

DEADLINE_S = 10


class Endpoint:
    """A transport that keeps what it is told. `answer` posts every ask's buffers back to the link it came by."""

    def __init__(self, transport: Transport, *, answer: bool = False) -> None:
        self.transport = transport
        self.address = ""
        self.arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self.downs: asyncio.Queue[tuple[Peer, str]] = asyncio.Queue()
        self.answer = answer

    async def start(self) -> "Endpoint":
        await self.transport.start(self._deliver, lambda peer, reason, refusal: self.downs.put_nowait((peer, reason)))
        self.address = self.transport.address
        return self

    async def next(self, count: int = 1) -> list[Delivery]:
        async with asyncio.timeout(DEADLINE_S):
            return [await self.arrived.get() for _ in range(count)]

    async def next_down(self) -> tuple[Peer, str]:
        async with asyncio.timeout(DEADLINE_S):
            return await self.downs.get()

    def post(self, peer: Peer, number: int, buffers: Sequence[bytes] = ()) -> None:
        self.transport.post(peer, envelope(EnvelopeKind.TELL, number), buffers)

    def _deliver(self, delivery: Delivery) -> None:
        self.arrived.put_nowait(delivery)
        if self.answer:
            self.transport.post(delivery.peer, envelope(EnvelopeKind.OK, delivery.envelope.id), delivery.buffers)


def envelope(kind: EnvelopeKind, number: int, body: bytes = b"\xc0") -> Envelope:
    return Envelope(kind, number, "engine-1", 1, "Generate", 0, b"", msgspec.Raw(body))


def ids(deliveries: list[Delivery]) -> list[int]:
    return [delivery.envelope.id for delivery in deliveries]


@pytest.fixture(params=["memory", "zmq-ipc", "zmq-tcp"])
async def endpoints(request, tmp_path):
    """A function that starts endpoints which can reach each other; all are closed at the end."""
    network = MemoryNetwork()
    started: list[Endpoint] = []
    names = itertools.count(1)

    async def start(name: str, *, run: str = "run-a", bind: str = "", answer: bool = False) -> Endpoint:
        identity = Identity(run, name, next(names))
        if request.param == "memory":
            # One network names its endpoints after who they are: "taken" means the same identity again.
            transport: Transport = MemoryTransport(Identity(run, name, 1) if bind else identity, network)
        elif request.param == "zmq-ipc":
            transport = ZmqTransport(identity, bind or f"ipc://{tmp_path}/{name}.{identity.incarnation}")
        else:
            transport = ZmqTransport(identity, bind or "tcp://127.0.0.1:*")
        endpoint = Endpoint(transport, answer=answer)
        await endpoint.start()
        started.append(endpoint)
        return endpoint

    yield start
    for endpoint in started:
        await endpoint.transport.close()


async def test_envelopes_arrive_in_order_over_many_ticks_and_frames(endpoints):
    sender, receiver = await endpoints("proxy-1"), await endpoints("engine-1")

    for number in range(3000):
        sender.post(receiver.address, number)
        if number % 700 == 0:
            await asyncio.sleep(0)

    assert ids(await receiver.next(3000)) == list(range(3000))


async def test_an_envelope_arrives_as_it_was_posted(endpoints):
    sender, receiver = await endpoints("proxy-1"), await endpoints("engine-1")
    body = msgspec.Raw(msgspec.msgpack.encode(["hi", b"x" * 1000]))
    posted = Envelope(EnvelopeKind.ASK, 2**40, "engine-1", 7, "Generate", 5_000_000, b"trace", body, "proxy-1")

    sender.transport.post(receiver.address, posted)

    (delivery,) = await receiver.next()
    assert msgspec.structs.astuple(delivery.envelope)[:7] == msgspec.structs.astuple(posted)[:7]
    assert bytes(delivery.envelope.body) == bytes(body)
    assert delivery.envelope.sender == "proxy-1"
    assert list(delivery.buffers) == []


async def test_all_envelopes_of_one_tick_are_delivered_without_the_loop_running_between(endpoints):
    sender, receiver = await endpoints("proxy-1"), await endpoints("engine-1")
    sender.post(receiver.address, 0)
    await receiver.next()

    for number in range(1, 101):
        sender.post(receiver.address, number)
    await receiver.next()

    assert receiver.arrived.qsize() == 99


async def test_a_reply_goes_back_over_the_link_that_the_ask_came_by(endpoints):
    asker, engine = await endpoints("proxy-1"), await endpoints("engine-1", answer=True)

    for number in range(200):
        asker.transport.post(engine.address, envelope(EnvelopeKind.ASK, number))

    replies = await asker.next(200)
    assert ids(replies) == list(range(200))
    assert {reply.peer for reply in replies} == {engine.address}
    assert all(isinstance(ask.peer, bytes) for ask in await engine.next(200))


async def test_two_peers_are_told_apart_and_each_gets_its_own_replies(endpoints):
    engine = await endpoints("engine-1", answer=True)
    askers = [await endpoints(f"env_manager-{i}") for i in range(3)]

    for number, asker in enumerate(askers):
        asker.transport.post(engine.address, envelope(EnvelopeKind.ASK, number))

    for number, asker in enumerate(askers):
        assert ids(await asker.next()) == [number]
    assert len({delivery.peer for delivery in await engine.next(3)}) == 3


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 70_000, 16 * 1024 * 1024, 17 * 1024 * 1024])
async def test_a_buffer_of_any_size_arrives_whole_beside_its_envelope(endpoints, size):
    sender, receiver = await endpoints("trainer-1"), await endpoints("engine-1")
    data = os.urandom(min(size, 70_000)) * (size // min(size, 70_000) + 1 if size else 1)
    buffers = [data[:size], b"small", data[: size // 2]]

    sender.post(receiver.address, 1)
    sender.post(receiver.address, 2, buffers)
    sender.post(receiver.address, 3)

    before, with_buffers, after = await receiver.next(3)
    assert [bytes(buffer) for buffer in with_buffers.buffers] == buffers
    assert all(buffer.readonly for buffer in with_buffers.buffers)
    assert (list(before.buffers), list(after.buffers)) == ([], [])


async def test_large_buffers_go_and_come_back_in_order(endpoints):
    asker, engine = await endpoints("trainer-1"), await endpoints("engine-1", answer=True)

    for number in range(5):
        asker.transport.post(engine.address, envelope(EnvelopeKind.ASK, number), [bytes([number]) * (1024 * 1024)])

    replies = await asker.next(5)
    assert ids(replies) == list(range(5))
    assert [reply.buffers[0][:1].tobytes() for reply in replies] == [bytes([number]) for number in range(5)]


async def test_many_buffers_travel_with_one_envelope(endpoints):
    sender, receiver = await endpoints("trainer-1"), await endpoints("engine-1")
    buffers = [bytes([number]) * (number * 1000) for number in range(100)]

    sender.post(receiver.address, 1, buffers)

    (delivery,) = await receiver.next()
    assert [bytes(buffer) for buffer in delivery.buffers] == buffers


async def test_when_the_peer_ends_its_last_words_arrive_and_down_is_called_once(endpoints):
    asker, engine = await endpoints("proxy-1"), await endpoints("engine-1", answer=True)
    for number in range(50):
        asker.transport.post(engine.address, envelope(EnvelopeKind.ASK, number))
    await engine.next(50)

    await engine.transport.close()

    peer, reason = await asker.next_down()
    assert peer == engine.address
    assert "closed" in reason
    assert ids(await asker.next(50)) == list(range(50))
    await asyncio.sleep(0.05)
    assert asker.downs.empty()


async def test_the_bound_side_hears_when_a_peer_that_came_to_it_ends(endpoints):
    asker, engine = await endpoints("proxy-1"), await endpoints("engine-1")
    asker.post(engine.address, 1)
    (delivery,) = await engine.next()

    await asker.transport.close()

    peer, _ = await engine.next_down()
    assert peer == delivery.peer
    engine.post(peer, 2)
    await asyncio.sleep(0.05)
    assert engine.downs.empty()


async def test_what_is_posted_just_before_close_arrives_before_down(endpoints):
    guest, node = await endpoints("guest-1"), await endpoints("node")

    for number in range(20):
        guest.post(node.address, number)
    await guest.transport.close()

    assert ids(await node.next(20)) == list(range(20))
    peer, _ = await node.next_down()
    assert isinstance(peer, bytes)


async def test_an_address_where_nobody_listens_is_reported_down_once_per_link(endpoints):
    sender, gone = await endpoints("proxy-1"), await endpoints("engine-1")
    address = gone.address
    await gone.transport.close()

    for number in range(10):
        sender.post(address, number)

    assert (await sender.next_down())[0] == address
    await asyncio.sleep(0.05)
    assert sender.downs.empty()
    sender.post(address, 11)
    assert (await sender.next_down())[0] == address


async def test_a_peer_of_another_run_is_refused_and_nothing_it_posts_is_delivered(endpoints):
    stranger, engine = await endpoints("proxy-1", run="run-b"), await endpoints("engine-1")

    for number in range(5):
        stranger.post(engine.address, number)

    peer, reason = await stranger.next_down()
    assert peer == engine.address
    assert reason == "refused: proxy-1 belongs to run 'run-b', engine-1 belongs to run 'run-a'"
    await asyncio.sleep(0.05)
    assert (engine.arrived.qsize(), engine.downs.qsize(), stranger.downs.qsize()) == (0, 0, 0)


async def test_a_peer_of_another_protocol_version_is_refused(endpoints, monkeypatch):
    old, engine = await endpoints("proxy-1"), await endpoints("engine-1")
    monkeypatch.setattr("rubato.bus.link.PROTOCOL", PROTOCOL + 1)
    old.post(engine.address, 1)
    monkeypatch.undo()

    _, reason = await old.next_down()

    assert f"proxy-1 speaks protocol {PROTOCOL + 1}, engine-1 speaks {PROTOCOL}" in reason
    assert engine.arrived.empty()


async def test_a_link_that_does_not_begin_with_hello_is_refused(endpoints, monkeypatch):
    rude, engine = await endpoints("proxy-1"), await endpoints("engine-1")
    monkeypatch.setattr("rubato.bus.link._greeting", lambda kind, identity: envelope(EnvelopeKind.TELL, 0))
    rude.post(engine.address, 1)
    monkeypatch.undo()

    _, reason = await rude.next_down()

    assert "a link begins with one HELLO, got an envelope of kind 2" in reason
    assert engine.arrived.empty()


async def test_a_second_hello_ends_the_link_on_both_sides(endpoints):
    rude, engine = await endpoints("proxy-1"), await endpoints("engine-1")
    rude.post(engine.address, 1)
    (delivery,) = await engine.next()

    greeting = msgspec.msgpack.encode(Greeting(PROTOCOL, "run-a", "proxy-1", 1))
    rude.transport.post(engine.address, envelope(EnvelopeKind.HELLO, 0, greeting))

    assert (await engine.next_down())[0] == delivery.peer
    assert (await rude.next_down())[0] == engine.address
    rude.post(engine.address, 2)
    assert ids(await engine.next()) == [2]


async def test_a_refused_peer_may_come_back_with_a_new_link(endpoints, monkeypatch):
    peer, engine = await endpoints("proxy-1"), await endpoints("engine-1")
    monkeypatch.setattr("rubato.bus.link.PROTOCOL", PROTOCOL + 1)
    peer.post(engine.address, 1)
    monkeypatch.undo()
    await peer.next_down()

    peer.post(engine.address, 2)

    assert ids(await engine.next()) == [2]


async def test_after_close_nothing_is_delivered_and_posting_is_harmless(endpoints):
    sender, receiver = await endpoints("proxy-1"), await endpoints("engine-1")
    sender.post(receiver.address, 1)
    (delivery,) = await receiver.next()

    await receiver.transport.close()
    await receiver.transport.close()
    receiver.post(delivery.peer, 2)
    receiver.post(sender.address, 3)

    await sender.next_down()
    assert (receiver.arrived.qsize(), sender.arrived.qsize(), receiver.downs.qsize()) == (0, 0, 0)


async def test_posting_to_a_link_that_is_gone_is_harmless(endpoints):
    receiver = await endpoints("engine-1")

    receiver.post(b"\0gone", 1)

    await asyncio.sleep(0.02)
    assert receiver.downs.empty()


async def test_an_address_that_is_taken_is_refused_and_its_owner_goes_on(endpoints):
    owner = await endpoints("engine-1", bind="")
    sender = await endpoints("proxy-1")
    if isinstance(owner.transport, MemoryTransport):
        owner = await endpoints("engine-2", bind="same")

    with pytest.raises(BadAddress, match=r"taken|in use"):
        await endpoints("engine-2", bind=owner.address)

    sender.post(owner.address, 1)
    assert ids(await owner.next()) == [1]


async def test_an_address_may_be_bound_again_after_close(endpoints):
    first, sender = await endpoints("engine-1"), await endpoints("proxy-1")
    sender.post(first.address, 1)
    await first.next()
    await first.transport.close()
    await sender.next_down()

    second = await endpoints("engine-1", bind=first.address)
    sender.post(second.address, 2)

    assert ids(await second.next()) == [2]


async def test_an_envelope_beyond_the_limit_of_a_frame_is_refused_at_post_and_the_link_goes_on(endpoints):
    sender, receiver = await endpoints("proxy-1"), await endpoints("engine-1")
    sender.post(receiver.address, 1)

    with pytest.raises(BadFrame, match="takes"):
        sender.transport.post(receiver.address, envelope(EnvelopeKind.TELL, 2, b"\xc6" + b"\0" * MAX_FRAME_BYTES))
    sender.post(receiver.address, 3)

    assert ids(await receiver.next(2)) == [1, 3]


async def test_an_endpoint_can_reach_itself(endpoints):
    endpoint = await endpoints("node", answer=True)

    endpoint.transport.post(endpoint.address, envelope(EnvelopeKind.TELL, 1))

    there, back = await endpoint.next(2)
    assert isinstance(there.peer, bytes)
    assert back.peer == endpoint.address
    endpoint.answer = False


async def test_two_endpoints_that_open_links_to_each_other_at_once_keep_both(endpoints):
    one, other = await endpoints("proxy-1"), await endpoints("engine-1")

    one.post(other.address, 1)
    other.post(one.address, 2)

    assert ids(await other.next()) == [1]
    assert ids(await one.next()) == [2]

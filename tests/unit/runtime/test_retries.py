"""A request that is sent again under its key is executed once, as long as the actor that executed it lives."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from bus.codec import decode_body, encode_body
from bus.credit import WINDOW_MESSAGES
from bus.envelope import Envelope, EnvelopeKind
from bus.errors import NotSent, Unknown
from bus.message import Message, Request
from bus.transport import Delivery, Peer
from runtime.actor import Actor, handler
from runtime.beside import NOBODY
from runtime.config import ActorConfig
from runtime.courier import Courier
from runtime.dispatch import Dispatcher
from runtime.observe.log import logger
from runtime.observe.waits import Waits
from runtime.ref import Ref
from runtime.registry import ActorRecord
from runtime.replies import REPLIES_KEPT, REPLY_BYTES, Replies


class Counted(Message, frozen=True):
    num: int


class Count(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True


class CountSlowly(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True


class CountToTheEnd(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True


class Once(Request[Counted], frozen=True):
    """Not idempotent."""


class Counter(Actor):
    role = "counter"

    def __init__(self) -> None:
        super().__init__(ActorConfig(), SimpleNamespace(**dict.fromkeys(CONTEXT)))  # type: ignore[arg-type]
        self.num = 0
        self.began, self.go = asyncio.Event(), asyncio.Event()

    @handler
    async def count(self, request: Count) -> Counted:
        self.num += 1
        return Counted(self.num)

    @handler(concurrency=4)
    async def count_slowly(self, request: CountSlowly) -> Counted:
        return await self._slowly()

    @handler(concurrency=1 + 1, outlives_asker=True)
    async def count_to_the_end(self, request: CountToTheEnd) -> Counted:
        return await self._slowly()

    async def _slowly(self) -> Counted:
        self.num += 1
        num = self.num
        self.began.set()
        await self.go.wait()
        return Counted(num)


CONTEXT = ("name", "incarnation", "run", "store", "blobs", "rng", "log", "metrics", "waits", "trace")


class Posted:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[Peer, Envelope]] = []

    def post(self, peer: Peer, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> None:
        self.sent.append((peer, envelope))

    def replies(self) -> list[tuple[Peer, int, int]]:
        """(peer, id, num) of each answer."""
        return [(p, e.id, decode_body(Counted, e.body).num) for p, e in self.sent if e.kind == EnvelopeKind.OK]


@asynccontextmanager
async def dispatching():
    posted, actor = Posted(), Counter()
    async with asyncio.TaskGroup() as tasks:
        dispatcher = Dispatcher(posted, "counter-1", logger("test"), tasks.create_task, {}, lambda _: None)  # type: ignore[arg-type]
        consumer = tasks.create_task(dispatcher.consume(actor))
        yield dispatcher, posted, actor
        consumer.cancel()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def asked(request: Request[Counted], peer: bytes, number: int, key: str = "client-1/1/1") -> Delivery:
    tag, body, _ = encode_body(request)
    return Delivery(peer, Envelope(EnvelopeKind.ASK, number, "counter-1", 0, tag, 0, b"", key, 0, body), ())


async def test_a_request_that_comes_again_is_answered_again_and_not_run_again():
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(Count(), b"\0one", 1))
        await settle()
        dispatcher.forget(b"\0one")
        dispatcher.arrived(asked(Count(), b"\0two", 2))
        dispatcher.arrived(asked(Count(), b"\0two", 3, key="client-1/1/2"))
        await settle()

    assert actor.num == 2
    assert posted.replies() == [(b"\0one", 1, 1), (b"\0two", 2, 1), (b"\0two", 3, 2)]


async def test_a_request_that_comes_again_while_it_runs_is_answered_by_that_run():
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountToTheEnd(), b"\0one", 1))
        await actor.began.wait()
        dispatcher.forget(b"\0one")
        dispatcher.arrived(asked(CountToTheEnd(), b"\0two", 2))
        await settle()
        actor.go.set()
        await settle()

    assert actor.num == 1
    assert posted.replies() == [(b"\0two", 2, 1)]


async def test_a_retry_does_not_join_a_run_that_its_broken_link_has_cancelled():
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountSlowly(), b"\0one", 1))
        await actor.began.wait()
        dispatcher.forget(b"\0one")
        dispatcher.arrived(asked(CountSlowly(), b"\0two", 2))
        await settle()
        actor.go.set()
        await settle()

    assert posted.replies() == [(b"\0two", 2, 2)]


@pytest.mark.parametrize("num_ticks", range(6))
async def test_a_retry_that_comes_as_the_run_ends_is_answered(num_ticks):
    """Whatever tick it falls into: once, one between the reply and the end of its task never was."""
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountSlowly(), b"\0one", 1))
        await actor.began.wait()
        actor.go.set()
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        dispatcher.arrived(asked(CountSlowly(), b"\0two", 2))
        await settle()

    assert posted.replies() == [(b"\0one", 1, 1), (b"\0two", 2, 1)]


@pytest.mark.parametrize("late", [b"\0one", NOBODY])
async def test_an_old_attempt_that_comes_behind_the_new_one_does_not_take_its_reply(late):
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountSlowly(), b"\0two", 2))
        await actor.began.wait()
        dispatcher.arrived(asked(CountSlowly(), late, 1))
        await settle()
        dispatcher.forget(late)
        actor.go.set()
        await settle()

    assert (b"\0two", 2, 1) in posted.replies()


@pytest.mark.parametrize("leave", ["forget", "cancel"])
async def test_a_run_goes_on_for_whoever_is_left_and_ends_with_the_last(leave):
    def leaves(dispatcher: Dispatcher, peer: bytes, number: int) -> None:
        cancel = asked(CountSlowly(), peer, number)
        cancel.envelope.kind = EnvelopeKind.CANCEL
        dispatcher.forget(peer) if leave == "forget" else dispatcher.arrived(cancel)

    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountSlowly(), b"\0one", 1))
        await actor.began.wait()
        dispatcher.arrived(asked(CountSlowly(), b"\0two", 2))
        await settle()
        leaves(dispatcher, b"\0one", 1)
        dispatcher.arrived(asked(CountSlowly(), b"\0three", 3))
        await settle()
        assert actor.num == 1
        leaves(dispatcher, b"\0two", 2)
        leaves(dispatcher, b"\0three", 3)
        dispatcher.arrived(asked(CountSlowly(), b"\0four", 4))
        await settle()
        actor.go.set()
        await settle()

    assert posted.replies() == [(b"\0four", 4, 2)]


async def test_parked_requests_keep_their_credit_and_run_in_turn():
    async with dispatching() as (dispatcher, posted, actor):
        for number in range(1, 7):
            dispatcher.arrived(asked(CountSlowly(), b"\0one", number, key=""))
        await settle()
        assert (actor.num, dispatcher.depth, dispatcher._grants[b"\0one"].messages) == (4, 2, 4)
        actor.go.set()
        await settle()

        assert (dispatcher.depth, dispatcher._grants[b"\0one"].messages) == (0, 6)
    assert [number for _, number, _ in posted.replies()] == [1, 2, 3, 4, 5, 6]


RECORD = ActorRecord("counter-1", "counter", "mem://counter-1", 1, 1, "host", "ready")


class Found:
    """A resolver that always finds the actor, and sees a change at once."""

    waits = Waits()

    def resolve(self, target: str) -> ActorRecord:
        return RECORD

    async def change(self) -> None:
        return


async def test_all_attempts_at_an_idempotent_ask_carry_one_key_and_only_the_one_asked_may_answer():
    posted = Posted()
    courier = Courier(posted, "client-1", 7, Waits())  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(Ref("counter-1", courier, Found()).ask(Count(), timeout=60))
        for _ in range(2):
            await settle()
            courier.lost(RECORD.address, "it died")
        await settle()
        tag, body, _ = encode_body(Counted(5))
        reply = Envelope(EnvelopeKind.OK, posted.sent[-1][1].id, "counter-1", 1, tag, 0, b"", "", 0, body)

        courier.arrived(Delivery(b"\0stranger", reply, ()))
        courier.arrived(Delivery(RECORD.address, reply, ()))

        assert await asking == Counted(5)
    keys = [envelope.key for _, envelope in posted.sent]
    assert len(keys) == 3
    assert set(keys) == {keys[0]} != {""}
    assert (courier.unknown, courier.late) == (2, 1)


@pytest.mark.parametrize(("question", "retry"), [(Count(), False), (Once(), True)])
async def test_an_ask_that_is_not_retried_carries_no_key(question, retry):
    posted = Posted()
    courier = Courier(posted, "client-1", 7, Waits())  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, courier.lost, RECORD.address, "it died")

    with pytest.raises(Unknown):
        await Ref("counter-1", courier, Found()).ask(question, timeout=60, retry=retry)

    assert [envelope.key for _, envelope in posted.sent] == [""]


async def test_two_asks_never_share_a_key():
    posted = Posted()
    courier = Courier(posted, "client-1", 7, Waits())  # type: ignore[arg-type]

    assert courier.new_key() != courier.new_key()
    assert courier.new_key() != Courier(posted, "client-1", 8, Waits()).new_key()  # type: ignore[arg-type]


async def test_credit_that_was_granted_to_a_cancelled_sender_passes_to_the_next():
    posted = Posted()
    courier = Courier(posted, "client-1", 1, Waits())  # type: ignore[arg-type]
    for _ in range(WINDOW_MESSAGES):
        assert courier.tell(RECORD, Counted(1)) is None
    first, second = courier.tell(RECORD, Counted(2)), courier.tell(RECORD, Counted(3))
    assert first is not None
    assert second is not None
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(first), tasks.create_task(second)]  # type: ignore[arg-type]
        await settle()

        courier.arrived(
            Delivery(
                RECORD.address,
                Envelope(EnvelopeKind.CREDIT, 64, "counter-1", 0, "", 0, b"", "", 1, msgspec.Raw(b"\xc0")),
                (),
            )
        )
        waiting[0].cancel()

        await waiting[1]
    assert decode_body(Counted, posted.sent[-1][1].body) == Counted(3)


async def test_whoever_waits_for_credit_hears_that_the_link_broke():
    courier = Courier(Posted(), "client-1", 1, Waits())  # type: ignore[arg-type]
    while (waits := courier.tell(RECORD, Counted(1))) is None:
        pass
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, courier.lost, RECORD.address, "it died")

    with pytest.raises(NotSent, match="broke before sending"):
        await waits


def test_replies_are_bounded_in_number_and_in_size():
    replies = Replies()
    for number in range(4 * REPLIES_KEPT):
        replies.keep(str(number), "Counted", msgspec.Raw(b"\x01"))
    replies.keep("large", "Counted", msgspec.Raw(bytes(REPLY_BYTES + 1)))

    known = [number for number in range(4 * REPLIES_KEPT) if replies.get(str(number))]

    assert REPLIES_KEPT <= len(known) <= 2 * REPLIES_KEPT
    assert known[-1] == 4 * REPLIES_KEPT - 1
    assert replies.get("large") is None

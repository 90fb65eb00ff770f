"""Asks that come again, whose asker went away, or that wait for credit: an idempotent request may run twice, no reply goes astray."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import pytest

from rubato.bus.codec import Envelope, EnvelopeKind, decode_body, encode_body
from rubato.bus.errors import BadFrame, NotSent, Unknown
from rubato.bus.link import WINDOW_MESSAGES, Peer
from rubato.bus.message import Message, Request
from rubato.bus.transport import Delivery
from rubato.runtime.actor import Actor, handler
from rubato.runtime.courier import Courier, Ref, current_deadline
from rubato.runtime.dispatch import NO_PEER, Dispatcher
from rubato.runtime.observe.figures import Waits
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import ActorRecord


class Counted(Message, frozen=True):
    num: int


class Count(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True


class CountSlowly(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True


class CountToTheEnd(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True


class CountLater(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True
    refused: bool = False


class Once(Request[Counted], frozen=True):
    """Not idempotent."""


class Counter(Actor):
    role = "counter"

    def __init__(self) -> None:
        """Its handlers need nothing of a kernel."""
        self.num = 0
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.later: list[asyncio.Future[Counted]] = []

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

    @handler(concurrency=2)
    def count_later(self, request: CountLater) -> asyncio.Future[Counted]:
        if request.refused:
            raise ValueError("not today")
        self.num += 1
        self.later.append(asyncio.get_running_loop().create_future())
        return self.later[-1]

    async def _slowly(self) -> Counted:
        self.num += 1
        num = self.num
        self.began.set()
        await self.go.wait()
        return Counted(num)


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


def asked(request: Request[Counted], peer: bytes, number: int) -> Delivery:
    tag, body, _ = encode_body(request)
    return Delivery(peer, Envelope.ask(number, "counter-1", 0, tag, 0, b"", body, "client-1"), ())


async def test_an_idempotent_request_that_comes_again_runs_again_and_answers_whoever_asked_last():
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountToTheEnd(), b"\0one", 1))
        await actor.began.wait()
        dispatcher.forget(b"\0one")
        dispatcher.arrived(asked(CountToTheEnd(), b"\0two", 2))
        await settle()
        actor.go.set()
        await settle()

    assert (actor.num, dispatcher.handled) == (2, 2)
    assert posted.replies() == [(NO_PEER, 1, 1), (b"\0two", 2, 2)]


@pytest.mark.parametrize("leave", ["forget", "cancel"])
async def test_a_run_whose_asker_went_away_is_cancelled_and_the_retry_has_its_own(leave):
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountSlowly(), b"\0one", 1))
        await actor.began.wait()
        if leave == "forget":
            dispatcher.forget(b"\0one")
        else:
            dispatcher.arrived(Delivery(b"\0one", Envelope.cancel(1, "counter-1", 0, "client-1"), ()))
        dispatcher.arrived(asked(CountSlowly(), b"\0two", 2))
        await settle()
        actor.go.set()
        await settle()

    assert posted.replies() == [(b"\0two", 2, 2)]


@pytest.mark.parametrize("late", [b"\0one", NO_PEER])
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


async def test_parked_requests_keep_their_credit_and_run_in_turn():
    async with dispatching() as (dispatcher, posted, actor):
        for number in range(1, 7):
            dispatcher.arrived(asked(CountSlowly(), b"\0one", number))
        await settle()
        assert (actor.num, dispatcher.depth, dispatcher._grants[b"\0one"].messages) == (4, 2, 4)
        actor.go.set()
        await settle()

        assert (dispatcher.depth, dispatcher._grants[b"\0one"].messages) == (0, 6)
    assert [number for _, number, _ in posted.replies()] == [1, 2, 3, 4, 5, 6]


async def test_a_handler_that_returns_a_future_answers_when_that_is_done_and_has_no_task():
    async with dispatching() as (dispatcher, posted, actor):
        tasks = len(asyncio.all_tasks())
        for number in (1, 2, 3):
            dispatcher.arrived(asked(CountLater(), b"\0one", number))
        await settle()
        assert (len(actor.later), dispatcher.depth, len(asyncio.all_tasks())) == (2, 1, tasks)

        actor.later[1].set_result(Counted(7))
        await settle()
        actor.later[2].set_result(Counted(8))
        await settle()

    assert posted.replies() == [(b"\0one", 2, 7), (b"\0one", 3, 8)]
    assert dispatcher.handled == 2


@pytest.mark.parametrize("leave", ["forget", "cancel"])
async def test_whose_asker_went_away_has_its_future_cancelled(leave):
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountLater(), b"\0one", 1))
        await settle()
        if leave == "forget":
            dispatcher.forget(b"\0one")
        else:
            dispatcher.arrived(Delivery(b"\0one", Envelope.cancel(1, "counter-1", 0, "client-1"), ()))
        await settle()

    assert actor.later[0].cancelled()
    assert posted.sent == []


async def test_what_fails_in_a_future_or_before_there_is_one_fails_the_ask():
    async with dispatching() as (dispatcher, posted, actor):
        dispatcher.arrived(asked(CountLater(refused=True), b"\0one", 1))
        dispatcher.arrived(asked(CountLater(), b"\0one", 2))
        await settle()
        actor.later[0].set_exception(ValueError("not now"))
        await settle()

    found = [(envelope.kind, msgspec.msgpack.decode(envelope.body)) for _, envelope in posted.sent]
    assert found == [(EnvelopeKind.ERROR, "counter-1: ValueError: not today"), (EnvelopeKind.ERROR, "counter-1: ValueError: not now")]


async def test_a_handler_after_one_that_returned_a_future_has_its_own_deadline():
    seen: list[float] = []

    class Timed(Counter):
        @handler
        async def count(self, request: Count) -> Counted:
            seen.append(current_deadline.get())
            return Counted(0)

    posted = Posted()
    async with asyncio.TaskGroup() as tasks:
        dispatcher = Dispatcher(posted, "counter-1", logger("test"), tasks.create_task, {}, lambda _: None)  # type: ignore[arg-type]
        consumer = tasks.create_task(dispatcher.consume(Timed()))
        for number, (request, budget_us) in enumerate([(Count(), 0), (CountLater(), 60_000_000), (Count(), 0)]):
            tag, body, _ = encode_body(request)
            ask = Envelope.ask(number, "counter-1", 0, tag, budget_us, b"", body, "client-1")
            dispatcher.arrived(Delivery(b"\0one", ask, ()))
        await settle()
        consumer.cancel()

    assert seen == [0.0, 0.0]


RECORD = ActorRecord("counter-1", "counter", "mem://counter-1", 1, 1, "host", "ready")


class Found:
    """A directory that always has the actor, and changes at once."""

    def resolve(self, target: str) -> ActorRecord:
        return RECORD

    async def change(self) -> None:
        return


async def test_an_idempotent_ask_is_sent_again_after_each_loss_and_only_the_one_asked_may_answer():
    posted = Posted()
    courier = Courier(posted, "client-1", Waits())  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(Ref("counter-1", courier, Found()).ask(Count(), timeout=60))
        for _ in range(2):
            await settle()
            courier.lost(RECORD.address, "it died")
        await settle()
        tag, body, _ = encode_body(Counted(5))
        reply = posted.sent[-1][1].reply(EnvelopeKind.OK, 1, tag, body)

        courier.arrived(Delivery(b"\0stranger", reply, ()))
        courier.arrived(Delivery(RECORD.address, reply, ()))

        assert await asking == Counted(5)
    assert len({envelope.id for _, envelope in posted.sent}) == 3
    assert (courier.unknown, courier.late) == (2, 1)


@pytest.mark.parametrize(("question", "retry"), [(Count(), False), (Once(), True)])
async def test_an_ask_that_may_not_run_twice_is_sent_once(question, retry):
    posted = Posted()
    courier = Courier(posted, "client-1", Waits())  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, courier.lost, RECORD.address, "it died")

    with pytest.raises(Unknown):
        await Ref("counter-1", courier, Found()).ask(question, timeout=60, retry=retry)

    assert len(posted.sent) == 1


def begun(courier: Courier, request: Request[Counted]) -> "asyncio.Future[Counted] | None":
    return Ref("counter-1", courier, Found()).begin(request, timeout=60, trace=b"trace")


async def test_what_was_begun_without_a_task_ends_like_an_ask():
    posted = Posted()
    courier = Courier(posted, "client-1", Waits())  # type: ignore[arg-type]
    answered, cancelled, lost = (begun(courier, Count()) for _ in range(3))
    asked_of = [envelope for _, envelope in posted.sent]
    assert [envelope.trace for envelope in asked_of] == [b"trace"] * 3
    tag, body, _ = encode_body(Counted(5))
    courier.arrived(Delivery(RECORD.address, asked_of[0].reply(EnvelopeKind.OK, 1, tag, body), ()))
    cancelled.cancel()
    await settle()
    courier.lost(RECORD.address, "it died")

    assert await answered == Counted(5)
    with pytest.raises(Unknown, match="it died"):
        await lost
    assert [(e.kind, e.id) for _, e in posted.sent[3:]] == [(EnvelopeKind.CANCEL, asked_of[1].id)]


async def test_nothing_begins_without_credit_and_what_cannot_be_sent_fails_its_future():
    posted = Posted()
    courier = Courier(posted, "client-1", Waits())  # type: ignore[arg-type]

    def refuse(*_: object) -> None:
        raise BadFrame("too large")

    posted.post = refuse  # type: ignore[method-assign]
    with pytest.raises(BadFrame, match="too large"):
        await begun(courier, Count())
    assert courier.open_asks(1e9) == []
    del posted.post
    while begun(courier, Count()) is not None:
        pass

    assert len(posted.sent) == WINDOW_MESSAGES - 1


async def test_credit_that_was_granted_to_a_cancelled_sender_passes_to_the_next():
    posted = Posted()
    courier = Courier(posted, "client-1", Waits())  # type: ignore[arg-type]
    for _ in range(WINDOW_MESSAGES):
        assert courier.tell(RECORD, Counted(1)) is None
    first, second = courier.tell(RECORD, Counted(2)), courier.tell(RECORD, Counted(3))
    assert first is not None
    assert second is not None
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(first), tasks.create_task(second)]  # type: ignore[arg-type]
        await settle()

        courier.arrived(Delivery(RECORD.address, Envelope.grant("counter-1", 1, 64), ()))
        waiting[0].cancel()

        await waiting[1]
    assert decode_body(Counted, posted.sent[-1][1].body) == Counted(3)


async def test_whoever_waits_for_credit_hears_that_the_link_broke():
    courier = Courier(Posted(), "client-1", Waits())  # type: ignore[arg-type]
    while (waits := courier.tell(RECORD, Counted(1))) is None:
        pass
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, courier.lost, RECORD.address, "it died")

    with pytest.raises(NotSent, match="broke before sending"):
        await waits

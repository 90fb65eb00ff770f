"""The outgoing half of a process: the table of open asks, the credit of each peer, and how a reply finds its asker."""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from bus.codec import decode_body, encode_body
from bus.credit import Account
from bus.envelope import Envelope, Kind
from bus.errors import AskFailed, BadFrame, BusError, Failed, NotSent, Refused, Unknown
from bus.message import Message, Request, reply_types
from bus.transport import Delivery, Transport
from runtime.deadline import current_trace
from runtime.registry import ActorRecord

ReplyT = TypeVar("ReplyT")

SWEEP_S = 0.05
"""Deadlines are checked this often for all open asks at once: a timer per ask would cost more than the ask."""

NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))

REFUSALS = {
    Kind.EXPIRED: "its deadline passed before the handler started",
    Kind.WRONG_INCARNATION: "it was meant for another incarnation",
    Kind.NO_ACTOR: "no such actor lives there",
    Kind.OVERLOADED: "its mailbox is full",
    Kind.DRAINING: "it is draining",
    Kind.BAD_BODY: "it could not decode the message",
}


class Pending(NamedTuple):
    """One open ask."""

    future: "asyncio.Future[Any]"
    deadline: float
    record: ActorRecord
    request: Message


class Courier:
    """Sends for one kernel. Open asks are bounded by the credit that receivers grant."""

    def __init__(self, transport: Transport, sender: str) -> None:
        self._transport = transport
        self._sender = sender
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._accounts: dict[tuple[str, str], Account] = {}
        self._waiting: dict[tuple[str, str], deque[asyncio.Future[None]]] = {}
        self.late = 0
        """Replies that came after their asker had gone: counted, then dropped."""

    async def ask(self, record: ActorRecord, request: Request[ReplyT], deadline: float) -> ReplyT:
        loop = asyncio.get_running_loop()
        tag, body, buffers = encode_body(request)
        await self._take_credit(record, len(body) + sum(map(len, buffers)), deadline)
        ask_id = next(self._ids)
        future: asyncio.Future[ReplyT] = loop.create_future()
        self._pending[ask_id] = Pending(future, deadline, record, request)
        remaining_us = max(1, int((deadline - loop.time()) * 1e6))
        self._post(record, Kind.ASK, ask_id, tag, body, buffers, remaining_us)
        try:
            return await future
        except asyncio.CancelledError:
            if self._pending.pop(ask_id, None) is not None:
                self._post(record, Kind.CANCEL, ask_id, "", NOTHING, (), 0)
            raise

    async def tell(self, record: ActorRecord, message: Message) -> None:
        tag, body, buffers = encode_body(message)
        await self._take_credit(record, len(body) + sum(map(len, buffers)), deadline=None)
        self._post(record, Kind.TELL, 0, tag, body, buffers, 0)

    def arrived(self, delivery: Delivery) -> None:
        """A reply or a grant of credit."""
        envelope = delivery.envelope
        if envelope.kind == Kind.CREDIT:
            self._credit(cast("str", delivery.peer), envelope.target, envelope.credit, envelope.id)
            return
        if envelope.credit:
            self._credit(cast("str", delivery.peer), envelope.target, envelope.credit, envelope.budget_us)
        pending = self._pending.pop(envelope.id, None)
        if pending is None or pending.future.done():
            self.late += 1
            return
        try:
            pending.future.set_result(_reply(pending, envelope, delivery.buffers))
        except BusError as error:
            pending.future.set_exception(error)

    def lost(self, address: str, reason: str) -> None:
        """The link is gone: every ask on it may or may not have run, and its credit starts anew."""
        for key in [k for k in self._accounts if k[0] == address]:
            del self._accounts[key]
            for waiter in self._waiting.pop(key, ()):
                _wake(waiter)
        for ask_id in [i for i, p in self._pending.items() if p.record.address == address]:
            self._fail(ask_id, Unknown, f"the link broke ({reason})")

    async def sweep(self) -> None:
        """End asks whose deadline passed, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = loop.time()
            for ask_id, pending in [(i, p) for i, p in self._pending.items() if p.deadline <= now]:
                self._post(pending.record, Kind.CANCEL, ask_id, "", NOTHING, (), 0)
                self._fail(ask_id, Unknown, "no reply before the deadline")

    @property
    def open_asks(self) -> int:
        return len(self._pending)

    def _fail(self, ask_id: int, kind: type[AskFailed], why: str) -> None:
        pending = self._pending.pop(ask_id)
        if not pending.future.done():
            pending.future.set_exception(kind(f"{type(pending.request).__name__} to {pending.record.name}: {why}"))

    def _post(
        self,
        record: ActorRecord,
        kind: Kind,
        ask_id: int,
        tag: str,
        body: msgspec.Raw,
        buffers: Sequence[memoryview | bytes],
        budget_us: int,
    ) -> None:
        trace = current_trace.get()
        envelope = Envelope(
            kind, ask_id, record.name, record.incarnation, tag, budget_us, trace, "", 0, body, self._sender
        )
        self._transport.post(record.address, envelope, buffers)

    async def _take_credit(self, record: ActorRecord, size: int, deadline: float | None) -> None:
        key = (record.address, record.name)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account()
        queue = self._waiting.get(key)
        while queue or not account.take(size):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue = self._waiting.setdefault(key, deque())
            queue.append(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                raise NotSent(f"{record.name} granted no credit before the deadline") from None
            finally:
                if waiter in queue:
                    queue.remove(waiter)
            if self._accounts.get(key) is not account:
                raise NotSent(f"the link to {record.name} broke before sending")
            queue = None

    def _credit(self, address: str, target: str, messages: int, size_bytes: int) -> None:
        account = self._accounts.get((address, target))
        if account is None:
            return
        account.grant(messages, size_bytes)
        queue = self._waiting.get((address, target))
        for _ in range(min(messages, len(queue) if queue else 0)):
            if queue:
                _wake(queue.popleft())


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _reply(pending: Pending, envelope: Envelope, buffers: Sequence[memoryview]) -> Message:
    what = f"{type(pending.request).__name__} to {pending.record.name}"
    if envelope.kind == Kind.OK:
        expected = reply_types(cast("type[Request[Any]]", type(pending.request))).get(envelope.tag)
        if expected is None:
            raise Failed(f"{what}: answered by {envelope.tag}, which is not one of its replies")
        try:
            return decode_body(expected, envelope.body, buffers)
        except BadFrame as error:
            raise Failed(f"{what}: its reply could not be decoded: {error}") from error
    if envelope.kind == Kind.ERROR:
        raise Failed(f"{what}: {msgspec.msgpack.decode(envelope.body, type=str)}")
    if envelope.kind == Kind.BAD_BODY:
        raise Failed(f"{what}: {msgspec.msgpack.decode(envelope.body, type=str)}")
    raise Refused(f"{what}: {REFUSALS.get(Kind(envelope.kind), 'refused')}")

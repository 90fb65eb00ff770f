"""The outgoing half of a process: references that ask and tell, the table of open asks, the credit of each peer, how a reply finds its asker."""

import asyncio
import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import msgspec

from rubato.bus.codec import NOT_OURS, Envelope, EnvelopeKind, body_decoder, decode_body, encode_body
from rubato.bus.errors import AskFailed, BadFrame, BusError, Failed, NotSent, Refused, Unknown
from rubato.bus.link import Account, Peer
from rubato.bus.message import Message, Request, reply_types
from rubato.bus.transport import Delivery, Transport
from rubato.runtime.observe.figures import Waits, WaitView
from rubato.runtime.registry import ActorRecord, Directory

ReplyT = TypeVar("ReplyT")

SWEEP_S = 0.05
"""Deadlines are checked this often for all open asks at once: a timer per ask would cost more than the ask."""

BACKOFF_S = 0.05
"""First pause before asking again; doubles up to `BACKOFF_MAX_S`. A change of membership ends the pause early."""

BACKOFF_MAX_S = 1.0

_OK = int(EnvelopeKind.OK)
_CREDIT = int(EnvelopeKind.CREDIT)

current_deadline: ContextVar[float] = ContextVar("rubato_deadline", default=0.0)
"""Loop time by which the running handler's own asker wants its reply; 0 for none. Every ask that the handler makes inherits it."""

current_trace: ContextVar[bytes] = ContextVar("rubato_trace", default=b"")
"""16 bytes that name the chain of messages the running handler belongs to."""


def budget(timeout_s: float) -> float:
    """Seconds left: the smaller of `timeout_s` and what remains of the inherited deadline; at least 0."""
    inherited = current_deadline.get()
    if not inherited:
        return timeout_s
    return max(0.0, min(timeout_s, inherited - asyncio.get_running_loop().time()))


REFUSALS: Mapping[int, str] = {
    EnvelopeKind.EXPIRED: "its deadline passed before the handler started",
    EnvelopeKind.WRONG_INCARNATION: "it was meant for another incarnation",
    EnvelopeKind.NO_ACTOR: "no such actor lives there",
    EnvelopeKind.OVERLOADED: "its mailbox is full",
    EnvelopeKind.BAD_BODY: "it could not decode the message",
}

SHOWN_S = 1.0
"""An ask that is open for longer, or a handler that holds its mailbox up for longer, is shown as a wait."""


class Pending(msgspec.Struct):
    """One open ask."""

    future: "asyncio.Future[Any]"
    deadline: float
    record: ActorRecord
    kind: "type[Request[Any]]"
    since: float


_Encoded = tuple[str, msgspec.Raw, Sequence[memoryview]]
"""Tag, body, and the buffers beside it."""


def _size(encoded: _Encoded) -> int:
    _, body, buffers = encoded
    return len(body) + sum(map(len, buffers)) if buffers else len(body)


class _Route:
    """The way to one actor: its account at this process, and who waits for credit, first come first served."""

    __slots__ = ("account", "record", "waiting")

    def __init__(self, record: ActorRecord) -> None:
        self.record = record
        self.account = Account()
        self.waiting: deque[asyncio.Future[None]] = deque()

    def wake(self, most: int) -> None:
        for _ in range(min(most, len(self.waiting))):
            waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)


class Courier:
    """Sends for one kernel. Open asks are bounded by the credit that receivers grant."""

    def __init__(self, transport: Transport, sender: str, waits: Waits) -> None:
        self._transport = transport
        self.waits = waits
        self._sender = sender
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._routes: dict[tuple[str, str], _Route] = {}
        self._latest: dict[str, _Route] = {}
        self.sent, self.came = defaultdict[str, int](int), defaultdict[str, int](int)
        """By actor, bytes of asks and tells and of its replies: bodies, and the buffers beside them."""
        self.unknown = 0
        """Asks that ended as Unknown: they may or may not have run."""
        self.late = 0
        """Replies that came after their asker had gone: counted, then dropped."""

    async def ask(self, record: ActorRecord, request: Request[ReplyT], deadline: float) -> ReplyT:
        """One attempt: the reply, or AskFailed by `deadline` (loop time)."""
        encoded = encode_body(request)
        route, size = self._way(record), _size(encoded)
        if route.waiting or not route.account.take(size):
            try:
                await self._take_credit(route, size, deadline)
            except NotSent as error:
                self._refused(record, type(request), error)
                raise
        self.sent[record.name] += size
        ask_id, future = self._send(record, request, encoded, deadline, current_trace.get())
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(record, ask_id)
            raise

    def begin(self, record: ActorRecord, request: Request[ReplyT], deadline: float, trace: bytes) -> "asyncio.Future[ReplyT] | None":
        """As `ask`, without a task to wait in; None where there is no credit now. To cancel the future is to cancel the work."""
        try:
            encoded = encode_body(request)
            route, size = self._way(record), _size(encoded)
            if route.waiting or not route.account.take(size):
                return None
            self.sent[record.name] += size
            ask_id, future = self._send(record, request, encoded, deadline, trace)
        except BusError as error:
            failed: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed
        # Once it is answered or has failed it is not pending any more.
        future.add_done_callback(lambda _: self._withdraw(record, ask_id))
        return future

    def _send(
        self, record: ActorRecord, request: Request[ReplyT], encoded: _Encoded, deadline: float, trace: bytes
    ) -> "tuple[int, asyncio.Future[ReplyT]]":
        """Post an ask that is paid for."""
        loop = asyncio.get_running_loop()
        tag, body, buffers = encoded
        ask_id = next(self._ids)
        future: asyncio.Future[ReplyT] = loop.create_future()
        now = loop.time()
        self._pending[ask_id] = Pending(future, deadline, record, type(request), now)
        budget_us = max(1, int((deadline - now) * 1e6))
        envelope = Envelope.ask(ask_id, record.name, record.incarnation, tag, budget_us, trace, body, self._sender)
        try:
            self._transport.post(record.address, envelope, buffers)
        except BusError:
            del self._pending[ask_id]
            raise
        return ask_id, future

    def _withdraw(self, record: ActorRecord, ask_id: int) -> None:
        if self._pending.pop(ask_id, None) is not None:
            self._cancel(record, ask_id)

    def tell(self, record: ActorRecord, message: Message) -> Awaitable[None] | None:
        """Send and forget. What it returns is to be awaited first: there is no credit now."""
        encoded = tag, body, buffers = encode_body(message)
        route, size = self._way(record), _size(encoded)
        if route.waiting or not route.account.take(size):
            return self._tell_later(route, size, tag, body, buffers)
        self.sent[record.name] += size
        envelope = Envelope.tell(record.name, record.incarnation, tag, current_trace.get(), body, self._sender)
        self._transport.post(record.address, envelope, buffers)
        return None

    def arrived(self, delivery: Delivery) -> None:
        """A reply or a grant of credit."""
        envelope = delivery.envelope
        if envelope.kind == _CREDIT:
            self._credit(delivery.peer, envelope)
            return
        pending = self._pending.get(envelope.id)
        if pending is None or pending.record.address != delivery.peer or pending.future.done():
            self.late += 1
            return
        del self._pending[envelope.id]
        self.came[pending.record.name] += _size((envelope.tag, envelope.body, delivery.buffers))
        try:
            pending.future.set_result(_reply(pending, envelope, delivery.buffers))
        except BusError as error:
            pending.future.set_exception(error)
            self._refused(pending.record, pending.kind, error)
        else:
            if self.waits.refusals:
                self.waits.answered(pending.record.name)

    def lost(self, address: str, reason: str) -> None:
        """The link is gone: every ask on it may or may not have run, and its credit starts anew."""
        for route in [r for (where, _), r in self._routes.items() if where == address]:
            del self._routes[address, route.record.name]
            if self._latest.get(route.record.name) is route:
                del self._latest[route.record.name]
            route.wake(len(route.waiting))
        for ask_id in [i for i, p in self._pending.items() if p.record.address == address]:
            self._fail(ask_id, Unknown, f"the link broke ({reason})")

    async def sweep(self) -> None:
        """End asks whose deadline passed, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = loop.time()
            for ask_id, pending in [(i, p) for i, p in self._pending.items() if p.deadline <= now]:
                self._cancel(pending.record, ask_id)
                self._fail(ask_id, Unknown, "no reply before the deadline")

    def open_asks(self, now: float) -> list[WaitView]:
        """The oldest ask of each kind that was open for `SHOWN_S` at loop time `now`, per actor asked."""
        oldest: dict[tuple[str, str], WaitView] = {}
        for pending in self._pending.values():  # in the order in which they were asked
            age_s, holder, tag = now - pending.since, pending.record.name, pending.kind.__name__
            if age_s >= SHOWN_S:
                oldest.setdefault((holder, tag), WaitView(tag, "", holder, age_s, "", "ask", age_s))
        return list(oldest.values())

    def _fail(self, ask_id: int, kind: type[AskFailed], why: str) -> None:
        pending = self._pending.pop(ask_id)
        if not pending.future.done():
            self.unknown += kind is Unknown
            pending.future.set_exception(kind(f"{pending.kind.__name__} to {pending.record.name}: {why}"))

    def _cancel(self, record: ActorRecord, ask_id: int) -> None:
        self._transport.post(record.address, Envelope.cancel(ask_id, record.name, record.incarnation, self._sender))

    def _refused(self, record: ActorRecord, kind: type[Message], error: BusError) -> None:
        self.waits.refused(record.name, kind.__name__, str(error))

    def _way(self, record: ActorRecord) -> _Route:
        route = self._latest.get(record.name)
        return self._route(record) if route is None or route.record is not record else route

    def _route(self, record: ActorRecord) -> _Route:
        """The account belongs to the link, so it stays when only the incarnation at its end is another."""
        route = self._routes.get((record.address, record.name))
        if route is None:
            route = self._routes[record.address, record.name] = _Route(record)
        route.record = record
        self._latest[record.name] = route
        return route

    async def _tell_later(self, route: _Route, size: int, tag: str, body: msgspec.Raw, buffers: Sequence[memoryview | bytes]) -> None:
        record = route.record
        await self._take_credit(route, size, None)
        self.sent[record.name] += size
        envelope = Envelope.tell(record.name, record.incarnation, tag, current_trace.get(), body, self._sender)
        self._transport.post(record.address, envelope, buffers)

    async def _take_credit(self, route: _Route, size: int, deadline: float | None) -> None:
        """Wait in line, then pay. Raises NotSent at the deadline, or when the link breaks first."""
        record = route.record
        while True:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            route.waiting.append(waiter)
            try:
                with self.waits.on("credit", holder=record.name):
                    async with asyncio.timeout_at(deadline):
                        await waiter
            except (TimeoutError, asyncio.CancelledError) as error:
                if waiter in route.waiting:
                    route.waiting.remove(waiter)
                else:
                    route.wake(1)  # it was this one's turn; now it is the next one's
                if isinstance(error, TimeoutError):
                    raise NotSent(f"{record.name} granted no credit before the deadline") from None
                raise
            if self._routes.get((record.address, record.name)) is not route:
                raise NotSent(f"the link to {record.name} broke before sending")
            if route.account.take(size):
                route.wake(1)  # a grant of many bytes in few messages reaches further than those it woke
                return

    def _credit(self, peer: Peer, envelope: Envelope) -> None:
        route = self._routes.get((peer, envelope.target)) if isinstance(peer, str) else None
        if route is not None:
            messages, size_bytes = envelope.granted()
            route.account.grant(messages, size_bytes)
            route.wake(messages)


class Ref:
    """The actor called `target`, or any ready instance of that role: asks and tells, repeated only where that is safe. Cheap; hold it as long as you like."""

    def __init__(self, target: str, courier: Courier, directory: Directory) -> None:
        self.name = target
        self._courier = courier
        self._directory = directory

    async def ask(self, request: Request[ReplyT], *, timeout: float, retry: bool = True) -> ReplyT:
        """The reply, or a subclass of AskFailed before `timeout` (seconds) or the caller's own deadline, whichever is first.

        While no instance is ready the request waits. NotSent and Refused are retried until the deadline; Unknown too where
        the request is idempotent, which may run it again; `retry=False` leaves that to the caller. Cancelling the ask cancels the work.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + budget(timeout)
        pause = BACKOFF_S
        while True:
            record = self._directory.resolve(self.name) or await self._find(deadline)
            try:
                return await self._courier.ask(record, request, deadline)
            except (NotSent, Refused, Unknown) as error:
                final = isinstance(error, Unknown) and not request.idempotent
                if final or not retry or loop.time() + pause >= deadline:
                    raise
            await self._pause(pause)
            pause = min(2 * pause, BACKOFF_MAX_S)

    def begin(self, request: Request[ReplyT], *, timeout: float, trace: bytes) -> "asyncio.Future[ReplyT] | None":
        """One attempt, without a task to wait in: the future fails as `ask` raises, and to cancel it is to cancel the work.

        None where no instance is ready or granted credit: then `ask` waits for it. The caller's own deadline does not count.
        """
        record = self._directory.resolve(self.name)
        deadline = asyncio.get_running_loop().time() + timeout
        return None if record is None else self._courier.begin(record, request, deadline, trace)

    async def tell(self, message: Message) -> None:
        """Send and forget; waits only for credit. Raises NotSent when no instance is ready."""
        record = self._directory.resolve(self.name)
        if record is None:
            raise NotSent(f"no ready actor {self.name!r}")
        credit = self._courier.tell(record, message)
        if credit is not None:
            await credit

    async def _find(self, deadline: float) -> ActorRecord:
        try:
            with self._courier.waits.on(self.name, stage="ask", detail="none is ready", holder=self.name):
                async with asyncio.timeout_at(deadline):
                    while (record := self._directory.resolve(self.name)) is None:
                        await self._directory.change()
                    return record
        except TimeoutError:
            raise NotSent(f"no ready actor {self.name!r} before the deadline") from None

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._directory.change()


class _Expected(NamedTuple):
    """One of the replies that a request may get, and what decodes it where no buffers are beside it."""

    reply: type[Message]
    decode: Callable[[msgspec.Raw], Message]


@functools.cache
def _replies_to(request: "type[Request[Any]]") -> Mapping[str, _Expected]:
    return {tag: _Expected(reply, body_decoder(reply)) for tag, reply in reply_types(request).items()}


def _reply(pending: Pending, envelope: Envelope, buffers: Sequence[memoryview]) -> Message:
    kind = envelope.kind
    if kind == _OK:
        expected = _replies_to(pending.kind).get(envelope.tag)
        if expected is None:
            raise Failed(f"{_what(pending)}: answered by {envelope.tag}, which is not one of its replies")
        try:
            return decode_body(expected.reply, envelope.body, buffers) if buffers else expected.decode(envelope.body)
        except (BadFrame, *NOT_OURS) as error:
            raise Failed(f"{_what(pending)}: its reply could not be decoded: {error}") from error
    if kind in (EnvelopeKind.ERROR, EnvelopeKind.BAD_BODY):
        raise Failed(f"{_what(pending)}: {_text(envelope.body)}")
    raise Refused(f"{_what(pending)}: {REFUSALS.get(kind, 'refused')}")


def _what(pending: Pending) -> str:
    return f"{pending.kind.__name__} to {pending.record.name}"


def _text(body: msgspec.Raw) -> str:
    try:
        return msgspec.msgpack.decode(body, type=str)
    except (msgspec.MsgspecError, ValueError):
        return "it failed, and its reason could not be read"

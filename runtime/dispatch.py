"""The incoming half of a process: from arrived envelope to handler to reply.

A handler that takes one message at a time is awaited by the consumer itself: no task, no timer and no queue per message. Constants
stand for members of `Kind`, because looking a member up costs as much as decoding an envelope.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from bus.codec import NOT_OURS, body_decoder, decode_body, encode_body
from bus.credit import Grants, charge
from bus.envelope import Envelope, Kind
from bus.errors import AskFailed, BadFrame, BusError
from bus.message import Message
from bus.transport import Delivery, Peer, Transport
from runtime.actor import Actor, HandlerSpec
from runtime.courier import NOTHING
from runtime.deadline import current_deadline, current_trace
from runtime.mailbox import Mailbox
from runtime.observe.waits import WaitView
from runtime.replies import Replies

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

BREATH = 256
"""Letters handled before the consumer lets the loop run: long enough to amortise, short enough to stay under 20 ms."""

NOBODY = b""
"""The peer of letters whose link is gone: they are handled, and what is posted to it goes nowhere."""

_ASK, _TELL, _CANCEL, _OK, _CREDIT = (int(k) for k in (Kind.ASK, Kind.TELL, Kind.CANCEL, Kind.OK, Kind.CREDIT))


SHOWN_S = 1.0
"""A handler that holds the mailbox up for longer is shown as a wait."""


class Spawn(Protocol):
    def __call__(self, work: Coroutine[Any, Any, Any], *, name: str) -> "asyncio.Task[Any]": ...


class Handler(NamedTuple):
    """A handler of the actor that lives here: what it declared, and the bound method."""

    spec: HandlerSpec
    run: Callable[[Any], Awaitable[Any]]
    decode: Callable[[msgspec.Raw], Message]


class _Running:
    """A handler at work, and whom it answers: whoever asked, and asked again under the same key.

    All of them, because the attempt that came last need not be the last one made: another link may have brought it.
    """

    __slots__ = ("askers", "key", "outlives_asker", "task")

    def __init__(self, delivery: Delivery, *, outlives_asker: bool) -> None:
        self.askers = [delivery]
        self.key = delivery.envelope.key
        self.outlives_asker = outlives_asker
        self.task: asyncio.Task[Any] | None = None


class Dispatcher:
    """Runs one actor's handlers. A handler that raises fails its ask and nothing else.

    `system` handles messages to the kernel itself, by tag: they overtake everything else. Whatever is not for the actor goes to
    `answered`.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        log: "FilteringBoundLogger",
        spawn: Spawn,
        system: Mapping[str, Callable[[Delivery], None]],
        answered: Callable[[Delivery], None],
    ) -> None:
        self._transport = transport
        self._name = name
        self._log = log
        self._spawn = spawn
        self._system = system
        self._answered = answered
        self._mailbox = Mailbox()
        self._grants: dict[Peer, Grants] = {}
        self._running: dict[tuple[Peer, int], _Running] = {}
        self._keyed: dict[str, _Running] = {}
        self._counts: dict[str, int] = {}
        self._parked: dict[str, deque[Delivery]] = {}
        self._replies = Replies()
        self._time: Callable[[], float] = _running_time
        self._inline: Handler | None = None
        """The handler that all other messages wait for."""
        self._seen = (-1, 0.0)
        """Messages handled, and since when no further one was: as of the last look."""
        self.incarnation = 0
        self.handled = 0

    @property
    def depth(self) -> int:
        """Letters that wait: in the mailbox, or parked because their handler runs at its limit."""
        return len(self._mailbox) + sum(map(len, self._parked.values()))

    def arrived(self, delivery: Delivery) -> None:
        """Anything from a peer."""
        envelope = delivery.envelope
        kind = envelope.kind
        if kind != _TELL and kind != _ASK:
            if kind == _CANCEL:
                self._cancel(delivery)
            else:
                self._answered(delivery)
        elif envelope.target != self._name:
            # The sender's account is that of the actor it meant.
            self._grant(delivery.peer, envelope.target, 1, charge(_size(delivery)))
            self._refuse(delivery, Kind.NO_ACTOR)
        elif envelope.incarnation and envelope.incarnation != self.incarnation:
            self._consumed(delivery)
            self._refuse(delivery, Kind.WRONG_INCARNATION)
        elif envelope.tag in self._system:
            self._consumed(delivery)
            self._system[envelope.tag](delivery)
        else:
            if envelope.budget_us:
                delivery.deadline = envelope.budget_us / 1e6 + self._time()
            if not self._mailbox.put(delivery):
                self._consumed(delivery)
                self._refuse(delivery, Kind.OVERLOADED)

    def forget(self, peer: Peer) -> None:
        """The link is gone: its credit starts anew, and what it asked for is cancelled where its handler does not outlive it."""
        self._grants.pop(peer, None)
        for letter in (*self._mailbox.letters, *(w for parked in self._parked.values() for w in parked)):
            if letter.peer == peer:
                letter.peer = NOBODY
        for where, running in list(self._running.items()):
            if where[0] == peer and not running.outlives_asker:
                self._left(where)

    async def consume(self, actor: Actor) -> None:
        """Handle letters until cancelled: in order, but for handlers that declare a concurrency."""
        self._time = asyncio.get_running_loop().time
        handlers = _bound(actor)
        letters, trace, deadline = self._mailbox.letters, b"", 0.0
        while True:
            await self._mailbox.wait()
            for _ in range(BREATH):
                if not letters:
                    break
                delivery = letters.popleft()
                envelope = delivery.envelope
                handler = handlers.get(envelope.tag)
                if handler is None:
                    self._unknown(actor, delivery)
                elif handler.spec.concurrency > 1:
                    self._admit(handler, delivery)
                else:
                    self._consumed(delivery)
                    message = self._open(handler, delivery)
                    if message is None:
                        continue
                    if delivery.deadline != deadline:
                        deadline = delivery.deadline
                        current_deadline.set(deadline)
                    if envelope.trace != trace:
                        trace = envelope.trace
                        current_trace.set(trace)
                    self._inline = handler
                    try:
                        result = await handler.run(message)
                    except Exception as error:  # noqa: BLE001 - a handler may raise anything; it fails its ask, not the actor
                        self._failed(handler, delivery, error)
                    else:
                        if envelope.kind == _ASK:
                            self.reply(delivery, result)
                    self._inline = None
                    self.handled += 1
            else:
                await asyncio.sleep(0)

    def at_work(self, now: float) -> list[WaitView]:
        """The handler that has held up the mailbox for `SHOWN_S` or longer at loop time `now`, if any. Called once per heartbeat."""
        if self._inline is None or self._seen[0] != self.handled:
            self._seen = (self.handled, now)
            return []
        age_s = now - self._seen[1]
        method = self._inline.spec.method
        return [WaitView(method, "", "", age_s, "", "handler", age_s, whole=True)] if age_s >= SHOWN_S else []

    def reply(self, delivery: Delivery, message: Message) -> None:
        """Answer an ask."""
        envelope = delivery.envelope
        try:
            tag, body, buffers = encode_body(message)
        except (BusError, TypeError) as error:
            self._log.error("bad_reply", tag=envelope.tag, error=str(error))
            self._reply_error(delivery, Kind.ERROR, f"{self._name}: its reply cannot travel: {error}")
            return
        if envelope.key and not buffers:
            self._replies.keep(envelope.key, tag, body)
        self._post(delivery, _OK, tag, body, buffers)

    # -- one handler --------------------------------------------------------------------------------------------

    def _open(self, handler: Handler, delivery: Delivery) -> Message | None:
        """The decoded message; None when it was answered or refused without running."""
        envelope = delivery.envelope
        if delivery.deadline and delivery.deadline <= self._time():
            self._refuse(delivery, Kind.EXPIRED)
            return None
        if envelope.key:
            known = self._replies.get(envelope.key)
            if known is not None:
                self._post(delivery, _OK, known.tag, known.body, ())
                return None
        try:
            if delivery.buffers:
                return decode_body(handler.spec.message, envelope.body, delivery.buffers)
            return handler.decode(envelope.body)
        except (BadFrame, *NOT_OURS) as error:
            self._log.warning("bad_body", tag=envelope.tag, sender=envelope.sender, error=str(error))
            self._reply_error(delivery, Kind.BAD_BODY, f"{envelope.tag}: {error}")
            return None

    def _unknown(self, actor: Actor, delivery: Delivery) -> None:
        self._consumed(delivery)
        text = f"{type(actor).__name__} has no handler for {delivery.envelope.tag}"
        self._reply_error(delivery, Kind.BAD_BODY, text)

    def _failed(self, handler: Handler, delivery: Delivery, error: Exception) -> None:
        if not isinstance(error, AskFailed | BusError):
            self._log.error("handler_failed", handler=handler.spec.method, error=repr(error), exc_info=error)
        self._reply_error(delivery, Kind.ERROR, f"{self._name}: {type(error).__name__}: {error}")

    # -- handlers that run beside each other --------------------------------------------------------------------

    def _admit(self, handler: Handler, delivery: Delivery) -> None:
        """Start it, or park it: a parked letter keeps its sender's credit, which bounds how many there are."""
        if self._counts.get(handler.spec.method, 0) < handler.spec.concurrency:
            self._start(handler, delivery)
        else:
            self._parked.setdefault(handler.spec.method, deque()).append(delivery)

    def _start(self, handler: Handler, delivery: Delivery) -> None:
        self._consumed(delivery)
        envelope, spec = delivery.envelope, handler.spec
        where = _where(delivery)
        if envelope.key and envelope.key in self._keyed:
            self._running[where] = running = self._keyed[envelope.key]
            running.askers.append(delivery)
            return
        message = self._open(handler, delivery)
        if message is None:
            return
        self._counts[spec.method] = self._counts.get(spec.method, 0) + 1
        running = _Running(delivery, outlives_asker=spec.outlives_asker)
        work = self._beside(handler, running, delivery, message)
        running.task = self._spawn(work, name=f"{self._name}.{spec.method}")
        if envelope.kind == _ASK:
            self._running[where] = running
            if envelope.key:
                self._keyed[envelope.key] = running
        running.task.add_done_callback(lambda _: self._ended(handler, running))

    async def _beside(self, handler: Handler, running: _Running, first: Delivery, message: Message) -> None:
        current_deadline.set(first.deadline)
        current_trace.set(first.envelope.trace)
        try:
            result = await handler.run(message)
        except Exception as error:  # noqa: BLE001 - as above
            self._forget(running)
            for delivery in running.askers:
                self._failed(handler, delivery, error)
        else:
            self._forget(running)
            for delivery in running.askers if first.envelope.kind == _ASK else ():
                self.reply(delivery, result)
        finally:
            self.handled += 1

    def _ended(self, handler: Handler, running: _Running) -> None:
        self._forget(running)
        method = handler.spec.method
        self._counts[method] -= 1
        parked = self._parked.get(method)
        while parked and self._counts[method] < handler.spec.concurrency:
            self._start(handler, parked.popleft())

    def _forget(self, running: _Running) -> None:
        """Whoever asks from now on gets the reply that was kept, or a run of its own."""
        for delivery in running.askers:
            self._running.pop(_where(delivery), None)
        if self._keyed.get(running.key) is running:
            del self._keyed[running.key]

    def _left(self, where: tuple[Peer, int]) -> None:
        """One asker went away. With the last it is cancelled: whoever asks again under its key meanwhile gets a run of its own."""
        running = self._running.pop(where)
        running.askers = [delivery for delivery in running.askers if _where(delivery) != where]
        if any(delivery.peer != NOBODY for delivery in running.askers):
            return
        self._forget(running)
        if running.task is not None:
            running.task.cancel()

    def _cancel(self, delivery: Delivery) -> None:
        peer, ask_id = delivery.peer, delivery.envelope.id
        if (peer, ask_id) in self._running:
            self._left((peer, ask_id))
            return
        letter = self._mailbox.cancel(peer, ask_id)
        if letter is not None:
            self._consumed(letter)
        for parked in self._parked.values():
            for waiting in [w for w in parked if w.peer == peer and w.envelope.id == ask_id]:
                parked.remove(waiting)
                self._consumed(waiting)

    # -- what goes back -----------------------------------------------------------------------------------------

    def _consumed(self, delivery: Delivery) -> None:
        """The letter left the queue: its credit goes back once enough has gathered."""
        grants = self._grants.get(delivery.peer)
        if grants is None:
            grants = self._grants[delivery.peer] = Grants()
        messages, size_bytes = grants.consumed(_size(delivery) if delivery.buffers else len(delivery.envelope.body))
        if messages:
            self._grant(delivery.peer, self._name, messages, size_bytes)

    def _grant(self, peer: Peer, target: str, messages: int, size_bytes: int) -> None:
        self._transport.post(peer, Envelope(_CREDIT, size_bytes, target, 0, "", 0, b"", "", messages, NOTHING))

    def _refuse(self, delivery: Delivery, kind: Kind) -> None:
        if delivery.envelope.kind == _ASK:
            self._post(delivery, kind, "", NOTHING, ())

    def _reply_error(self, delivery: Delivery, kind: Kind, text: str) -> None:
        if delivery.envelope.kind == _ASK:
            self._post(delivery, kind, "", msgspec.Raw(msgspec.msgpack.encode(text)), ())

    def _post(
        self, delivery: Delivery, kind: int, tag: str, body: msgspec.Raw, buffers: Sequence[memoryview | bytes]
    ) -> None:
        asked = delivery.envelope
        envelope = Envelope(kind, asked.id, self._name, self.incarnation, tag, 0, asked.trace, "", 0, body)
        self._transport.post(delivery.peer, envelope, buffers)


def _bound(actor: Actor) -> dict[str, Handler]:
    """By tag of the message."""
    return {
        tag: Handler(spec, getattr(actor, spec.method), body_decoder(spec.message))
        for tag, spec in actor.handlers.items()
    }


def _where(delivery: Delivery) -> tuple[Peer, int]:
    return delivery.peer, delivery.envelope.id


def _size(delivery: Delivery) -> int:
    return len(delivery.envelope.body) + sum(map(len, delivery.buffers))


def _running_time() -> float:
    return asyncio.get_running_loop().time()

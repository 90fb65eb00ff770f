"""The incoming half of a process: from arrived envelope to handler to reply.

A handler that takes one message at a time is awaited by the consumer itself: no task, no timer and no queue per message. Constants
stand for members of `EnvelopeKind`, because looking a member up costs as much as decoding an envelope.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rubato.bus.codec import NOT_OURS, NOTHING, Envelope, EnvelopeKind, body_decoder, decode_body, encode_body
from rubato.bus.errors import AskFailed, BadFrame, BusError
from rubato.bus.link import WINDOW_MESSAGES, Grants, Peer, charge
from rubato.bus.message import Message
from rubato.bus.transport import Delivery, Transport
from rubato.runtime.actor import Actor, HandlerSpec, Handles
from rubato.runtime.courier import SHOWN_S, current_deadline, current_trace
from rubato.runtime.observe.figures import WaitView

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

CAPACITY = 64 * WINDOW_MESSAGES
"""What 64 peers may send on credit alone; a full mailbox refuses (OVERLOADED), and the sender may ask elsewhere."""

BREATH = 256
"""Letters handled before the consumer lets the loop run: long enough to amortise, short enough to stay under 20 ms."""

_ASK = int(EnvelopeKind.ASK)
_TELL = int(EnvelopeKind.TELL)
_CANCEL = int(EnvelopeKind.CANCEL)
_OK = int(EnvelopeKind.OK)

NO_PEER = b""
"""The peer of letters whose link is gone: they are handled, and what is posted to it goes nowhere."""

Spawn = Callable[..., "asyncio.Task[Any]"]
"""`spawn(work, name=…)`."""


class Handler(NamedTuple):
    """A handler of the actor that lives here: what it declared, and the bound method."""

    spec: HandlerSpec
    run: Callable[[Any], Any]
    decode: Callable[[msgspec.Raw], Message]


class Mailbox:
    """The bounded queue before an actor; what can't wait (drain, cancel) never stands in it. First in, first out. One reader, who takes from `letters` itself and waits when they are gone."""

    def __init__(self) -> None:
        self.letters: deque[Delivery] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.letters)

    def put(self, letter: Delivery) -> bool:
        """False when full; the letter is not kept then."""
        letters = self.letters
        if len(letters) >= CAPACITY:
            return False
        letters.append(letter)
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None
        return True

    async def wait(self) -> None:
        """Return once there is a letter."""
        while not self.letters:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def cancel(self, peer: object, ask_id: int) -> Delivery | None:
        """Take a queued ask out again, if it is still here."""
        for letter in self.letters:
            if letter.envelope.id == ask_id and letter.peer == peer:
                self.letters.remove(letter)
                return letter
        return None


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
        self._system = system
        self._answered = answered
        self._mailbox = Mailbox()
        self._grants: dict[Peer, Grants] = {}
        self._concurrent = ConcurrentHandlers(self, name, spawn)
        self._time = asyncio.get_running_loop().time
        self._inline: Handler | None = None
        """The handler that all other messages wait for."""
        self._seen = (-1, 0.0)
        """Messages handled, and since when no further one was: as of the last look."""
        self.incarnation = 0
        self.handled = 0

    @property
    def depth(self) -> int:
        """Letters that wait: in the mailbox, or parked because their handler runs at its limit."""
        return len(self._mailbox) + self._concurrent.num_parked

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
            self._refuse(delivery, EnvelopeKind.NO_ACTOR)
        elif envelope.incarnation and envelope.incarnation != self.incarnation:
            self.consumed(delivery)
            self._refuse(delivery, EnvelopeKind.WRONG_INCARNATION)
        elif envelope.tag in self._system:
            self.consumed(delivery)
            self._system[envelope.tag](delivery)
        else:
            if envelope.budget_us:
                delivery.deadline = envelope.budget_us / 1e6 + self._time()
            if not self._mailbox.put(delivery):
                self.consumed(delivery)
                self._refuse(delivery, EnvelopeKind.OVERLOADED)

    def forget(self, peer: Peer) -> None:
        """The link is gone: its credit starts anew, and what it asked for is cancelled where its handler does not outlive it."""
        self._grants.pop(peer, None)
        for letter in self._mailbox.letters:
            if letter.peer == peer:
                letter.peer = NO_PEER
        self._concurrent.forget(peer)

    def end(self) -> None:
        """The actor stops: nothing that waits is begun any more."""
        self._concurrent.end()

    async def consume(self, actor: Actor) -> None:
        """Handle letters until cancelled: in order, but for handlers that declare a concurrency."""
        handlers = _bound(actor)
        letters, trace, deadline = self._mailbox.letters, b"", 0.0
        while True:
            await self._mailbox.wait()
            for _ in range(BREATH):
                if not letters:
                    break
                delivery = letters.popleft()
                envelope = delivery.envelope
                handler = handlers.get(envelope.tag) or _late(actor, handlers, envelope.tag)
                if handler is None:
                    self._unknown(actor, delivery)
                elif handler.spec.concurrency > 1:
                    self._concurrent.admit(handler, delivery)
                    deadline, trace = (current_deadline.get(), current_trace.get())  # one that returns a future sets them too
                else:
                    self.consumed(delivery)
                    message = self.open(handler, delivery)
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
                        self.failed(handler, delivery, error)
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
        return [WaitView(method, "", "", age_s, "", "handler", age_s, blocks_actor=True)] if age_s >= SHOWN_S else []

    def reply(self, delivery: Delivery, message: Message) -> None:
        """Answer an ask."""
        envelope = delivery.envelope
        try:
            tag, body, buffers = encode_body(message)
        except (BusError, TypeError) as error:
            self._log.error("bad_reply", tag=envelope.tag, error=str(error))
            self._reply_error(delivery, EnvelopeKind.ERROR, f"{self._name}: its reply cannot travel: {error}")
            return
        self._transport.post(delivery.peer, envelope.reply(_OK, self.incarnation, tag, body), buffers)

    # -- one handler --------------------------------------------------------------------------------------------

    def open(self, handler: Handler, delivery: Delivery) -> Message | None:
        """The decoded message; None when it was answered or refused without running."""
        envelope = delivery.envelope
        if delivery.deadline and delivery.deadline <= self._time():
            self._refuse(delivery, EnvelopeKind.EXPIRED)
            return None
        try:
            if delivery.buffers:
                return decode_body(handler.spec.message, envelope.body, delivery.buffers)
            return handler.decode(envelope.body)
        except (BadFrame, *NOT_OURS) as error:
            self._log.warning("bad_body", tag=envelope.tag, sender=envelope.sender, error=str(error))
            self._reply_error(delivery, EnvelopeKind.BAD_BODY, f"{envelope.tag}: {error}")
            return None

    def _unknown(self, actor: Actor, delivery: Delivery) -> None:
        self.consumed(delivery)
        text = f"{type(actor).__name__} has no handler for {delivery.envelope.tag}"
        self._reply_error(delivery, EnvelopeKind.BAD_BODY, text)

    def failed(self, handler: Handler, delivery: Delivery, error: Exception) -> None:
        if not isinstance(error, AskFailed | BusError):
            self._log.error("handler_failed", handler=handler.spec.method, error=repr(error), exc_info=error)
        self._reply_error(delivery, EnvelopeKind.ERROR, f"{self._name}: {type(error).__name__}: {error}")

    def _cancel(self, delivery: Delivery) -> None:
        peer, ask_id = delivery.peer, delivery.envelope.id
        if not self._concurrent.cancel(peer, ask_id) and (letter := self._mailbox.cancel(peer, ask_id)) is not None:
            self.consumed(letter)

    # -- what goes back -----------------------------------------------------------------------------------------

    def consumed(self, delivery: Delivery) -> None:
        """The letter left the queue: its credit goes back once enough has gathered."""
        grants = self._grants.get(delivery.peer)
        if grants is None:
            grants = self._grants[delivery.peer] = Grants()
        messages, size_bytes = grants.consumed(_size(delivery) if delivery.buffers else len(delivery.envelope.body))
        if messages:
            self._grant(delivery.peer, self._name, messages, size_bytes)

    def _grant(self, peer: Peer, target: str, messages: int, size_bytes: int) -> None:
        self._transport.post(peer, Envelope.grant(target, messages, size_bytes))

    def _refuse(self, delivery: Delivery, kind: EnvelopeKind, body: msgspec.Raw = NOTHING) -> None:
        if delivery.envelope.kind == _ASK:
            self._transport.post(delivery.peer, delivery.envelope.reply(kind, self.incarnation, body=body))

    def _reply_error(self, delivery: Delivery, kind: EnvelopeKind, text: str) -> None:
        self._refuse(delivery, kind, msgspec.Raw(msgspec.msgpack.encode(text)))


class _Run(NamedTuple):
    """A handler at work on an ask."""

    delivery: Delivery
    outlives_asker: bool
    work: "asyncio.Future[Any]"


class ConcurrentHandlers:
    """Each handler has its own limit; letters above it are parked, in order."""

    def __init__(self, dispatcher: Dispatcher, name: str, spawn: Spawn) -> None:
        self._dispatcher, self._name, self._spawn = dispatcher, name, spawn
        self._running: dict[tuple[Peer, int], _Run] = {}
        self._counts: dict[type[Message], int] = {}
        self._parked: dict[type[Message], deque[Delivery]] = {}

    @property
    def num_parked(self) -> int:
        return sum(map(len, self._parked.values()))

    def admit(self, handler: Handler, delivery: Delivery) -> None:
        """Start it, or park it: a parked letter keeps its sender's credit, which bounds how many there are."""
        if self._counts.get(handler.spec.message, 0) < handler.spec.concurrency:
            self._start(handler, delivery)
        else:
            self._parked.setdefault(handler.spec.message, deque()).append(delivery)

    def end(self) -> None:
        """The actor stops: what is parked is not begun any more."""
        self._parked.clear()

    def forget(self, peer: Peer) -> None:
        """The link is gone: what it asked for is cancelled where its handler does not outlive it."""
        for letter in (letter for parked in self._parked.values() for letter in parked):
            if letter.peer == peer:
                letter.peer = NO_PEER
        for where in [where for where in self._running if where[0] == peer]:
            run = self._running.pop(where)
            run.delivery.peer = NO_PEER
            if not run.outlives_asker:
                run.work.cancel()

    def cancel(self, peer: Peer, ask_id: int) -> bool:
        """Whether the ask was here."""
        run = self._running.pop((peer, ask_id), None)
        if run is not None:
            run.work.cancel()
            return True
        for parked in self._parked.values():
            for letter in parked:
                if (letter.peer, letter.envelope.id) == (peer, ask_id):
                    parked.remove(letter)
                    self._dispatcher.consumed(letter)
                    return True
        return False

    def _start(self, handler: Handler, delivery: Delivery) -> None:
        self._dispatcher.consumed(delivery)
        message = self._dispatcher.open(handler, delivery)
        if message is None:
            return
        spec = handler.spec
        self._counts[spec.message] = self._counts.get(spec.message, 0) + 1
        if spec.returns_future:
            work = self._begin(handler, delivery, message)
        else:
            work = self._spawn(self._run(handler, delivery, message), name=f"{self._name}.{spec.method}")
        if delivery.envelope.kind == _ASK and delivery.peer != NO_PEER:
            where = (delivery.peer, delivery.envelope.id)
            self._running[where] = _Run(delivery, spec.outlives_asker, work)
        work.add_done_callback(partial(self._ended, handler, delivery))

    def _begin(self, handler: Handler, delivery: Delivery, message: Message) -> "asyncio.Future[Any]":
        """The future of the handler's reply; what it raises at once fails the ask like any other error."""
        current_deadline.set(delivery.deadline)
        current_trace.set(delivery.envelope.trace)
        try:
            return handler.run(message)
        except Exception as error:  # noqa: BLE001 - as in _run
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    async def _run(self, handler: Handler, delivery: Delivery, message: Message) -> None:
        current_deadline.set(delivery.deadline)
        current_trace.set(delivery.envelope.trace)
        try:
            result = await handler.run(message)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it fails its ask, not the actor
            self._dispatcher.failed(handler, delivery, error)
        else:
            if delivery.envelope.kind == _ASK:
                self._dispatcher.reply(delivery, result)
        finally:
            self._dispatcher.handled += 1

    def _answer(self, handler: Handler, delivery: Delivery, work: "asyncio.Future[Any]") -> None:
        """The future is done: what `_run` does for a task."""
        self._dispatcher.handled += 1
        if work.cancelled():
            return
        error = work.exception()
        if isinstance(error, Exception):
            self._dispatcher.failed(handler, delivery, error)
        elif delivery.envelope.kind == _ASK:
            self._dispatcher.reply(delivery, work.result())

    def _ended(self, handler: Handler, delivery: Delivery, work: "asyncio.Future[Any]") -> None:
        if handler.spec.returns_future:
            self._answer(handler, delivery, work)
        self._running.pop((delivery.peer, delivery.envelope.id), None)
        message = handler.spec.message
        self._counts[message] -= 1
        parked = self._parked.get(message)
        while parked and self._counts[message] < handler.spec.concurrency:
            self._start(handler, parked.popleft())


def _bound(actor: Actor) -> dict[str, Handler]:
    """By tag of the message; the actor's own come before those of its plug-ins."""
    return {tag: handler for owner in (*reversed(actor.plugins), actor) for tag, handler in _handlers(owner).items()}


def _handlers(owner: Handles) -> dict[str, Handler]:
    return {tag: Handler(spec, getattr(owner, spec.method), body_decoder(spec.message)) for tag, spec in owner.handlers.items()}


def _late(actor: Actor, handlers: dict[str, Handler], tag: str) -> Handler | None:
    """The handler of a plug-in that its first message brings; `handlers` gets all that it has."""
    plugin = actor.plugin_for(tag)
    if plugin is not None:
        handlers |= {tag: handler for tag, handler in _handlers(plugin).items() if tag not in handlers}
    return handlers.get(tag)


def _size(delivery: Delivery) -> int:
    return len(delivery.envelope.body) + sum(map(len, delivery.buffers))

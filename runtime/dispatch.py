"""The incoming half of a process: from arrived envelope to handler to reply."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bus.codec import decode_body, encode_body
from bus.credit import Grants
from bus.envelope import Envelope, Kind
from bus.errors import AskFailed, BadFrame, BusError
from bus.transport import Delivery, Peer, Transport
from runtime.actor import Actor, HandlerSpec
from runtime.courier import NOTHING
from runtime.deadline import current_deadline, current_trace
from runtime.mailbox import Letter, Mailbox

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

BREATH = 256
"""Letters handled before the consumer lets the loop run: long enough to amortise, short enough to stay under 20 ms."""

REPLIES_KEPT = 1024
"""Replies remembered per idempotency key, so that a retried ask is answered without running twice."""


class Spawn(Protocol):
    def __call__(self, work: Coroutine[Any, Any, Any], *, name: str) -> "asyncio.Task[Any]": ...


class Dispatcher:
    """Runs one actor's handlers. A handler that raises fails its ask and nothing else."""

    def __init__(
        self,
        transport: Transport,
        name: str,
        log: "FilteringBoundLogger",
        spawn: Spawn,
        system: Callable[[str, Delivery], bool],
    ) -> None:
        self._transport = transport
        self._name = name
        self._log = log
        self._spawn = spawn
        self._system = system
        self._mailbox = Mailbox()
        self._grants: dict[Peer, Grants] = {}
        self._running: dict[tuple[Peer, int], asyncio.Task[Any]] = {}
        self._outliving: set[tuple[Peer, int]] = set()
        self._counts: dict[str, int] = {}
        self._parked: dict[str, deque[Letter]] = {}
        self._replies: OrderedDict[str, tuple[str, msgspec.Raw]] = OrderedDict()
        self._actor: Actor | None = None
        self.incarnation = 0
        self.handled = 0

    @property
    def depth(self) -> int:
        """Letters that wait: in the mailbox, or parked because their handler runs at its limit."""
        return len(self._mailbox) + sum(map(len, self._parked.values()))

    def arrived(self, delivery: Delivery) -> None:
        """An ASK, TELL or CANCEL from a peer."""
        envelope = delivery.envelope
        if envelope.kind == Kind.CANCEL:
            self._cancel(delivery)
            return
        if envelope.target != self._name:
            self._refuse(delivery, Kind.NO_ACTOR)
        elif envelope.incarnation and envelope.incarnation != self.incarnation:
            self._refuse(delivery, Kind.WRONG_INCARNATION)
        elif self._system(envelope.tag, delivery):
            self._consumed(delivery)
        else:
            deadline = envelope.budget_us / 1e6 + asyncio.get_running_loop().time() if envelope.budget_us else 0.0
            if not self._mailbox.put(Letter(delivery, deadline)):
                self._consumed(delivery)
                self._refuse(delivery, Kind.OVERLOADED)

    def forget(self, peer: Peer) -> None:
        """The link is gone: its credit starts anew, and what it asked for is cancelled where its handler does not outlive it."""
        self._grants.pop(peer, None)
        for key in [k for k in self._running if k[0] == peer and k not in self._outliving]:
            self._running[key].cancel()

    async def consume(self, actor: Actor) -> None:
        """Handle letters until cancelled: in order, but for handlers that declare a concurrency."""
        self._actor = actor
        breath = 0
        while True:
            letter = await self._mailbox.get()
            self._consumed(letter.delivery)
            spec = actor.handlers.get(letter.delivery.envelope.tag)
            if spec is None:
                text = f"{type(actor).__name__} has no handler for {letter.delivery.envelope.tag}"
                self._reply_error(letter.delivery, Kind.BAD_BODY, text)
            elif spec.concurrency == 1:
                await self._handle(spec, letter)
            elif self._counts.get(spec.method, 0) < spec.concurrency:
                self._start(spec, letter)
            else:
                self._parked.setdefault(spec.method, deque()).append(letter)
            breath += 1
            if breath >= BREATH:
                breath = 0
                await asyncio.sleep(0)

    def reply(self, delivery: Delivery, tag: str, body: msgspec.Raw, buffers: Any = ()) -> None:
        self._post(delivery, Kind.OK, tag, body, buffers)

    def _start(self, spec: HandlerSpec, letter: Letter) -> None:
        self._counts[spec.method] = self._counts.get(spec.method, 0) + 1
        key = (letter.delivery.peer, letter.delivery.envelope.id)
        task = self._spawn(self._handle(spec, letter), name=f"{self._name}.{spec.method}")
        if letter.delivery.envelope.kind == Kind.ASK:
            self._running[key] = task
            if spec.outlives_asker:
                self._outliving.add(key)
        task.add_done_callback(lambda _: self._ended(spec, key))

    def _ended(self, spec: HandlerSpec, key: tuple[Peer, int]) -> None:
        self._running.pop(key, None)
        self._outliving.discard(key)
        self._counts[spec.method] -= 1
        parked = self._parked.get(spec.method)
        if parked:
            self._start(spec, parked.popleft())

    async def _handle(self, spec: HandlerSpec, letter: Letter) -> None:
        envelope = letter.delivery.envelope
        if letter.deadline and letter.deadline <= asyncio.get_running_loop().time():
            self._refuse(letter.delivery, Kind.EXPIRED)
            return
        if envelope.key and envelope.key in self._replies:
            tag, body = self._replies[envelope.key]
            self._post(letter.delivery, Kind.OK, tag, body, ())
            return
        try:
            message = decode_body(spec.message, envelope.body, letter.delivery.buffers)
        except BadFrame as error:
            self._log.warning("bad_body", tag=envelope.tag, sender=envelope.sender, error=str(error))
            self._reply_error(letter.delivery, Kind.BAD_BODY, f"{envelope.tag}: {error}")
            return
        deadline, trace = current_deadline.set(letter.deadline), current_trace.set(envelope.trace)
        try:
            await self._run(spec, letter.delivery, message)
        finally:
            current_deadline.reset(deadline)
            current_trace.reset(trace)
            self.handled += 1

    async def _run(self, spec: HandlerSpec, delivery: Delivery, message: Any) -> None:
        try:
            result = await getattr(self._actor, spec.method)(message)
        except (AskFailed, BusError) as error:
            self._reply_error(delivery, Kind.ERROR, f"{self._name}: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it fails its ask, not the actor
            self._log.error("handler_failed", handler=spec.method, error=repr(error), exc_info=True)
            self._reply_error(delivery, Kind.ERROR, f"{self._name}: {type(error).__name__}: {error}")
        else:
            if delivery.envelope.kind == Kind.ASK:
                tag, body, buffers = encode_body(result)
                if delivery.envelope.key and not buffers:
                    self._remember(delivery.envelope.key, tag, body)
                self._post(delivery, Kind.OK, tag, body, buffers)

    def _remember(self, key: str, tag: str, body: msgspec.Raw) -> None:
        self._replies[key] = (tag, body)
        if len(self._replies) > REPLIES_KEPT:
            self._replies.popitem(last=False)

    def _cancel(self, delivery: Delivery) -> None:
        key = (delivery.peer, delivery.envelope.id)
        task = self._running.get(key)
        if task is not None:
            task.cancel()
            return
        letter = self._mailbox.cancel(*key)
        if letter is not None:
            self._consumed(letter.delivery)
        for parked in self._parked.values():
            for waiting in [w for w in parked if (w.delivery.peer, w.delivery.envelope.id) == key]:
                parked.remove(waiting)

    def _consumed(self, delivery: Delivery) -> None:
        """The letter left the queue: its credit goes back once enough has gathered."""
        grants = self._grants.get(delivery.peer)
        if grants is None:
            grants = self._grants[delivery.peer] = Grants()
        size = len(delivery.envelope.body) + sum(map(len, delivery.buffers))
        messages, size_bytes = grants.consumed(size)
        if messages:
            envelope = Envelope(Kind.CREDIT, size_bytes, self._name, 0, "", 0, b"", "", messages, NOTHING)
            self._transport.post(delivery.peer, envelope)

    def _refuse(self, delivery: Delivery, kind: Kind) -> None:
        if delivery.envelope.kind == Kind.ASK:
            self._post(delivery, kind, "", NOTHING, ())

    def _reply_error(self, delivery: Delivery, kind: Kind, text: str) -> None:
        if delivery.envelope.kind == Kind.ASK:
            self._post(delivery, kind, "", msgspec.Raw(msgspec.msgpack.encode(text)), ())

    def _post(self, delivery: Delivery, kind: Kind, tag: str, body: msgspec.Raw, buffers: Any) -> None:
        asked = delivery.envelope
        envelope = Envelope(kind, asked.id, self._name, self.incarnation, tag, 0, asked.trace, "", 0, body)
        self._transport.post(delivery.peer, envelope, buffers)

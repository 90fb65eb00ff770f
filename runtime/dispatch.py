"""The incoming half of a process: from arrived envelope to handler to reply.

A handler that takes one message at a time is awaited by the consumer itself: no task, no timer and no queue per message. Constants
stand for members of `EnvelopeKind`, because looking a member up costs as much as decoding an envelope.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from bus.codec import NOT_OURS, body_decoder, decode_body, encode_body
from bus.credit import Grants, charge
from bus.envelope import Envelope, EnvelopeKind
from bus.errors import AskFailed, BadFrame, BusError
from bus.message import Message
from bus.transport import Delivery, Peer, Transport
from runtime.actor import Actor
from runtime.beside import NOBODY, Beside, Handler, Spawn
from runtime.courier import NOTHING
from runtime.deadline import current_deadline, current_trace
from runtime.mailbox import Mailbox
from runtime.observe.waits import WaitView
from runtime.replies import Replies

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

BREATH = 256
"""Letters handled before the consumer lets the loop run: long enough to amortise, short enough to stay under 20 ms."""

_ASK, _TELL, _CANCEL, _OK, _CREDIT = (
    int(k) for k in (EnvelopeKind.ASK, EnvelopeKind.TELL, EnvelopeKind.CANCEL, EnvelopeKind.OK, EnvelopeKind.CREDIT)
)

SHOWN_S = 1.0
"""A handler that holds the mailbox up for longer is shown as a wait."""


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
        self._beside = Beside(self, name, spawn)
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
        return len(self._mailbox) + self._beside.num_parked

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
                letter.peer = NOBODY
        self._beside.forget(peer)

    def end(self) -> None:
        """The actor stops: nothing that waits is begun any more."""
        self._beside.end()

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
                    self._beside.admit(handler, delivery)
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
        return [WaitView(method, "", "", age_s, "", "handler", age_s, whole=True)] if age_s >= SHOWN_S else []

    def reply(self, delivery: Delivery, message: Message) -> None:
        """Answer an ask."""
        envelope = delivery.envelope
        try:
            tag, body, buffers = encode_body(message)
        except (BusError, TypeError) as error:
            self._log.error("bad_reply", tag=envelope.tag, error=str(error))
            self._reply_error(delivery, EnvelopeKind.ERROR, f"{self._name}: its reply cannot travel: {error}")
            return
        if envelope.key and not buffers:
            self._replies.keep(envelope.key, tag, body)
        self._post(delivery, _OK, tag, body, buffers)

    # -- one handler --------------------------------------------------------------------------------------------

    def open(self, handler: Handler, delivery: Delivery) -> Message | None:
        """The decoded message; None when it was answered or refused without running."""
        envelope = delivery.envelope
        if delivery.deadline and delivery.deadline <= self._time():
            self._refuse(delivery, EnvelopeKind.EXPIRED)
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
        if not self._beside.cancel(peer, ask_id) and (letter := self._mailbox.cancel(peer, ask_id)) is not None:
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
        self._transport.post(peer, Envelope(_CREDIT, size_bytes, target, 0, "", 0, b"", "", messages, NOTHING))

    def _refuse(self, delivery: Delivery, kind: EnvelopeKind) -> None:
        if delivery.envelope.kind == _ASK:
            self._post(delivery, kind, "", NOTHING, ())

    def _reply_error(self, delivery: Delivery, kind: EnvelopeKind, text: str) -> None:
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


def _size(delivery: Delivery) -> int:
    return len(delivery.envelope.body) + sum(map(len, delivery.buffers))


def _running_time() -> float:
    return asyncio.get_running_loop().time()

"""Handlers of one actor that run beside each other, each in a task: how many, for whom, and until when."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, Protocol

import msgspec

from bus.envelope import EnvelopeKind
from bus.message import Message
from bus.transport import Delivery, Peer
from runtime.actor import HandlerSpec
from runtime.deadline import current_deadline, current_trace

NOBODY = b""
"""The peer of letters whose link is gone: they are handled, and what is posted to it goes nowhere."""

_ASK = int(EnvelopeKind.ASK)


class Handler(NamedTuple):
    """A handler of the actor that lives here: what it declared, and the bound method."""

    spec: HandlerSpec
    run: Callable[[Any], Awaitable[Any]]
    decode: Callable[[msgspec.Raw], Message]


class Spawn(Protocol):
    def __call__(self, work: Coroutine[Any, Any, Any], *, name: str) -> "asyncio.Task[Any]": ...


class Desk(Protocol):
    """Where letters come from and answers go: the dispatcher."""

    handled: int

    def consumed(self, delivery: Delivery) -> None: ...
    def open(self, handler: Handler, delivery: Delivery) -> Message | None: ...
    def reply(self, delivery: Delivery, message: Message) -> None: ...
    def failed(self, handler: Handler, delivery: Delivery, error: Exception) -> None: ...


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


class Beside:
    """Each handler has its own limit; letters above it are parked, in order."""

    def __init__(self, desk: Desk, name: str, spawn: Spawn) -> None:
        self._desk, self._name, self._spawn = desk, name, spawn
        self._running: dict[tuple[Peer, int], _Running] = {}
        self._keyed: dict[str, _Running] = {}
        self._counts: dict[str, int] = {}
        self._parked: dict[str, deque[Delivery]] = {}

    @property
    def num_parked(self) -> int:
        return sum(map(len, self._parked.values()))

    def admit(self, handler: Handler, delivery: Delivery) -> None:
        """Start it, or park it: a parked letter keeps its sender's credit, which bounds how many there are."""
        if self._counts.get(handler.spec.method, 0) < handler.spec.concurrency:
            self._start(handler, delivery)
        else:
            self._parked.setdefault(handler.spec.method, deque()).append(delivery)

    def end(self) -> None:
        """The actor stops: what is parked is not begun any more."""
        self._parked.clear()

    def forget(self, peer: Peer) -> None:
        """The link is gone: what it asked for is cancelled where its handler does not outlive it."""
        for letter in (letter for parked in self._parked.values() for letter in parked):
            if letter.peer == peer:
                letter.peer = NOBODY
        for where in [where for where in self._running if where[0] == peer]:
            if self._running[where].outlives_asker:
                for delivery in self._running.pop(where).askers:
                    delivery.peer = NOBODY if _where(delivery) == where else delivery.peer
            else:
                self._left(where)

    def cancel(self, peer: Peer, ask_id: int) -> bool:
        """Whether the ask was here."""
        if (peer, ask_id) in self._running:
            self._left((peer, ask_id))
            return True
        for parked in self._parked.values():
            for letter in parked:
                if _where(letter) == (peer, ask_id):
                    parked.remove(letter)
                    self._desk.consumed(letter)
                    return True
        return False

    def _start(self, handler: Handler, delivery: Delivery) -> None:
        self._desk.consumed(delivery)
        envelope, spec = delivery.envelope, handler.spec
        where = _where(delivery)
        if envelope.key and envelope.key in self._keyed:
            self._running[where] = running = self._keyed[envelope.key]
            running.askers = [*(asker for asker in running.askers if asker.peer != NOBODY), delivery]
            return
        message = self._desk.open(handler, delivery)
        if message is None:
            return
        self._counts[spec.method] = self._counts.get(spec.method, 0) + 1
        running = _Running(delivery, outlives_asker=spec.outlives_asker)
        running.task = self._spawn(self._run(handler, running, delivery, message), name=f"{self._name}.{spec.method}")
        if envelope.kind == _ASK:
            self._running[where] = running
            if envelope.key:
                self._keyed[envelope.key] = running
        running.task.add_done_callback(lambda _: self._ended(handler, running))

    async def _run(self, handler: Handler, running: _Running, first: Delivery, message: Message) -> None:
        current_deadline.set(first.deadline)
        current_trace.set(first.envelope.trace)
        try:
            result = await handler.run(message)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it fails its ask, not the actor
            self._forget(running)
            for delivery in running.askers:
                self._desk.failed(handler, delivery, error)
        else:
            self._forget(running)
            for delivery in running.askers if first.envelope.kind == _ASK else ():
                self._desk.reply(delivery, result)
        finally:
            self._desk.handled += 1

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


def _where(delivery: Delivery) -> tuple[Peer, int]:
    return delivery.peer, delivery.envelope.id

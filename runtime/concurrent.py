"""Handlers of one actor that run at the same time, each in a task: how many, for whom, and until when."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, Protocol

import msgspec

from bus.codec import EnvelopeKind
from bus.link import Peer
from bus.message import Message
from bus.transport import Delivery
from runtime.actor import HandlerSpec
from runtime.courier import current_deadline, current_trace

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


class _Run(NamedTuple):
    """A handler at work on an ask."""

    delivery: Delivery
    outlives_asker: bool
    task: "asyncio.Task[Any]"


class ConcurrentHandlers:
    """Each handler has its own limit; letters above it are parked, in order."""

    def __init__(self, desk: Desk, name: str, spawn: Spawn) -> None:
        self._desk, self._name, self._spawn = desk, name, spawn
        self._running: dict[tuple[Peer, int], _Run] = {}
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
            run = self._running.pop(where)
            run.delivery.peer = NOBODY
            if not run.outlives_asker:
                run.task.cancel()

    def cancel(self, peer: Peer, ask_id: int) -> bool:
        """Whether the ask was here."""
        run = self._running.pop((peer, ask_id), None)
        if run is not None:
            run.task.cancel()
            return True
        for parked in self._parked.values():
            for letter in parked:
                if (letter.peer, letter.envelope.id) == (peer, ask_id):
                    parked.remove(letter)
                    self._desk.consumed(letter)
                    return True
        return False

    def _start(self, handler: Handler, delivery: Delivery) -> None:
        self._desk.consumed(delivery)
        message = self._desk.open(handler, delivery)
        if message is None:
            return
        spec = handler.spec
        self._counts[spec.method] = self._counts.get(spec.method, 0) + 1
        task = self._spawn(self._run(handler, delivery, message), name=f"{self._name}.{spec.method}")
        if delivery.envelope.kind == _ASK and delivery.peer != NOBODY:
            where = (delivery.peer, delivery.envelope.id)
            self._running[where] = _Run(delivery, spec.outlives_asker, task)
        task.add_done_callback(lambda _: self._ended(handler, delivery))

    async def _run(self, handler: Handler, delivery: Delivery, message: Message) -> None:
        current_deadline.set(delivery.deadline)
        current_trace.set(delivery.envelope.trace)
        try:
            result = await handler.run(message)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it fails its ask, not the actor
            self._desk.failed(handler, delivery, error)
        else:
            if delivery.envelope.kind == _ASK:
                self._desk.reply(delivery, result)
        finally:
            self._desk.handled += 1

    def _ended(self, handler: Handler, delivery: Delivery) -> None:
        self._running.pop((delivery.peer, delivery.envelope.id), None)
        method = handler.spec.method
        self._counts[method] -= 1
        parked = self._parked.get(method)
        while parked and self._counts[method] < handler.spec.concurrency:
            self._start(handler, parked.popleft())

"""References to actors: typed asks and tells, retried only where that is safe."""

import asyncio
from typing import Protocol, TypeVar

from bus.errors import Failed, NotSent, Refused, Unknown
from bus.message import Message, Request
from runtime.courier import Courier, budget
from runtime.observe.waits import Waits
from runtime.registry import ActorRecord

ReplyT = TypeVar("ReplyT")

BACKOFF_S = 0.05
"""First pause before asking again; doubles up to `BACKOFF_MAX_S`. A change of membership ends the pause early."""

BACKOFF_MAX_S = 1.0


class Resolver(Protocol):
    """Finds a ready actor for a target name or role."""

    waits: Waits

    def resolve(self, target: str) -> ActorRecord | None: ...
    async def change(self) -> None: ...


class Ref:
    """The actor called `target`, or any ready instance of that role. Cheap; hold it as long as you like."""

    def __init__(self, target: str, courier: Courier, resolver: Resolver) -> None:
        self.name = target
        self._courier = courier
        self._resolver = resolver

    async def ask(self, request: Request[ReplyT], *, timeout: float, retry: bool = True) -> ReplyT:
        """The reply, or a subclass of AskFailed before `timeout` (seconds) or the caller's own deadline, whichever is first.

        While no instance is ready the request waits. NotSent and Refused are retried until the deadline; Unknown too where
        the request is idempotent, which may run it again; `retry=False` leaves that to the caller. Cancelling the ask cancels the work.
        """
        loop, courier = asyncio.get_running_loop(), self._courier
        deadline = loop.time() + budget(timeout)
        pause = BACKOFF_S
        while True:
            record = self._resolver.resolve(self.name)
            if record is None:
                record = await self._find(deadline)
            try:
                reply = await courier.ask(record, request, deadline)
                if self._resolver.waits.refusals:
                    self._resolver.waits.answered(record.name)
                return reply
            except (Failed, NotSent, Refused, Unknown) as error:
                if not isinstance(error, Unknown):
                    self._resolver.waits.refused(record.name, type(request).__name__, str(error))
                if isinstance(error, Failed):
                    raise
                final = isinstance(error, Unknown) and not request.idempotent
                if final or not retry or loop.time() + pause >= deadline:
                    raise
            await self._pause(pause)
            pause = min(2 * pause, BACKOFF_MAX_S)

    async def tell(self, message: Message) -> None:
        """Send and forget; waits only for credit. Raises NotSent when no instance is ready."""
        record = self._resolver.resolve(self.name)
        if record is None:
            raise NotSent(f"no ready actor {self.name!r}")
        credit = self._courier.tell(record, message)
        if credit is not None:
            await credit

    async def _find(self, deadline: float) -> ActorRecord:
        record = None
        try:
            with self._resolver.waits.on(self.name, stage="ask", detail="none is ready", holder=self.name):
                async with asyncio.timeout_at(deadline):
                    while record is None:
                        await self._resolver.change()
                        record = self._resolver.resolve(self.name)
        except TimeoutError:
            raise NotSent(f"no ready actor {self.name!r} before the deadline") from None
        return record

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._resolver.change()
        except TimeoutError:
            pass

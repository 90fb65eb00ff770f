"""How the rest of the run knows that an actor lives: its leased record, renewed every beat, and its return after it was away."""

import asyncio
import os
import socket
from collections.abc import Awaitable
from typing import Literal

from bus.transport import Transport
from runtime.actor import Context
from runtime.courier import Courier
from runtime.dispatch import Dispatcher
from runtime.errors import ActorFailed
from runtime.registry import BEAT_S, LEASE_TTL_S, ActorRecord, Registry, State
from runtime.store.errors import StoreUnavailable

STOPPED_S = 4.0
"""A heartbeat that comes this late shows that the process was stopped or the Store away: others may have given this actor up."""

LEAVE_S = 5.0
"""Longer than a server takes that is started again at once."""


class Presence:
    """Keeps the record of the actor of `context` under `incarnation`, which changes only where its lease lapsed."""

    def __init__(
        self,
        context: Context,
        role: str,
        incarnation: int,
        registry: Registry,
        transport: Transport,
        courier: Courier,
        dispatch: Dispatcher,
    ) -> None:
        self.incarnation = incarnation
        self._name, self._role, self._node = context.name, role, context.node
        self._store, self._registry, self._transport = context.store, registry, transport
        self._courier, self._dispatch = courier, dispatch
        self._metrics, self._waits, self._log = context.metrics, context.waits, context.log
        self._state: State = "starting"
        self._renewing = asyncio.Lock()
        self._beat = 0
        self._cpu_share = self._cpu_s = 0.0

    async def begin(self) -> None:
        """Take the name. Raises ActorFailed where a newer incarnation has it."""
        await self._publish("holds")

    async def become(self, state: State) -> None:
        """Publish the new state, and announce it to everybody; who drains does not need the Store for it."""
        self._state = state
        if state == "ready":
            await self._announce("ready")
        else:
            await self._unless_away(self._announce("left"))

    async def end(self) -> None:
        """Leave for good; while the Store is away the lease lapses by itself."""
        await self._unless_away(self._withdraw())

    async def _announce(self, kind: Literal["ready", "left"]) -> None:
        await self._registry.publish(self._record())
        await self._registry.announce(kind, self._record())

    async def _withdraw(self) -> None:
        async with self._renewing:  # a renewal or a return under way would take the lease again
            self._state = "stopped"
            await self._registry.withdraw(self._record())

    async def _unless_away(self, told: Awaitable[None]) -> None:
        """A Store that is away keeps nobody from leaving: a job can be stopped without it."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await told
        except (StoreUnavailable, TimeoutError) as error:
            self._log.warning("left_without_store", error=str(error))

    async def beat(self) -> None:
        """Renew the record every beat until cancelled. Raises ActorFailed once a newer incarnation has taken the name."""
        handled, last = 0, asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(BEAT_S)
            self._metrics.gauge("actor/rate_s", (self._dispatch.handled - handled) / BEAT_S)
            handled = self._dispatch.handled
            if self._courier.unknown:
                self._metrics.gauge("bus/asks_unknown", self._courier.unknown)
            self._beat += 1
            self._measure_cpu()
            self._report_refusals()
            try:
                await self.renew()
                now = asyncio.get_running_loop().time()
                if now - last > STOPPED_S:
                    await self._rejoin(now - last)
                last = now
            except StoreUnavailable as error:
                self._log.warning("store_unavailable", error=str(error))

    async def _publish(self, how: str) -> None:
        if not await self._registry.publish(self._record()):
            raise ActorFailed(
                f"{self._name}: a newer incarnation {how} the name; this one ({self.incarnation}) must end"
            )

    async def renew(self) -> None:
        """Keep the lease for another while. Raises ActorFailed where a newer incarnation has taken the name."""
        async with self._renewing:
            if self._state != "stopped":
                await self._publish("took")

    async def _rejoin(self, silent_s: float) -> None:
        """Be seen again at once by whoever lost a link to this actor or saw its lease lapse, instead of at their next look round.

        Where the lease has lapsed the run has gone on without this actor. It comes back as a new incarnation: whatever was meant
        for the old one, or still says so, is refused. The renewal that was just answered may have reached the Store before the process
        was stopped, so another one shows that nobody has the name, between the draw and its use: whoever took the name before the
        draw is newer than the old incarnation, and whoever does after it is newer than the new one.
        """
        if silent_s > LEASE_TTL_S:
            async with self._renewing:
                if self._state == "stopped":
                    return
                drawn = await self._store.increment("incarnation", at_least=self.incarnation + 1)
                await self._publish("took")
                self.incarnation = self._dispatch.incarnation = drawn
                self._metrics.count("actor/registered_anew")
                await self._publish("took")
        self._log.warning("rejoined", silent_s=round(silent_s, 1), incarnation=self.incarnation)
        if self._state == "ready":
            self._beat += 1  # a suspect has to be seen to beat more than once
            await self._registry.announce("ready", self._record())
        await self._registry.relist()  # those it lost links to are seen again too

    def _report_refusals(self) -> None:
        """Once per beat, so that a flood of strangers is one line of log per second."""
        for reason, total, sentence in self._transport.refusals.news():
            self._metrics.gauge(f"bus/refused/{reason}", total)
            self._log.warning("refused", reason=reason, total=total, newest=sentence)

    def _measure_cpu(self) -> None:
        """Share of one core that this process used, smoothed over some five beats; nothing on virtual time."""
        if getattr(asyncio.get_running_loop(), "virtual", False):
            return
        used = os.times()
        spent = used.user + used.system - self._cpu_s
        self._cpu_share += 0.3 * (min(1.0, spent / BEAT_S) - self._cpu_share) if self._cpu_s else 0.0
        self._cpu_s = used.user + used.system

    def _record(self) -> ActorRecord:
        now = asyncio.get_running_loop().time()
        metrics = self._metrics.snapshot()
        return ActorRecord(
            self._name,
            self._role,
            self._transport.address,
            self.incarnation,
            os.getpid(),
            socket.gethostname(),
            self._state,
            beat=self._beat,
            progress=self._dispatch.handled,
            mailbox=self._dispatch.depth,
            rate_s=metrics.pop("actor/rate_s", 0.0),
            idle=min(metrics.pop("idle", 1.0), 1.0 - self._cpu_share),
            metrics=metrics,
            waits=self._waits.snapshot(now, [*self._courier.open_asks(now), *self._dispatch.at_work(now)]),
            stages=self._waits.stages(now),
            node=self._node,
            public=self._transport.public_address,
        )

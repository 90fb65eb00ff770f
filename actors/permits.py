"""Permits: the right of one job to compute on one pool in one phase, kept in the Store of the cluster that jobs share.

A permit is a lease. Its holder renews it; one that is killed or stands still loses it, and the next in line has it under a higher epoch.
The holder knows by its own clock, without asking anybody, when it can no longer be sure: a process that was stopped and goes on
computes nothing more. All that a pool's permit is lies in one record, changed by compare-and-set.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Literal, TypeVar

import msgspec

from planning.permits import PermitLine, Stand, granted, joined, kept, narrowed
from runtime.errors import RubatoError
from runtime.observe.figures import CLUSTER_STORE, OTHER_JOB
from runtime.observe.trace import wall_s
from runtime.store.errors import Fenced, Forgotten, StoreUnavailable
from runtime.store.store import Append, Fence, Store, WriteNumber

TTL_S = 6.0
"""A killed holder's pool is free after this long. Longer than a collection, a slow disk or a Redis that is started again."""

EVENTS_KEPT = 1000
"""Of each pool, for the monitor's picture of its last cycles."""

PAUSE_S = 1.0
"""Before a Store is asked again that has been away for longer than its own patience."""

TICKETS = "permits/tickets"
"""The counter of tickets and epochs: it gives no number twice, whatever the Store forgot."""

ResultT = TypeVar("ResultT")


class PermitLost(RubatoError):
    """The permit lapsed, or somebody else has it: what its holder computes must not count, and it has to stop."""


class PermitEvent(msgspec.Struct, frozen=True):
    """A change of a pool's line, as its stream `permits/{pool}` has it."""

    kind: Literal["waits", "holds", "narrows", "gone"]
    stand: Stand
    at_s: float
    """Wall clock, in seconds."""


class _Record(msgspec.Struct, frozen=True):
    line: PermitLine = PermitLine()
    num_events: int = 0


class Grant:
    """A permit while it is held."""

    def __init__(self, pool: str, stand: Stand) -> None:
        self.pool, self.job, self.phase = pool, stand.job, stand.phase
        self.epoch, self.ticket, self.places = stand.epoch, stand.ticket, stand.places
        self.lost = asyncio.Event()
        """Set once it is no longer held. See `is_held` for who has not been told yet."""
        self.until = 0.0
        """Loop time up to which it is held for certain."""

    @property
    def is_held(self) -> bool:
        """For certain: False from the moment on at which somebody else may hold it. Needs no Store."""
        if asyncio.get_running_loop().time() >= self.until:
            self.lost.set()
        return not self.lost.is_set()

    def check(self) -> None:
        """Raises PermitLost where it is not held for certain any more."""
        if not self.is_held:
            raise PermitLost(
                f"{self.job} no longer holds {self.pool} for {self.phase} (epoch {self.epoch}): it was not renewed in time. "
                "What was computed since is not to be used."
            )


class Permits:
    """The permits of a cluster's pools. `store` has the cluster's scope, not the job's."""

    def __init__(self, store: Store, *, ttl_s: float = TTL_S) -> None:
        self._store, self._ttl_s = store, ttl_s
        self._answered = math.inf
        """Loop time at which the Store answered last while a permit was waited for."""
        self._lines: dict[str, PermitLine] = {}

    def why(self, pool: str) -> tuple[str, str]:
        """Of a permit for `pool` that is waited for: the reason, and who holds it up."""
        if asyncio.get_running_loop().time() - self._answered > self._ttl_s:
            return f"the pool {pool}, whose cluster's Store does not answer", CLUSTER_STORE
        holder = self._lines.get(pool, PermitLine()).holder
        return f"the pool {pool}" + (f", which {holder.job} has to {holder.phase}" if holder else ""), OTHER_JOB

    async def lines(self) -> dict[str, PermitLine]:
        """Holder and queue of every pool, by name."""
        found = await self._store.scan("permits/line/")
        return {
            key.rpartition("/")[2]: msgspec.msgpack.decode(value, type=_Record).line for key, value in found.items()
        }

    async def events(self, pool: str, after: int = 0, *, wait_s: float = 0.0) -> list[tuple[int, PermitEvent]]:
        """What happened to the line of `pool` after index `after`, oldest first; with nothing, waits up to `wait_s` for it."""
        entries = await self._store.read(_stream(pool), after, wait_s=wait_s)
        return [(at, msgspec.msgpack.decode(value, type=PermitEvent)) for at, value in entries]

    @asynccontextmanager
    async def hold(self, pool: str, phase: str, job: str) -> AsyncGenerator[Grant]:
        """Wait in line for `pool`, and have it while the block runs. It is renewed beside the block.

        Who stops waiting leaves the line. A permit that is lost meanwhile ends nothing by itself: whoever computes looks at
        `grant.lost`, or calls `grant.check`. A job that asks anew for the same pool and phase takes over from who asked before, and
        from where that stood: it was started again. A block that is cancelled does not give the permit back, which lapses: what it began
        may still be running. A cluster that is away is waited for.
        """
        self._answered = asyncio.get_running_loop().time()
        stand = Stand(job, phase, await _patiently(lambda: self._store.increment(TICKETS)), wall_s())
        grant: Grant | None = None
        raised: Exception | None = None
        try:
            grant = await _patiently(lambda: self._wait(pool, stand))
            async with asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(self._renew(grant, stand), name=f"permit.{pool}")
                try:
                    yield grant
                except Exception as error:  # noqa: BLE001 - the caller's own; handed on below, as itself
                    raised = error
                finally:
                    renewing.cancel()
                    grant.lost.set()
        except asyncio.CancelledError:
            if grant is None:
                await self._leave(pool, stand)
            raise
        await self._leave(pool, stand)
        if raised is not None:
            raise raised

    async def narrow(self, grant: Grant, places: Iterable[int]) -> bool:
        """Keep only `places` of the pool: the next in line has the others. False, and no change, while somebody else has a tail there."""
        record = await self._change(grant.pool, lambda line: narrowed(line, grant.ticket, places))
        return record.line.tail is not None and record.line.tail.ticket == grant.ticket

    async def tail(self, pool: str, told: Callable[[frozenset[int]], None]) -> None:
        """Tell which places of `pool` the tail of a job before still has, until it has none."""
        while True:
            record = await _patiently(lambda: self._change(pool, lambda line: line))
            told(frozenset(record.line.tail.places if record.line.tail else ()))
            if record.line.tail is None:
                return
            await _patiently(partial(self._store.read, _stream(pool), record.num_events, wait_s=self._ttl_s / 3))

    async def follow(self, pool: str, epoch: int, place: int) -> Grant:
        """The permit that another process of the job holds, for who computes under it at `place` of the pool; see `watch`.

        Raises PermitLost where it is over.
        """
        grant = await self._follow(pool, epoch, place)
        if grant is None:
            raise PermitLost(f"epoch {epoch} does not hold {pool} now: what belongs to it is not computed any more.")
        return grant

    async def watch(self, grant: Grant, place: int) -> None:
        """Look after a permit that `follow` gave; returns once it is over."""

        async def again() -> float | None:
            now = await self._follow(grant.pool, grant.epoch, place)
            return now and now.until

        await self._keep(grant, again)

    async def _follow(self, pool: str, epoch: int, place: int) -> Grant | None:
        began = asyncio.get_running_loop().time()
        leases = {lease.token: lease for lease in (await self._store.leases(f"permits/{pool}/")).values()}
        stand = (await self._record(pool)).line.may_use(epoch, place)
        if stand is None or stand.ticket not in leases:
            return None
        grant = Grant(pool, stand)
        grant.until = began + leases[stand.ticket].remaining_s
        return grant

    async def _wait(self, pool: str, stand: Stand) -> Grant:
        """The pool's grant, when it is this one's turn."""
        loop = asyncio.get_running_loop()
        while True:
            until = loop.time() + self._ttl_s
            if not await self._alive(pool, stand):
                raise PermitLost(f"{stand.job} asks for {pool} to {stand.phase} twice: the newer one has it.")
            record = await self._change(pool, lambda line: joined(line, stand))
            self._answered, self._lines[pool] = loop.time(), record.line
            if (held := record.line.held(stand.ticket)) is not None:
                grant = Grant(pool, held)
                grant.until = until
                return grant
            # One that is dead says nothing: its lease is looked at as often as one's own is renewed.
            await self._store.read(_stream(pool), record.num_events, wait_s=self._ttl_s / 3)

    async def _alive(self, pool: str, stand: Stand) -> bool:
        """Renew the lease; False where a newer ask of the same job for the same has taken it."""
        return await self._store.lease(_lease(pool, stand), stand.ticket, b"", self._ttl_s)

    async def _renew(self, grant: Grant, stand: Stand) -> None:
        async def again() -> float | None:
            until = asyncio.get_running_loop().time() + self._ttl_s
            alive = await self._alive(grant.pool, stand)
            return until if alive and (await self._record(grant.pool)).line.holds(stand.ticket) else None

        await self._keep(grant, again)

    async def _keep(self, grant: Grant, again: Callable[[], Awaitable[float | None]]) -> None:
        """Until it is lost, or cancelled; `again` says up to when it is sure to be held, None where it is not."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout_at(grant.until):
                    await asyncio.sleep(self._ttl_s / 3)
                    until = await again()
                if until is None or loop.time() >= grant.until:
                    break
                grant.until = until
        except (TimeoutError, StoreUnavailable):
            pass  # nobody knows who has it now
        finally:
            grant.lost.set()

    async def _leave(self, pool: str, stand: Stand) -> None:
        """Give up the place, or the permit. A Store that is away lets the lease lapse instead."""
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(self._ttl_s):
                await self._store.release(_lease(pool, stand), stand.ticket)
                await self._change(pool, lambda line: kept(line, line.tickets - {stand.ticket}))

    async def _change(self, pool: str, change: Callable[[PermitLine], PermitLine]) -> _Record:
        """Let go who is dead, make the change, and serve who is first; tried again where somebody else was quicker."""
        key, fence = _key(pool), f"permits/{pool}"
        while True:
            before = await self._store.fenced(fence)
            record = await self._record(pool)
            alive = {lease.token for lease in (await self._store.leases(f"permits/{pool}/")).values()}
            changed = kept(change(record.line), alive)
            if changed == record.line and (changed.holder or not changed.queue):
                return record
            epoch = await self._store.increment(TICKETS)
            line = granted(changed, epoch, wall_s())
            events = _events(record.line, line)
            after = _Record(line, record.num_events + len(events))
            entries = [msgspec.msgpack.encode(event) for event in events]
            append = Append(_stream(pool), record.num_events + 1, entries, max(0, after.num_events - EVENTS_KEPT))
            value, turn = msgspec.msgpack.encode(after), WriteNumber(1, after=before)
            with suppress(Fenced, Forgotten):
                await self._store.write({key: value}, fence=Fence(fence, epoch), turn=turn, append=append)
                return after

    async def _record(self, pool: str) -> _Record:
        value = await self._store.get(_key(pool))
        return _Record() if value is None else msgspec.msgpack.decode(value, type=_Record)


async def _patiently(ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Until the Store answers."""
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            await asyncio.sleep(PAUSE_S)


def _events(before: PermitLine, after: PermitLine) -> list[PermitEvent]:
    """What changed, in the order in which it is told."""
    now_s = wall_s()
    old = {each.ticket: each for each in (before.holder, before.tail, *before.queue) if each is not None}
    gone = [PermitEvent("gone", each, now_s) for ticket, each in old.items() if ticket not in after.tickets]
    waits = [PermitEvent("waits", each, now_s) for each in after.queue if each.ticket not in old]
    narrows = [PermitEvent("narrows", after.tail, now_s)] if after.tail is not None and before.tail is None else []
    new = after.holder is not None and not before.holds(after.holder.ticket)
    holds = [PermitEvent("holds", after.holder, now_s)] if new and after.holder is not None else []
    return [*gone, *waits, *narrows, *holds]


def _key(pool: str) -> str:
    return f"permits/line/{pool}"


def _stream(pool: str) -> str:
    return f"permits/{pool}"


def _lease(pool: str, stand: Stand) -> str:
    return f"permits/{pool}/{stand.job}/{stand.phase}"

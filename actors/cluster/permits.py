"""Permits: the right of one job to compute on one pool in one phase, kept in the Store of the cluster that jobs share.

A permit is a lease. Its holder renews it; one that is killed or stands still loses it, and the next in line has it under a higher term.
The holder knows by its own clock, without a message, when it can no longer be sure: a process that was stopped and goes on
computes nothing more. All that a pool's permit is lies in one record, changed by compare-and-set.
"""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ContextDecorator, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec

from rubato.actors.cluster.pools import check_pool
from rubato.actors.config import ClusterSection
from rubato.planning.permits import PermitLine, Stand, granted, joined, kept, narrowed
from rubato.runtime.errors import ConfigError, LaunchError, RubatoError
from rubato.runtime.launch.shared import open_shared
from rubato.runtime.observe.figures import CLUSTER_STORE, OTHER_JOB
from rubato.runtime.observe.trace import wall_s
from rubato.runtime.store.store import Append, Fence, Fenced, Forgotten, Store, StoreUnavailable, WriteNumber

TTL_S = 6.0
"""A killed holder's pool is free after this long. Longer than a collection, a slow disk or a Redis that is started again."""

EVENTS_KEPT = 1000
"""Of each pool, for the monitor's picture of its last cycles."""

PAUSE_S = 1.0
"""Before a Store is asked again that has been away for longer than its own patience."""

LINES, TICKETS = "permits/line/", "permits/tickets"
"""Where the records are, by pool, and the counter of tickets and terms: it gives no number twice, whatever the Store forgot."""

ResultT = TypeVar("ResultT")


class PermitLost(RubatoError):
    """The permit lapsed, or another job has it: what its holder computes must not count, and it has to stop."""


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
        self.term, self.ticket, self.places = stand.term, stand.ticket, stand.places
        self.lost = asyncio.Event()
        """Set once it is no longer held. See `is_held` for who has not been told yet."""
        self.until = 0.0
        """Loop time up to which it is held for certain."""
        self.lapses = False
        """It is not given back at the end of the block: what computed under it may not have heard of that end."""

    @property
    def is_held(self) -> bool:
        """For certain: False from the moment on at which another job may hold it. Needs no Store."""
        if asyncio.get_running_loop().time() >= self.until:
            self.lost.set()
        return not self.lost.is_set()


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
        found = await self._store.scan(LINES)
        return {key.rpartition("/")[2]: msgspec.msgpack.decode(value, type=_Record).line for key, value in found.items()}

    async def events(self, pool: str, after: int = 0, *, wait_s: float = 0.0) -> list[tuple[int, PermitEvent]]:
        """What happened to the line of `pool` after index `after`, oldest first; with nothing, waits up to `wait_s` for it."""
        entries = await self._store.read(_stream(pool), after, wait_s=wait_s)
        return [(at, msgspec.msgpack.decode(value, type=PermitEvent)) for at, value in entries]

    @asynccontextmanager
    async def hold(self, pool: str, phase: str, job: str) -> AsyncGenerator[Grant]:
        """Wait in line for `pool`, and have it while the block runs. It is renewed beside the block.

        Who stops waiting leaves the line. A permit that is lost meanwhile ends nothing by itself: what computes looks at
        `grant.is_held`. A job that asks anew for the same pool and phase takes over from who asked before, and
        from where that stood: it was started again. A block that is cancelled does not give the permit back, which lapses: what it began
        may still be running; nor does one whose grant `lapses`. A cluster that is away is waited for.
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
        if not grant.lapses:
            await self._leave(pool, stand)
        if raised is not None:
            raise raised

    async def narrow(self, grant: Grant, places: Iterable[int]) -> bool:
        """Keep only `places` of the pool: the next in line has the others. False, and no change, while another job has a tail there."""
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

    async def follow(self, pool: str, term: int, place: int) -> Grant:
        """The permit that another process of the job holds, for who computes under it at `place` of the pool; see `watch`.

        Raises PermitLost where it is over.
        """
        began = asyncio.get_running_loop().time()
        leases = {lease.token: lease for lease in (await self._store.leases(f"permits/{pool}/")).values()}
        stand = (await self._record(pool)).line.may_use(term, place)
        if stand is None or stand.ticket not in leases:
            raise PermitLost(f"term {term} does not hold {pool} now: what belongs to it is not computed any more.")
        grant = Grant(pool, stand)
        grant.until = began + leases[stand.ticket].remaining_s
        return grant

    async def watch(self, grant: Grant, place: int) -> None:
        """Look after a permit that `follow` gave; returns once it is over."""

        async def again() -> float | None:
            with suppress(PermitLost):
                return (await self.follow(grant.pool, grant.term, place)).until
            return None

        await self._keep(grant, again)

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
            return until if alive and (await self._record(grant.pool)).line.held(stand.ticket) else None

        await self._keep(grant, again)

    async def _keep(self, grant: Grant, again: Callable[[], Awaitable[float | None]]) -> None:
        """Until it is lost, or cancelled; `again` says up to when it is sure to be held, None where it is not."""
        loop = asyncio.get_running_loop()
        try:
            with suppress(TimeoutError, StoreUnavailable):  # which leave open who has it now
                while True:
                    async with asyncio.timeout_at(grant.until):
                        await asyncio.sleep(self._ttl_s / 3)
                        until = await again()
                    if until is None or loop.time() >= grant.until:
                        break
                    grant.until = until
        finally:
            grant.lost.set()

    async def _leave(self, pool: str, stand: Stand) -> None:
        """Give up the place, or the permit. A Store that is away lets the lease lapse instead."""
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(self._ttl_s):
                await self._store.release(_lease(pool, stand), stand.ticket)
                await self._change(pool, lambda line: kept(line, line.tickets - {stand.ticket}))

    async def _change(self, pool: str, change: Callable[[PermitLine], PermitLine]) -> _Record:
        """Drop dead holders, make the change, and serve the first in line; tried again where another writer was quicker."""
        key, fence = LINES + pool, f"permits/{pool}"
        while True:
            before = await self._store.fenced(fence)
            record = await self._record(pool)
            alive = {lease.token for lease in (await self._store.leases(f"permits/{pool}/")).values()}
            changed = kept(change(record.line), alive)
            if changed == record.line and (changed.holder or not changed.queue):
                return record
            term = await self._store.increment(TICKETS)
            line = granted(changed, term, wall_s())
            events = _events(record.line, line)
            after = _Record(line, record.num_events + len(events))
            entries = [msgspec.msgpack.encode(event) for event in events]
            append = Append(_stream(pool), record.num_events + 1, entries, max(0, after.num_events - EVENTS_KEPT))
            value, turn = msgspec.msgpack.encode(after), WriteNumber(1, after=before)
            with suppress(Fenced, Forgotten):
                await self._store.write({key: value}, fence=Fence(fence, term), turn=turn, append=append)
                return after

    async def _record(self, pool: str) -> _Record:
        value = await self._store.get(LINES + pool)
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
    new = after.holder is not None and not before.held(after.holder.ticket)
    holds = [PermitEvent("holds", after.holder, now_s)] if new and after.holder is not None else []
    return [*gone, *waits, *narrows, *holds]


def _stream(pool: str) -> str:
    return f"permits/{pool}"


def _lease(pool: str, stand: Stand) -> str:
    return f"permits/{pool}/{stand.job}/{stand.phase}"


# -- the way to them ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def permits_of(section: ClusterSection) -> AsyncGenerator[Permits]:
    """The permits of the job's cluster. Raises ConfigError where there is none."""
    try:
        store = open_shared(Path(section.dir))
    except LaunchError as error:
        raise ConfigError(
            f"cluster.dir={section.dir} has no cluster that is up. Start it with: rubato cluster start CONFIG, or leave cluster.dir out. {error}"
        ) from None
    try:
        yield Permits(store)
    finally:
        await store.close()


class Phases:
    """The pools of the cluster in the folder `cluster`, for `job`. `pools` says on which pool each phase runs; one that it lacks runs on
    the pool of its own name. Pools of a cluster that places jobs are called as `rubato monitor CLUSTER` shows them.

    The permit is renewed by a thread of this object, so the program may compute without a pause. Used as a context manager, it lets go of
    the cluster at the end. Raises ConfigError where no cluster is up, or it has no such pool.
    """

    def __init__(self, cluster: str, job: str, pools: Mapping[str, str] | None = None) -> None:
        self._section, self._pools = ClusterSection(dir=cluster, job=job), pools or {}
        for phase in self._pools:
            self._pool(phase)
        self.loop: asyncio.AbstractEventLoop
        self._leaving: asyncio.Event
        reached = Future[Permits]()
        name, work = f"rubato.permits.{job}", self._serve(reached)
        self._thread = threading.Thread(target=asyncio.run, args=(work,), name=name, daemon=True)
        self._thread.start()
        self._permits = reached.result()

    def __call__(self, name: str) -> "Phase":
        """A context manager, and a decorator, that waits for the permit of the phase's pool, and gives it back.

        Raises ConfigError where the cluster has no such pool.
        """
        self._pool(name)
        return Phase(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join()

    def _pool(self, phase: str) -> str:
        pool = self._pools.get(phase, phase)
        check_pool(Path(self._section.dir), pool, f"the pool of phase {phase}")
        return pool

    async def _serve(self, reached: "Future[Permits]") -> None:
        self.loop, self._leaving = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with permits_of(self._section) as permits:
                reached.set_result(permits)
                await self._leaving.wait()
        except ConfigError as error:
            reached.set_exception(error)

    async def hold(self, phase: str, granted: "Future[Grant]", over: asyncio.Event) -> None:
        """Hold the phase's pool until it is `over`; runs on `loop`."""
        async with self._permits.hold(self._pool(phase), phase, self._section.job) as grant:
            granted.set_result(grant)
            await over.wait()


class Phase(ContextDecorator):
    """See `Phases`. The block gets its grant; where that is lost by the end of the block, PermitLost is raised there."""

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name

    def _recreate_cm(self) -> "Phase":
        return Phase(self._phases, self._name)

    def __enter__(self) -> Grant:
        granted, self._over, phases = Future[Grant](), asyncio.Event(), self._phases
        self._held = asyncio.run_coroutine_threadsafe(phases.hold(self._name, granted, self._over), phases.loop)
        self._grant = granted.result()
        return self._grant

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lost = self._grant.lost.is_set()
        self._phases.loop.call_soon_threadsafe(self._over.set)
        self._held.result()
        if lost and error is None:
            raise PermitLost(f"the permit of {self._grant.pool} was lost within the phase {self._name}: do that phase again.")

"""Jobs that take turns on the pools of a cluster (RollMux): the lease by which their actors have permits, and what each of them does by it.

The proxy holds the permit of the rollout pool from a step's first request until the last rollout of it has all that it asked for; engines
follow it, and sleep between. The trainer holds that of the training pool while it computes; between, model and optimiser are in host
memory. An actor whose permit is lost computes nothing more: it looks by its own clock.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rubato.actors import plugins
from rubato.actors.cluster.lease import ROLLOUT, TRAINING, WEIGHT_SYNC, GivenUp, GivenUpMidway, Held, Rests, advance
from rubato.actors.cluster.permits import TTL_S, Grant, PermitLost, Permits, permits_of
from rubato.actors.config import ClusterSection, engine_specs
from rubato.actors.engines.engine import SLEEP, Engine, EngineError, require
from rubato.actors.envs.rollout import RolloutHook
from rubato.actors.messages.cluster import Generating
from rubato.actors.messages.engines import SleepEngine, WakeEngine
from rubato.actors.messages.generation import GENERATION, Generate, NotItsTurn
from rubato.actors.messages.moves import Move
from rubato.actors.moves.orders import Orders
from rubato.actors.proxy.picker import ProxyHook
from rubato.bus.errors import AskFailed
from rubato.bus.message import Ack
from rubato.planning.consolidation import consolidate, is_tail
from rubato.planning.engine_info import EngineInfo
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import Config as Job
from rubato.runtime.registry import ActorRecord
from rubato.runtime.store.store import StoreUnavailable

if TYPE_CHECKING:
    from rubato.actors.engines.worker import EngineWorker
    from rubato.actors.envs.rollout import Rollout
    from rubato.actors.proxy.placement import ProxyRequest
    from rubato.actors.proxy.proxy import LLMProxy

ResultT = TypeVar("ResultT")

GOES_ON = {ROLLOUT: "The rollouts go on", TRAINING: "The step goes on", WEIGHT_SYNC: "The transfer begins anew"}
"""What a user hears of a phase whose permit was lost."""

ORDER_S = 120.0
"""Weights and KV cache of the largest engine are in host memory, or back, before that."""

COUNT_S = 5.0
"""For a proxy that hears how many rollouts play."""

PAUSE_S, COUNT_PAUSE_S = 1.0, 0.5
"""Before an engine that did not obey, or a proxy that did not answer, is asked again."""


def place_of(engine: str) -> int:
    """Its place on the pool: engines of all jobs there share the places by their number."""
    return int(engine.rpartition("-")[2])


# -- the lease --------------------------------------------------------------------------------------------------------


class PoolLease:
    """The ComputeLease of an actor: permits of the cluster's pools, which are reached by a task of the actor."""

    permits: Permits
    """Of the cluster, once `begin` has returned."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.section: ClusterSection = actor.config.cluster
        self.engine: Rests | None = None
        """What sleeps between two blocks."""
        self._leaving = asyncio.Event()

    async def begin(self, engine: Rests | None = None, leaving: asyncio.Event | None = None) -> None:
        """Reach the cluster, for as long as the actor runs. `engine` sleeps until the first permit."""
        self.engine, self._leaving = engine, leaving or self._leaving
        await self.rest()
        reached: asyncio.Future[Permits] = asyncio.get_running_loop().create_future()
        self.actor.spawn(self._reach(reached), name=f"{self.actor.name}.cluster")
        self.permits = await reached

    async def _reach(self, reached: "asyncio.Future[Permits]") -> None:
        async with permits_of(self.section) as permits:
            reached.set_result(permits)
            await asyncio.Event().wait()

    async def rest(self) -> None:
        """The hardware is another's, or will be: leave it."""
        if self.engine is not None:
            await self.actor.offload(self.engine.sleep)

    async def wake(self, grant: Grant) -> None:
        """The hardware is the engine's."""
        if self.engine is not None:
            began = asyncio.get_running_loop().time()
            await self.actor.offload(self.engine.wake)
            self.actor.log.info("woke", phase=grant.phase, term=grant.term, seconds=asyncio.get_running_loop().time() - began)

    @asynccontextmanager
    async def __call__(self, phase: str) -> AsyncGenerator["Turn"]:
        async with AsyncExitStack() as permit:
            turn = Turn(self, phase, permit)
            await turn.have()
            yield turn
            await self.rest()

    @asynccontextmanager
    async def hold(self, phase: str) -> AsyncGenerator[Grant]:
        """One permit of the phase's pool. The job stands in its line, or each actor of it where the phase has a line of its own."""
        actor, section = self.actor, self.section
        pool = {ROLLOUT: section.rollout_pool, TRAINING: section.training_pool}.get(phase, phase)
        own_line = phase == WEIGHT_SYNC
        what = "the link for weights" if own_line else f"the pool {pool}"
        member = f"{section.job}.{actor.name}" if own_line else section.job
        async with AsyncExitStack() as held:
            with actor.waits.on("permit", stage=phase, detail=what, blocks_actor=phase == TRAINING) as wait:
                wait.described_by(lambda: self.permits.why(pool))
                async with self.waiting():
                    grant = await held.enter_async_context(self.permits.hold(pool, phase, member))
            if not own_line:
                actor.log.info("permit_held", pool=pool, phase=phase, term=grant.term)
                held.enter_context(actor.trace.span(phase, "permit", pool=pool, term=grant.term))
            yield grant

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None]:
        scope = asyncio.timeout(None)
        watching = self.actor.spawn(_end(scope, self._leaving), name=f"{self.actor.name}.leaving")
        try:
            async with scope:
                yield
        except TimeoutError:
            raise GivenUp(f"{self.section.job} waits for no turn any more: it is being saved") from None
        finally:
            watching.cancel()

    def lost(self, grant: Grant) -> None:
        """The user hears of it."""
        self.actor.notice(f"the permit of {grant.pool} was lost: it was not renewed in time. {GOES_ON[grant.phase]} with the next one")


async def _end(scope: asyncio.Timeout, leaving: asyncio.Event) -> None:
    await leaving.wait()
    scope.reschedule(asyncio.get_running_loop().time())


class Turn(Held):
    """A phase on a pool, with the lease's engine awake. It goes on under another permit where its own was lost."""

    def __init__(self, lease: PoolLease, phase: str, permit: AsyncExitStack) -> None:
        super().__init__(lease.actor)
        self._lease, self._phase, self._permit = lease, phase, permit
        self._grant: Grant | None = None

    @property
    def is_held(self) -> bool:
        return self._grant is not None and self._grant.is_held

    @property
    def figures(self) -> Mapping[str, float]:
        return {"time/wait_for_permit": self.waited_s}

    async def compute(self, call: Callable[..., ResultT], *args: Any) -> ResultT:
        await self.have()
        return await super().compute(call, *args)

    async def run(self, parts: Generator[None, None, ResultT]) -> ResultT:
        """One by one, each of which begins under the permit."""

        def part() -> ResultT | None:
            return advance(parts)

        result = await self.compute(part)
        while result is None:
            try:
                result = await self.compute(part)
            except GivenUp as error:
                raise GivenUpMidway(f"{error}, in the middle of a step") from None
        return result

    async def have(self) -> None:
        """Return once the pool is held for certain, and the engine is awake. Raises GivenUp."""
        asked = asyncio.get_running_loop().time()
        while not self.is_held:
            if self._grant is not None:
                await self._lease.rest()
                await self._permit.aclose()
                self._lease.lost(self._grant)
            self._grant = await self._permit.enter_async_context(self._lease.hold(self._phase))
            if self.is_held:  # else nothing is to be woken
                await self._lease.wake(self._grant)
        self.waited_s += asyncio.get_running_loop().time() - asked


# -- proxy -------------------------------------------------------------------------------------------------------------


def check_cluster(job: Job) -> None:
    """Raises ValueError for a job that can't take turns with others."""
    if not job.section("cluster").dir:
        return
    if (num := job.actors["llm_proxy"].count) > 1:
        raise ValueError(f"actors.llm_proxy.count is {num}; with cluster.dir it must be 1: the proxy holds the permit of the job")
    if len(roles := engine_specs(job)) > 1:
        raise ValueError(
            f"actors has engines under {' and '.join(sorted(roles))}; with cluster.dir one role may have engines, whose places on the pool "
            "go by their numbers"
        )
    if job.has("staleness") and job.section("staleness").bound != 0:
        raise ValueError(
            "cluster.dir shares pools by phases, but with staleness.alpha above 0 rollouts never pause: set staleness.alpha=0, or leave "
            "cluster.dir out"
        )
    if job.has("engine") and (kind := job.section("engine").kind) in ("vllm", "vllm_server"):
        how = "for which engine.kind=vllm starts anew each time" if kind == "vllm" else f"which engine.kind={kind} can't"
        raise ValueError(f"cluster.dir has engines sleep between the job's turns, {how}: set engine.kind=torch, or leave cluster.dir out")


class RolloutPermit(ProxyHook):
    """Of one job. Its engines are awake only while it holds the permit; what they are asked for waits in them until then.

    Once few rollouts of the step are left and another job waits, their requests move together on the fewest engines, and the places of
    the others are the next job's.
    """

    def __init__(self, proxy: "LLMProxy") -> None:
        super().__init__(proxy)
        self._actor, self._lease = proxy, PoolLease(proxy)
        self._placement, self._running = proxy.placement, proxy.requests.running
        self._rollouts: dict[str, int] = {}
        """Under way, by manager."""
        self._most = 0
        """Under way at once since this grant."""
        self._awake: dict[str, int] = {}
        """Engines that are awake under this grant, with their incarnations."""
        self._told = set[str]()
        """Engines that were told to wake under it, and have not said since that they sleep."""
        self._whole = False
        """An engine did not say that it sleeps: this turn keeps the pool to its end."""
        self._kept: frozenset[str] | None = None
        """The engines of the tail, once the others are the next job's."""
        self._blocked = frozenset[int]()
        """Places that the tail of the job before still has."""
        self._changed = asyncio.Event()
        self.is_held = False

    @handler(concurrency=16)
    async def generating(self, message: Generating) -> Ack:
        """So many rollouts of one manager are under way."""
        self._rollouts[message.manager] = message.num
        self._most = max(self._most, self._num_rollouts)
        self._changed.set()
        return Ack()

    def peers_left(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._rollouts.pop(name, None)
        self._changed.set()

    def engine_changed(self, info: EngineInfo) -> None:
        """An engine that sleeps, on whatever order, lost sight of the permit: it is woken again while the permit is held."""
        if info.asleep and self._awake.pop(info.name, None) is not None:
            self._changed.set()

    def came_or_went(self) -> None:
        if len(self._running) <= 1:
            self._changed.set()

    def too_late(self, request: Generate, known: "ProxyRequest | None") -> NotItsTurn | None:
        return None if self.is_held else NotItsTurn(request.request_id, known.tokens if known else request.resumed)

    @property
    def _num_rollouts(self) -> int:
        return sum(self._rollouts.values())

    @property
    def _wanted(self) -> bool:
        return bool(self._num_rollouts or self._running)

    async def run(self) -> None:
        """Take turns with the other jobs until cancelled."""
        await self._lease.begin()
        while True:
            while not self._wanted:
                self._changed.clear()
                await self._changed.wait()
            async with self._lease.hold(ROLLOUT) as grant:
                await self._hold(self._lease.permits, grant)
            if grant.until <= asyncio.get_running_loop().time():
                self._lease.lost(grant)
            if grant.lapses:  # who asks anew before would go on in its place
                await asyncio.sleep(TTL_S)

    async def _hold(self, permits: Permits, grant: Grant) -> None:
        self._awake, self._told, self._most, self._whole, self.is_held = {}, set(), self._num_rollouts, False, True
        own = frozenset(name for name in self._actor.peers(GENERATION) if place_of(name) in grant.places)
        self._kept = own or None  # the proxy before this one may have had a tail
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(each) for each in (self._look_at_loss(grant), permits.tail(grant.pool, self._blocks))]
                await self._turn(permits, grant)
                for task in beside:
                    task.cancel()
        except Exception:
            await self._end(grant)
            raise
        finally:
            self.is_held = False
        await self._end(grant)

    async def _end(self, grant: Grant) -> None:
        """Of an engine that did not say that it sleeps, as one on a host that is cut off, the permit may last until it lapses."""
        await self._sleep(self._actor.peers(GENERATION))
        grant.lapses = bool(self._told)
        if grant.lapses:
            self._actor.log.warning("permit_lapses", pool=grant.pool, engines=sorted(self._told))

    async def _turn(self, permits: Permits, grant: Grant) -> None:
        """Until the step's rollouts are over, or the permit is lost."""
        while self._wanted and not grant.lost.is_set():
            self._changed.clear()
            await self._wake(grant)
            if self._kept is None and not self._whole and is_tail(self._num_rollouts, self._most) and len(self._awake) > 1:
                line = (await permits.lines())[grant.pool]
                if line.queue and line.tail is None:
                    await self._narrow(permits, grant)
            await self._changed.wait()

    async def _narrow(self, permits: Permits, grant: Grant) -> None:
        """Move what is left together, let the other engines sleep, and only then give their places away."""
        seats = [seat for name, seat in self._placement.seats.items() if name in self._awake]
        if len(seats) < 2:
            return
        plan = consolidate({seat.name: list(seat.requests) for seat in seats}, min(seat.info.num_slots for seat in seats))
        if len(plan.kept) == len(seats):
            return
        others = [seat for seat in seats if seat.name not in plan.kept]
        await self._move(plan.moves)
        self._whole = not await self._sleep(seat.name for seat in others)
        if self._whole:
            return
        # What came before the engines were known to sleep: new requests go to those that are awake.
        await self._move({request: min(plan.kept) for seat in others for request in seat.requests})
        kept = plan.kept | {seat.name for seat in others if seat.requests}
        self._kept = kept if await permits.narrow(grant, map(place_of, kept)) else None
        self._changed.set()
        self._actor.log.info("permit_narrowed", pool=grant.pool, engines=sorted(kept), why=plan.why)

    async def _move(self, moves: Mapping[str, str]) -> None:
        """One that is over by now, or does not move, is where it was."""
        mover = self.proxy.hook(plugins.MOVES)
        async with asyncio.TaskGroup() as tasks:
            for request, target in moves.items():
                tasks.create_task(mover.move(Move(request, target)))

    def _blocks(self, places: frozenset[int]) -> None:
        self._blocked = places
        self._changed.set()

    async def _look_at_loss(self, grant: Grant) -> None:
        await grant.lost.wait()
        self._changed.set()

    async def _wake(self, grant: Grant) -> None:
        """Those that are new, or whose places are free now."""
        names = self._actor.peers(GENERATION) if self._kept is None else sorted(self._kept)
        records = [self._actor.directory.find(name) for name in names if place_of(name) not in self._blocked]
        async with asyncio.TaskGroup() as tasks:
            for record in records:
                if record is not None and self._awake.get(record.name) != record.incarnation:
                    tasks.create_task(self._wake_one(record, grant))

    async def _wake_one(self, record: ActorRecord, grant: Grant) -> None:
        self._told.add(record.name)
        if await self._order(record.name, WakeEngine(grant.term)):
            self._awake[record.name] = record.incarnation
        else:
            await asyncio.sleep(PAUSE_S)
            self._changed.set()

    async def _sleep(self, names: Iterable[str]) -> bool:
        """A place goes to the next job once nothing of this one is left on it. Whether they all sleep."""
        async with asyncio.TaskGroup() as tasks:
            orders = {name: tasks.create_task(self._order(name, SleepEngine(level=2))) for name in names}
        self._told -= {name for name, order in orders.items() if order.result()}
        return all(order.result() for order in orders.values())

    async def _order(self, name: str, order: WakeEngine | SleepEngine) -> bool:
        try:
            await self._actor.ref(name).ask(order, timeout=ORDER_S, retry=False)
        except AskFailed as error:
            self._actor.log.warning("order_failed", engine=name, order=type(order).__name__, error=str(error))
            return False
        return True


# -- engines -----------------------------------------------------------------------------------------------------------


class PermittedOrders(Orders):
    """Orders of an engine in a shared pool. The proxy holds the permit; an engine that loses it falls asleep by itself."""

    def __init__(self, worker: "EngineWorker") -> None:
        super().__init__(worker)
        self._actor, self._lease = worker, cast("PoolLease", worker.lease)
        self._grant: Grant | None = None
        self._place = place_of(worker.name)

    async def begin(self, engine: Engine) -> None:
        """It sleeps until the first permit."""
        require(engine, SLEEP)
        await engine.sleep()

    async def _wake(self, engine: Engine, term: int) -> float:
        """Raises EngineError where the permit `term` is over, or the Store does not say whether it is."""
        pool = self._lease.section.rollout_pool
        try:
            grant = await self._lease.permits.follow(pool, term, self._place)
        except (PermitLost, StoreUnavailable) as error:
            raise EngineError(str(error)) from error
        if self._grant is None or self._grant.term != term or self._grant.lost.is_set():
            self._grant = grant
            self._actor.spawn(self._guard(engine, grant), name=f"{self._actor.name}.permit")
        seconds = await super()._wake(engine, term)
        self._actor.log.info("woke", phase=ROLLOUT, term=term, seconds=seconds)
        return seconds

    async def _guard(self, engine: Engine, grant: Grant) -> None:
        """Look after the permit until it is gone; an engine that still has it then sleeps at once."""
        await self._lease.permits.watch(grant, self._place)
        if self._grant is grant and not engine.load().asleep:
            self._actor.log.warning("permit_lost", pool=grant.pool, phase=ROLLOUT, term=grant.term)
            await engine.sleep()  # before any proxy is told, which may be out of reach
            await self.carry_out(SleepEngine())


# -- environment managers ----------------------------------------------------------------------------------------------


class GeneratingCount(RolloutHook):
    """The count, sent to every proxy, one message at a time, until the newest number is acknowledged."""

    def __init__(self, manager: Actor, playing: "Callable[[], Iterable[Rollout]]") -> None:
        super().__init__(manager, playing)
        self._num = 0
        self._changed = asyncio.Event()

    @contextmanager
    def turns(self) -> Generator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def peers_changed(self) -> None:
        """A new proxy has no number yet."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for proxy in self.manager.peers("llm_proxy"):
                try:
                    await self.manager.ref(proxy).ask(Generating(self.manager.name, self._num), timeout=COUNT_S)
                except AskFailed as error:
                    self.manager.log.warning("generating_not_told", proxy=proxy, error=str(error))
                    await asyncio.sleep(COUNT_PAUSE_S)
                    self._changed.set()

    def _change(self, by: int) -> None:
        self._num += by
        self._changed.set()

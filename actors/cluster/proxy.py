"""Holds the permit of the rollout pool that jobs share: from a step's first request until the last rollout of it has all that it asked for."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from actors import plugins
from actors.cluster import ROLLOUT, place_of
from actors.cluster.lease import PoolLease
from actors.config import engine_specs
from actors.messages.engines import GENERATION, SleepEngine, WakeEngine
from actors.messages.generation import Generate, NotItsTurn
from actors.messages.moves import Move
from actors.messages.phases import Generating
from actors.permits import Grant, Permits
from actors.proxy.hooks import ProxyHook
from actors.proxy.placement import ProxyRequest
from actors.proxy.proxy import LLMProxy
from bus.errors import AskFailed
from bus.message import Ack
from planning.consolidation import consolidate, is_tail
from planning.engine_info import EngineInfo
from runtime.actor import handler
from runtime.config import Config as Job
from runtime.registry import ActorRecord

ORDER_S = 120.0
"""Weights and KV cache of the largest engine are in host memory, or back, before that."""

PAUSE_S = 1.0
"""Before an engine that did not obey is asked again."""


def check_cluster(job: Job) -> None:
    """Raises ValueError for a job that can't take turns with others."""
    if not job.section("cluster").dir:
        return
    if (num := job.actors["llm_proxy"].count) > 1:
        raise ValueError(
            f"actors.llm_proxy.count is {num}; with cluster.dir it must be 1: the proxy holds the permit of the job"
        )
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
    if job.has("engine") and job.section("engine").kind == "vllm":
        raise ValueError(
            "cluster.dir has engines sleep between the job's turns, for which engine.kind=vllm starts anew each time: set engine.kind=torch, or leave "
            "cluster.dir out"
        )


class RolloutPermit(ProxyHook):
    """Of one job. Its engines are awake only while it holds the permit; what they are asked for waits in them until then.

    Once few rollouts of the step are left and another job waits, their requests move together on the fewest engines, and the places of
    the others are the next job's.
    """

    def __init__(self, proxy: LLMProxy) -> None:
        super().__init__(proxy)
        self._actor, self._lease = proxy, PoolLease(proxy, proxy.config.cluster)
        self._placement, self._running = proxy.placement, proxy.requests.running
        self._rollouts: dict[str, int] = {}
        """Under way, by manager."""
        self._most = 0
        """Under way at once since this grant."""
        self._awake: dict[str, int] = {}
        """Engines that are awake under this grant, with their incarnations."""
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
        """One that sleeps, whoever told it to, lost sight of the permit: it is woken again while the permit is held."""
        if info.asleep and self._awake.pop(info.name, None) is not None:
            self._changed.set()

    def came_or_went(self) -> None:
        if len(self._running) <= 1:
            self._changed.set()

    def too_late(self, request: Generate, known: ProxyRequest | None) -> NotItsTurn | None:
        if self.is_held:
            return None
        return NotItsTurn(request.request_id, known.tokens if known else request.resumed)

    @property
    def _num_rollouts(self) -> int:
        return sum(self._rollouts.values())

    @property
    def _wanted(self) -> bool:
        return bool(self._num_rollouts or self._running)

    async def run(self) -> None:
        """Take turns with the other jobs until cancelled."""
        self._lease.begin()
        while True:
            await self._next_change(lambda: self._wanted)
            async with self._lease(ROLLOUT) as grant:
                await self._hold(await self._lease.permits(), grant)
            if grant.until <= asyncio.get_running_loop().time():
                self._actor.notice(
                    f"the permit of {grant.pool} was lost: it was not renewed in time. The rollouts go on with the next one"
                )

    async def _hold(self, permits: Permits, grant: Grant) -> None:
        self._awake, self._most, self.is_held = {}, self._num_rollouts, True
        own = frozenset(name for name in self._actor.peers(GENERATION) if place_of(name) in grant.places)
        self._kept = own or None  # the proxy before this one may have had a tail
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._look_at_loss(grant)),
                    tasks.create_task(permits.tail(grant.pool, self._blocks)),
                ]
                await self._turn(permits, grant)
                for task in beside:
                    task.cancel()
        except Exception:
            await self._sleep(self._actor.peers(GENERATION))
            raise
        finally:
            self.is_held = False
        await self._sleep(self._actor.peers(GENERATION))

    async def _turn(self, permits: Permits, grant: Grant) -> None:
        """Until the step's rollouts are over, or the permit is lost."""
        while self._wanted and not grant.lost.is_set():
            self._changed.clear()
            await self._wake(grant)
            if self._kept is None and is_tail(self._num_rollouts, self._most) and len(self._awake) > 1:
                line = (await permits.lines())[grant.pool]
                if line.queue and line.tail is None:
                    await self._narrow(permits, grant)
            await self._changed.wait()

    async def _narrow(self, permits: Permits, grant: Grant) -> None:
        """Move what is left together, let the other engines sleep, and only then give their places away."""
        seats = [seat for name, seat in self._placement.seats.items() if name in self._awake]
        if len(seats) < 2:
            return
        plan = consolidate(
            {seat.name: list(seat.requests) for seat in seats}, min(seat.info.num_slots for seat in seats)
        )
        if len(plan.kept) == len(seats):
            return
        others = [seat for seat in seats if seat.name not in plan.kept]
        await self._move(plan.moves)
        await self._sleep(seat.name for seat in others)
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

    def _sleeping(self) -> list[ActorRecord]:
        """Engines that are to be woken: they are new, or their places are free now."""
        names = self._actor.peers(GENERATION) if self._kept is None else sorted(self._kept)
        records = (self._actor.directory.find(name) for name in names if place_of(name) not in self._blocked)
        return [r for r in records if r is not None and self._awake.get(r.name) != r.incarnation]

    async def _wake(self, grant: Grant) -> None:
        async with asyncio.TaskGroup() as tasks:
            for record in self._sleeping():
                tasks.create_task(self._wake_one(record, grant))

    async def _wake_one(self, record: ActorRecord, grant: Grant) -> None:
        if await self._order(record.name, WakeEngine(grant.epoch)):
            self._awake[record.name] = record.incarnation
        else:
            await asyncio.sleep(PAUSE_S)
            self._changed.set()

    async def _sleep(self, names: Iterable[str]) -> None:
        """A place goes to the next job once nothing of this one is left on it."""
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(self._order(name, SleepEngine(level=2)))

    async def _order(self, name: str, order: WakeEngine | SleepEngine) -> bool:
        try:
            await self._actor.ref(name).ask(order, timeout=ORDER_S)
        except AskFailed as error:
            self._actor.log.warning("order_failed", engine=name, order=type(order).__name__, error=str(error))
            return False
        return True

    async def _next_change(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

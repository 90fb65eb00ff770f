"""Orchestrator: moves requests off engines that would be last, and merges and splits engines as the load changes. It only carries out plans.

It keeps nothing that counts: who runs where and which engine sleeps is read from proxies at every look, so that one which was killed in the
middle of anything is followed by one that goes on from what there is. Orders bear its incarnation, and proxies and engines refuse those of
an earlier one.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial

from rubato.actors.catalog import shape_of
from rubato.actors.config import ModelSection
from rubato.actors.messages.orchestration import RequestSeen, Surveyed
from rubato.actors.orchestrator.circuits import SwitchCircuits
from rubato.actors.orchestrator.fleet import GpuGroup, Speeds, asleep_with, cache_traffic, carried, expected, instances, load, servers
from rubato.actors.orchestrator.lengths import Lengths, Underway, underway
from rubato.actors.orchestrator.section import REBALANCE, SWITCH, OrchestratorSection, check_orchestrator
from rubato.actors.orchestrator.switches import (
    CommandFailed,
    Commands,
    Reshape,
    Shape,
    Superseded,
    all_tried,
    as_merge,
    as_split,
    as_step,
    reset,
)
from rubato.planning.demand import Demand
from rubato.planning.engine_info import EngineProfile
from rubato.planning.forecast import Remaining
from rubato.planning.language_model import ModelSpec
from rubato.planning.makespan import Load
from rubato.planning.parallelism import HORIZON, coming, within
from rubato.planning.rebalance import Rebalance, rebalance
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig
from rubato.runtime.config import Config as Job
from rubato.runtime.kernel import Kernel
from rubato.runtime.observe.figures import Metrics

REST = 10
"""Periods of rebalancing in which a request moves once at most."""

SETTLED = 2
"""Periods of switching that an engine is left alone after a change."""

GROWN = 2
"""A step is planned again once it has so many times the requests that its plan knew."""


class Orchestrator(Actor):
    """One loop. Where two orchestrators are at work, for a moment after a cut, the earlier one is refused and ends its loop."""

    role = "orchestrator"
    most = 1
    most_moves = 8
    """Requests that move in one period."""
    needs = ("engine", "llm_proxy")
    drain_order = 10

    class Config(ActorConfig):
        orchestrator: OrchestratorSection = OrchestratorSection()
        model: ModelSection = ModelSection()

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        check_orchestrator(job)

    @classmethod
    def starts(cls, config: Config) -> bool:
        return config.orchestrator.enabled

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = config.orchestrator
        self._planners = frozenset(self._section.planners)
        self._commands, self._circuits = Commands(self), SwitchCircuits(self)
        self._lengths = Lengths()
        self._foresight = Foresight(self.metrics)
        self._speeds = Speeds(self._section.degrees, lambda: self._own_shape)
        self._moved_s: dict[str, float] = {}
        self._changed_s: dict[str, float] = {}
        self._looked_s = 0.0
        self._planned_for = 0
        """Requests of the running step that its plan knew."""
        self._turn = asyncio.Lock()
        """Held while something is looked at and changed."""

    async def on_start(self) -> None:
        self.spawn(self._keep_on(), name=f"{self.name}.plan")

    async def on_drain(self) -> None:
        """Nothing is begun any more; engines are left as they are."""
        self._planners = frozenset()

    async def _keep_on(self) -> None:
        while True:
            await asyncio.sleep(self._section.interval_s)
            if not self._planners:
                continue
            try:
                async with self._turn:
                    await self._tend()
            except Superseded as error:
                self.log.warning("superseded", error=str(error))
                return
            except CommandFailed as error:
                self.log.warning("command_failed", error=str(error))

    async def _tend(self) -> None:
        """One look, and what follows from it: putting right, or a switch, or moves."""
        surveyed, whose = await self._commands.look()
        running = underway(surveyed)
        if self._lengths.note(surveyed.ended, running):
            self._planned_for = 0
        found = servers(surveyed.engines, self._place)
        if not found:
            return
        if not running:
            self._foresight.over(self._now(), found[0].profile.scale)
        if broken := [server for server in found if not server.adds_up]:
            await all_tried(self._put_right(server) for server in broken)
            return
        if stranded := asleep_with(found, surveyed.requests):
            self.log.warning("requests_on_sleepers", requests=sorted(stranded))
            await self._commands.move(stranded.items(), whose)
            return
        if await self._begin_step(found, surveyed, running) or await self._switch(found, surveyed, running):
            return
        if REBALANCE in self._planners and running:
            await self._rebalance(found, surveyed, running, whose)

    @cached_property
    def _own_shape(self) -> ModelSpec:
        """Of the model that engines compute."""
        return shape_of(self.run.folder / self.config.model.path)

    def _place(self, engine: str) -> str:
        """Host and pool; "" while it is not in the directory, though the proxy, whose links are others, may still have it."""
        record = self.directory.find(engine)
        return f"{record.host} {record.pool}" if record is not None else ""

    def _pool(self, engine: str) -> str:
        record = self.directory.find(engine)
        return record.pool if record is not None else ""

    async def _put_right(self, server: GpuGroup) -> None:
        """Repair a server whose degrees do not add up, since an actor died in a switch: its engines are as at their start, and awake."""
        before = {each.name: Shape(each.degree, each.asleep) for each in server.engines}
        text = ", ".join(f"{each.name} {'asleep' if each.asleep else f'of degree {each.degree}'}" for each in server.engines)
        self.log.warning("server_put_right", engines=text, degree=server.profile.degree)
        await self._commands.shape(reset(server.engines, server.profile.degree), before)
        self._changed(before)

    # -- moves -----------------------------------------------------------------------------------------------------

    async def _rebalance(
        self, found: Sequence[GpuGroup], surveyed: Surveyed, running: Sequence[Underway], whose: Mapping[str, str]
    ) -> None:
        """Between engines of the same pool, hardware and model: what a pool's requests may use is its own."""
        left, away_s = self._lengths.left(running)
        still = {each.request_id for each in surveyed.requests if each.moves}
        now = self._now()
        self._moved_s = {name: at for name, at in self._moved_s.items() if name in whose} | dict.fromkeys(still, now)
        fleets: dict[tuple[str, EngineProfile], list[GpuGroup]] = defaultdict(list)
        for server in found:
            fleets[self._pool(server.engines[0].name), server.profile].append(server)
        plans: list[Rebalance] = []
        caches: list[Demand] = []
        num_requests = sum(not each.request for each in running)
        for (_, profile), alike in sorted(fleets.items()):
            fleet = instances(alike, surveyed.requests, lambda each, scale=profile.scale: _load(each, left, scale))
            speeds = {degree: speed for server in alike for degree, speed in self._speeds.of(server).items()}
            planned = partial(rebalance, fleet, speeds, now_s=now, moved_s=self._moved_s, most=self.most_moves)
            plan = await self.offload(partial(planned, interval_s=REST * self._section.interval_s))
            plans.append(plan)
            carried = {each.request: each.target for each in plan.moves if each.carry.with_cache}
            caches += cache_traffic(alike[0], surveyed.requests, carried, self._speeds.model(profile))
            num_requests += sum(len(each.loads) for each in fleet)
        away_s /= found[0].profile.scale if found else 1.0
        self.metrics.gauge("orchestrator/remaining_s", max((away_s, *(plan.before_s for plan in plans))))
        self._foresight.expect(num_requests, max((away_s, *(plan.after_s for plan in plans))), now)
        await self._move([plan for plan in plans if plan.moves], caches, whose)

    async def _move(self, plans: Sequence[Rebalance], caches: Sequence[Demand], whose: Mapping[str, str]) -> None:
        """Under circuits for their caches, where the fabric has any to give."""
        moves = [each for plan in plans for each in plan.moves]
        for plan in plans:
            self.log.info("rebalancing", why=plan.why)
        async with self._circuits.lit([f"rebalancing by {len(moves)} moves"], caches):
            moved = await self._commands.move(((each.request, each.target) for each in moves), whose)
        self._moved_s |= dict.fromkeys(moved, self._now())
        if plans:
            self.metrics.count("orchestrator/moves", len(moved))
            self.log.info("rebalanced", moved=len(moved))

    # -- a step's beginning ----------------------------------------------------------------------------------------

    async def _begin_step(self, found: Sequence[GpuGroup], surveyed: Surveyed, running: Sequence[Underway]) -> bool:
        """Whether something was changed, or tried. Degrees are planned once the step's requests are there, for the lengths that are due."""
        if SWITCH not in self._planners or len(surveyed.requests) < max(1, GROWN * self._planned_for):
            return False
        self._planned_for = len(surveyed.requests)
        lengths = self._lengths.drawn(running)
        if lengths is None:
            return False
        changes: dict[GpuGroup, Reshape] = {}
        for server, requests in expected(found, surveyed.requests).items():
            if requests and server.settled and (change := await self._step_plan(server, requests, lengths)):
                changes[server] = change
        return await self._carry_out(changes, surveyed)

    async def _step_plan(self, server: GpuGroup, requests: Sequence[RequestSeen], lengths: Mapping[str, Remaining]) -> Reshape | None:
        loaded = partial(_load, left=lengths, scale=server.profile.scale)
        loads, current = [*map(loaded, requests)], instances([server], requests, loaded)
        planned = partial(coming, loads, server.gpus, self._speeds.of(server), current, merges=True, steps=HORIZON)
        try:
            plan = await self.offload(partial(planned, drawn=not self._lengths.known))
        except ValueError as error:
            self.log.warning("step_not_planned", error=str(error))
            return None
        self.log.info("step_planned", why=plan.why, requests=len(loads))
        here = {each.request_id for each in requests if each.engine}
        return as_step(server, plan, here) if plan.switched else None

    # -- switches --------------------------------------------------------------------------------------------------

    async def _switch(self, found: Sequence[GpuGroup], surveyed: Surveyed, running: Sequence[Underway]) -> bool:
        """Whether something was changed, or tried; nothing is while no length is known, for it would be paid with certainty."""
        soon = self._now() - self._looked_s < self._section.switch_s
        if SWITCH not in self._planners or not surveyed.requests or soon:
            return False
        lengths = self._lengths.drawn(running)
        if lengths is None:
            return False
        self._looked_s = self._now()
        planned = {server: await self._change(server, surveyed, lengths) for server in found if server.settled}
        return await self._carry_out({server: change for server, change in planned.items() if change}, surveyed)

    async def _change(self, server: GpuGroup, surveyed: Surveyed, left: Mapping[str, Remaining]) -> Reshape | None:
        """Time in environments is left out: it is the same at every degree, and a merge that waits for it never comes."""
        since = self._now() - SETTLED * self._section.switch_s
        settling = {name for name, at in self._changed_s.items() if at > since}
        fleet = instances([server], surveyed.requests, lambda each: load(each, left[each.request_id].tokens), settling)
        plan = await self.offload(within, fleet, self._speeds.of(server))
        if not plan.changes:
            return None
        first = plan.changes[0]
        return as_merge(server, first) if len(first.parts) == 1 else as_split(server, first)

    async def _carry_out(self, changes: Mapping[GpuGroup, Reshape], surveyed: Surveyed) -> bool:
        """All at once, under circuits for all of their caches. Returns whether there are any; what fails is told by the change."""
        if not changes:
            return False
        caches = [each for server, change in changes.items() for each in self._caches(server, change, surveyed)]
        async with self._circuits.lit([change.name for change in changes.values()], caches):
            await all_tried(self._reshape(server, change) for server, change in changes.items())
        return True

    def _caches(self, server: GpuGroup, change: Reshape, surveyed: Surveyed) -> tuple[Demand, ...]:
        """Bytes of the caches that the change moves; what is computed again moves none."""
        degrees = {each.name: each.degree for each in server.engines}
        to = carried(surveyed.requests, change.requests, degrees, self._speeds.of(server))
        return cache_traffic(server, surveyed.requests, to, self._speeds.model(server.profile))

    async def _reshape(self, server: GpuGroup, change: Reshape) -> None:
        self._changed(change.wanted)
        began = self._now()
        self.log.info("switching", switch=change.name, why=change.why)
        with self.waits.on(change.name, stage="switch", detail=change.why, holder=min(change.wanted)):
            try:
                moved = await self._commands.reshape(change, server.engines)
            except Superseded:
                raise
            except CommandFailed as error:
                self.log.warning("switch_failed", switch=change.name, error=str(error))
                return
            finally:
                self._changed(change.wanted)
        self._moved_s |= dict.fromkeys(moved, self._now())
        self.metrics.count("orchestrator/switches")
        self.metrics.count("orchestrator/moves", len(moved))
        self.log.info("switched", switch=change.name, why=change.why, moved=len(moved), seconds=round(self._now() - began, 1))
        self.notice(change.why)

    def _changed(self, engines: Collection[str]) -> None:
        self._changed_s |= dict.fromkeys(engines, self._now())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _load(request: RequestSeen, left: Mapping[str, Remaining], scale: float) -> Load:
    """In seconds of the hardware, each of which lasts `scale` here."""
    tokens, env_s, _ = left[request.request_id]
    return load(request, tokens, env_s / scale)


class Foresight:
    """Of one orchestrator. A load begins with its first request and is over once none is left."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._num, self._at_s, self._forecast_s = 0, 0.0, 0.0

    def expect(self, num_requests: int, forecast_s: float, now_s: float) -> None:
        """All `num_requests` are through in `forecast_s`. Of a load, the forecast counts that was made when most of it ran."""
        if num_requests > self._num:
            self._num, self._at_s, self._forecast_s = num_requests, now_s, forecast_s

    def over(self, now_s: float, scale: float) -> None:
        """Nothing runs any more; the fact is late by as much as this is. `scale`: seconds here for each of the hardware that is forecast."""
        if self._num:
            self._num = 0
            self._metrics.gauge("orchestrator/forecast_s", self._forecast_s)
            self._metrics.gauge("orchestrator/took_s", (now_s - self._at_s) / scale)

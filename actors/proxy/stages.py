"""Prefill apart from decode in the proxy: which engines serve which stage of a request, and the planner that lets them change."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from actors.config import engine_specs
from planning.prefill_decode import StageWatch, balance, stages
from planning.routing import EngineView, all_asleep
from runtime.actor import Actor
from runtime.config import ActorSpec
from runtime.config import Config as Job

if TYPE_CHECKING:
    from actors.proxy.placement import EngineSeat, ProxyRequest

PREFILL, DECODE, BOTH = "prefill", "decode", "both"

OTHER: Final = {PREFILL: DECODE, DECODE: PREFILL}

SERVES: Final = "engine.serves"

WITH_CACHE: Final = ("torch", "scripted")
"""Kinds of engine whose KV cache another engine takes up."""


def check_stages(job: Job) -> None:
    """Compare what pools' engines serve. Raises ValueError with one sentence."""
    if not job.has("engine"):
        return
    given = job.section("engine")
    pools = [pool for spec in engine_specs(job).values() for pool in _pools_of(spec, given.serves)]
    serves = {pool.serves for pool in pools}
    if serves == {BOTH}:
        if job.has("proxy") and job.section("proxy").balance == "auto":
            raise ValueError(
                "proxy.balance is auto, but every engine both prefills and decodes: set engine.serves in the pools of actors.engine"
            )
        return
    for stage, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
        if serves == {stage}:
            raise ValueError(f"engine.serves is {stage} for every engine, so none is there to {other}: add a pool")
        able = [pool for pool in pools if pool.serves in (other, BOTH)]
        joined = bool(job.bus.host)  # other hosts may bring what the pool has
        if able and not joined and not any(pool.engines for pool in able):
            raise ValueError(
                f"pool {able[0].name} has count 0, so no engine is there to {other}: raise its count, or set bus.host if other "
                "hosts are to bring them"
            )
    if given.kind == "vllm":
        raise ValueError(
            f"engine.serves is {' and '.join(sorted(serves))}, but engine.kind={given.kind} takes no KV cache from another engine: "
            f"set engine.kind={' or '.join(WITH_CACHE)}"
        )
    if job.has("affinity") and job.section("affinity"):
        raise ValueError("affinity and engine.serves both say which engines a request may use: leave one of them out")


class _Pool(NamedTuple):
    """Engines of one role and pool; without pools, all of the role under an empty name."""

    name: str
    engines: int
    serves: str


def _pools_of(spec: ActorSpec, serves: str) -> list[_Pool]:
    if not spec.pools:
        return [_Pool("", spec.count, serves)]
    return [_Pool(name, pool.count, pool.set.get(SERVES, serves)) for name, pool in spec.pools.items()]


class Stages:
    """Engines by stage. Where all do both, it costs a look at `apart`."""

    def __init__(self, actor: Actor, period_s: float) -> None:
        """`period_s` is that of the planner; 0 leaves engines at what they were started for."""
        self._actor = actor
        self._period_s = period_s
        self._serves: dict[str, str] = {}
        self._views: dict[str, dict[str, EngineView]] = {PREFILL: {}, DECODE: {}}
        self._watches = {PREFILL: StageWatch(), DECODE: StageWatch()}
        self._seats: dict[str, EngineSeat] = {}
        self._busy: dict[str, tuple[set[str], float]] = {}
        """Engine → requests that it has to prefill, and since when it has any."""
        self._elsewhere: set[str] = set()
        """Stages whose requests fell back to engines of the other one."""
        self._balancing: asyncio.Task[None] | None = None
        self.apart = False
        """Some engine serves one stage only."""
        self.on_change: Callable[[EngineSeat], None] = _nothing
        """Called where the router has to look again."""

    # -- engines ----------------------------------------------------------------------------------------------------

    def join(self, seat: "EngineSeat") -> None:
        """An engine came; one that comes back serves what it was started for."""
        self._serves[seat.name] = seat.serves
        self._seats[seat.name] = seat
        self.apart = any(serves != BOTH for serves in self._serves.values())
        if self.apart and self._period_s and self._balancing is None:
            self._balancing = self._actor.spawn(self._balance(), name=f"{self._actor.name}.balance")

    def forget(self, name: str) -> None:
        """The engine left."""
        self._serves.pop(name, None)
        self._seats.pop(name, None)
        self._busy.pop(name, None)
        for views in self._views.values():
            views.pop(name, None)
        self.apart = any(serves != BOTH for serves in self._serves.values())

    def see(self, view: EngineView) -> None:
        """What the router looks at of an engine, new or changed."""
        serves = self._serves.get(view.name, BOTH)
        for stage, views in self._views.items():
            if serves in (stage, BOTH):
                views[view.name] = view
            else:
                views.pop(view.name, None)
            if stage in self._elsewhere and any(not each.asleep and not each.held for each in views.values()):
                self._elsewhere.discard(stage)

    # -- requests ---------------------------------------------------------------------------------------------------

    def usable(self, shared: "ProxyRequest", views: Mapping[str, EngineView]) -> Collection[EngineView]:
        """The engines of the request's stage; all of them where each of those is gone, asleep, or held at an older version for an evaluation."""
        oldest, own = shared.request.min_version, self._views[shared.stage].values()
        if any(not view.asleep and (not view.held or view.version >= oldest) for view in own):
            return own
        self._fell_back(shared.stage)
        return views.values()

    def hands_over(self, shared: "ProxyRequest", engine: str) -> bool:
        """Whether `engine` only prefills the request, for another to decode."""
        if not self.apart or shared.stage != PREFILL or shared.request.exact or self._serves.get(engine) != PREFILL:
            return False
        awake = any(not view.asleep for view in self._views[DECODE].values())
        if not awake:
            self._fell_back(DECODE)
        return awake

    def _fell_back(self, stage: str) -> None:
        """Told once, until an engine of the stage is there again; where no other is awake, nothing goes elsewhere."""
        others = self._views[OTHER[stage]].values()
        if stage in self._elsewhere or not any(not view.asleep for view in others):
            return
        self._elsewhere.add(stage)
        own = self._views[stage].values()
        if not own:
            why = f"no engine that {stage}s is up"
        elif all_asleep(own):
            why = f"the engines that {stage} are asleep"
        else:
            why = f"the engines that {stage} are held at an older version for an evaluation"
        self._actor.notice(f"requests to {stage} go to engines that {OTHER[stage]} for now: {why}")
        self._actor.log.info("stage_fell_back", stage=stage, why=why)

    def seated(self, shared: "ProxyRequest", engine: str) -> None:
        shared.seated = now = self._now()
        shared.seated_for = shared.stage
        if shared.stage == PREFILL:
            has, since = self._busy.get(engine, (set[str](), now))
            self._busy[engine] = (has, since if has else now)
            has.add(shared.request.request_id)

    def left(self, shared: "ProxyRequest", engine: str) -> None:
        """The request left a seat there, done with the stage or not; one that moved goes on in its other seat."""
        now, request_id = self._now(), shared.request.request_id
        if shared.engine == engine:
            watch = self._watches[shared.seated_for]
            watch.finished += 1
            watch.total_s += now - shared.asked
            watch.seated_s += now - shared.seated
        has, since = self._busy.get(engine, (set[str](), now))
        if request_id in has:
            has.remove(request_id)
            if not has:
                self._watches[PREFILL].busy_s += now - since

    # -- the planner ------------------------------------------------------------------------------------------------

    async def _balance(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            now = self._now()
            for engine, (has, since) in self._busy.items():
                if has:
                    self._watches[PREFILL].busy_s += now - since
                    self._busy[engine] = (has, now)
            awake = [(name, serves) for name, serves in self._serves.items() if not self._seats[name].asleep]
            only = {stage: [name for name, serves in awake if serves == stage] for stage in self._views}
            if only[PREFILL] and only[DECODE]:
                self._look(only[PREFILL], only[DECODE])

    def _look(self, prefill: list[str], decode: list[str]) -> None:
        num_slots = sum(self._seats[name].num_slots for name in decode) // len(decode)
        seen = stages(self._watches[PREFILL], self._watches[DECODE], len(prefill), len(decode), num_slots)
        if seen is None:
            return
        self._watches = {PREFILL: StageWatch(), DECODE: StageWatch()}
        plan = balance(*seen)
        self._actor.metrics.gauge("proxy/prefill_engines", plan.num_prefill)
        if plan.num_prefill != len(prefill):
            stage, givers = (PREFILL, decode) if plan.num_prefill > len(prefill) else (DECODE, prefill)
            self._change(min(givers, key=lambda name: (len(self._seats[name].requests), name)), stage, plan.why)

    def _change(self, engine: str, stage: str, why: str) -> None:
        """What the engine has stays until it is done; new requests are of the other stage at once."""
        self._serves[engine] = stage
        self._actor.notice(f"{engine} {stage}s from now on: {why}")
        self._actor.log.info("stage_changed", engine=engine, stage=stage, why=why)
        self.on_change(self._seats[engine])

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _nothing(seat: "EngineSeat") -> None:
    pass

"""Prefill apart from decode in the proxy: which engines serve which stage of a request, and the planner that lets them change."""

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from rubato.actors.config import engine_specs
from rubato.actors.messages.generation import GenerateReply, HandedOver, Route
from rubato.actors.proxy.picker import LeastLoaded, PickerHost
from rubato.planning.engine_info import all_asleep
from rubato.planning.prefill_decode import StageWatch, balance, stages
from rubato.runtime.config import ActorSpec
from rubato.runtime.config import Config as Job

if TYPE_CHECKING:
    from rubato.actors.proxy.placement import EngineSeat, ProxyRequest

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
    if given.kind in ("vllm", "vllm_server"):
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


class Stage:
    """Of one request."""

    __slots__ = ("asked", "cache_at", "name", "seated", "seated_for")

    def __init__(self, now: float) -> None:
        self.name = PREFILL
        """What the next engine does first; DECODE once another one has prefilled it."""
        self.cache_at = ""
        """The engine that prefilled it."""
        self.asked = self.seated = now
        """When it asked for an engine of its stage, and when it got one."""
        self.seated_for = PREFILL


class StagePicker(LeastLoaded):
    """Engines by stage: prompts go to those that prefill, what they hand over to those that decode."""

    def __init__(self, host: PickerHost) -> None:
        super().__init__(host)
        section = host.config.proxy
        self._actor = host.actor
        self._period_s = section.balance_s if section.balance == "auto" else 0.0
        """Of the planner; 0 leaves engines at what they were started for."""
        self._serves: dict[str, str] = {}
        self._engines: dict[str, dict[str, EngineSeat]] = {PREFILL: {}, DECODE: {}}
        self._watches = {PREFILL: StageWatch(), DECODE: StageWatch()}
        self._of: WeakKeyDictionary[ProxyRequest, Stage] = WeakKeyDictionary()
        self._busy: dict[str, tuple[set[str], float]] = {}
        """Engine → requests that it has to prefill, and since when it has any."""
        self._elsewhere: set[str] = set()
        """Stages whose requests fell back to engines of the other one."""
        self._balancing: asyncio.Task[None] | None = None
        self.apart = False
        """Some engine serves one stage only."""
        for engine in host.engines.values():
            self.joined(engine)

    # -- engines ----------------------------------------------------------------------------------------------------

    def joined(self, engine: "EngineSeat") -> "StagePicker":
        """One that comes back serves what it was started for."""
        self._serves[engine.name] = engine.info.serves
        self._look_apart()
        if self.apart and self._period_s and self._balancing is None:
            self._balancing = self._actor.spawn(self._balance(), name=f"{self._actor.name}.balance")
        self.changed(engine)
        return self

    def left(self, engine: "EngineSeat") -> None:
        self._serves.pop(engine.name, None)
        self._busy.pop(engine.name, None)
        for engines in self._engines.values():
            engines.pop(engine.name, None)
        self._look_apart()

    def _look_apart(self) -> None:
        self.apart = any(serves != BOTH for serves in self._serves.values())

    def changed(self, engine: "EngineSeat") -> None:
        serves = self._serves.get(engine.name, BOTH)
        for stage, engines in self._engines.items():
            if serves in (stage, BOTH):
                engines[engine.name] = engine
            else:
                engines.pop(engine.name, None)
            if stage in self._elsewhere and any(not (e.info.asleep or e.info.pinned) for e in engines.values()):
                self._elsewhere.discard(stage)

    # -- requests ---------------------------------------------------------------------------------------------------

    def stage_of(self, request: "ProxyRequest") -> Stage:
        """Begins with a prefill."""
        found = self._of.get(request)
        if found is None:
            found = self._of[request] = Stage(request.began)
        return found

    def _is_staged(self, request: "ProxyRequest") -> bool:
        return self.apart and not request.request.weights.exact

    def usable(self, request: "ProxyRequest") -> "Collection[EngineSeat]":
        """The engines of the request's stage; all of them where each of those is gone, asleep, or pinned to an older version for an evaluation."""
        everyone = super().usable(request)
        if not self._is_staged(request):
            return everyone
        need, stage = request.request.weights, self.stage_of(request).name
        own = self._engines[stage].values()
        if any(not e.info.asleep and (not e.info.pinned or need.is_met_by(e.info.version_of(need.adapter))) for e in own):
            return own
        self._fell_back(stage)
        return everyone

    def session(self, request: "ProxyRequest") -> str:
        """A session may have a cache at an engine of each stage."""
        session = super().session(request)
        return f"{session} {self.stage_of(request).name}" if self.apart else session

    def queue(self, request: "ProxyRequest") -> str:
        return self.stage_of(request).name if self.apart else ""

    def goes_first(self, request: "ProxyRequest") -> bool:
        """All that decode have tokens: they wait in turn."""
        in_turn = self.apart and self.stage_of(request).name == DECODE
        return super().goes_first(request) and not in_turn

    def route(self, request: "ProxyRequest", engine: "EngineSeat") -> Route:
        stage, route = self.stage_of(request), request.request.route
        hand_over = self.hands_over(request, engine.name)
        if not hand_over and not stage.cache_at:
            return route
        return msgspec.structs.replace(route, hand_over=hand_over, cache_at=stage.cache_at)

    def hands_over(self, request: "ProxyRequest", engine: str) -> bool:
        """Whether `engine` only prefills the request, for another to decode."""
        is_prefilled = self.stage_of(request).name != PREFILL
        if not self._is_staged(request) or is_prefilled or self._serves.get(engine) != PREFILL:
            return False
        awake = any(not each.info.asleep for each in self._engines[DECODE].values())
        if not awake:
            self._fell_back(DECODE)
        return awake

    def _fell_back(self, stage: str) -> None:
        """Told once, until an engine of the stage is there again; where no other is awake, nothing goes elsewhere."""
        others = self._engines[OTHER[stage]].values()
        if stage in self._elsewhere or not any(not each.info.asleep for each in others):
            return
        self._elsewhere.add(stage)
        own = self._engines[stage].values()
        if not own:
            why = f"no engine that {stage}s is up"
        elif all_asleep(e.info for e in own):
            why = f"the engines that {stage} are asleep"
        else:
            why = f"the engines that {stage} are held at an older version for an evaluation"
        self._actor.notice(f"requests to {stage} go to engines that {OTHER[stage]} for now: {why}")
        self._actor.log.info("stage_fell_back", stage=stage, why=why)

    def seated(self, request: "ProxyRequest", engine: "EngineSeat") -> None:
        super().seated(request, engine)
        stage = self.stage_of(request)
        stage.seated = now = self._now()
        stage.seated_for = stage.name
        if stage.name == PREFILL:
            has, since = self._busy.get(engine.name, (set[str](), now))
            self._busy[engine.name] = (has, since if has else now)
            has.add(request.request.request_id)

    def released(self, request: "ProxyRequest", engine: "EngineSeat") -> None:
        """Done with the stage or not; one that moved goes on in its other seat."""
        now, request_id, stage = self._now(), request.request.request_id, self.stage_of(request)
        if request.seat is engine:
            watch = self._watches[stage.seated_for]
            watch.finished += 1
            watch.total_s += now - stage.asked
            watch.seated_s += now - stage.seated
        has, since = self._busy.get(engine.name, (set[str](), now))
        if request_id in has:
            has.remove(request_id)
            if not has:
                self._watches[PREFILL].busy_s += now - since

    def after(self, request: "ProxyRequest", engine: "EngineSeat", reply: GenerateReply | None) -> None:
        """What an engine handed over is decoded where it left its cache; all else begins anew."""
        stage = self.stage_of(request)
        handed_over = isinstance(reply, HandedOver) and not reply.to
        if isinstance(reply, HandedOver) and reply.to:
            return
        stage.name, stage.cache_at = (DECODE, engine.name) if handed_over else (PREFILL, "")
        stage.asked = self._now()

    # -- the planner ------------------------------------------------------------------------------------------------

    async def _balance(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            now = self._now()
            for engine, (has, since) in self._busy.items():
                if has:
                    self._watches[PREFILL].busy_s += now - since
                    self._busy[engine] = (has, now)
            awake = [(name, serves) for name, serves in self._serves.items() if not self._seat(name).info.asleep]
            only = {stage: [name for name, serves in awake if serves == stage] for stage in self._engines}
            if only[PREFILL] and only[DECODE]:
                self._look(only[PREFILL], only[DECODE])

    def _look(self, prefill: list[str], decode: list[str]) -> None:
        num_slots = sum(self._seat(name).info.num_slots for name in decode) // len(decode)
        seen = stages(self._watches[PREFILL], self._watches[DECODE], len(prefill), len(decode), num_slots)
        if seen is None:
            return
        self._watches = {PREFILL: StageWatch(), DECODE: StageWatch()}
        plan = balance(*seen)
        self._actor.metrics.gauge("proxy/prefill_engines", plan.num_prefill)
        if plan.num_prefill != len(prefill):
            stage, givers = (PREFILL, decode) if plan.num_prefill > len(prefill) else (DECODE, prefill)
            self._change(min(givers, key=lambda name: (len(self._seat(name).requests), name)), stage, plan.why)

    def _change(self, engine: str, stage: str, why: str) -> None:
        """What the engine has stays until it is done; new requests are of the other stage at once."""
        self._serves[engine] = stage
        self._actor.notice(f"{engine} {stage}s from now on: {why}")
        self._actor.log.info("stage_changed", engine=engine, stage=stage, why=why)
        self.changed(self._seat(engine))
        self.host.look()

    def _seat(self, name: str) -> "EngineSeat":
        return self.host.engines[name]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

"""Hardware affinity in the proxy: the classes of engines that a request may use, by the config's map or by a plan that follows what is seen."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rubato.actors.config import engine_specs, one_of
from rubato.actors.messages.affinity import Measure, StepsMeasured
from rubato.actors.messages.generation import Completion, GenerateReply
from rubato.actors.proxy.picker import LeastLoaded, PickerHost
from rubato.actors.proxy.section import LEARNED
from rubato.bus.errors import AskFailed
from rubato.planning.affinity import AffinityPlan, told
from rubato.planning.binding import Binding, TaskProfiles, measured, planned
from rubato.planning.engine_info import all_asleep
from rubato.planning.routing import Wait
from rubato.planning.step_sums import StepSums
from rubato.runtime.config import Config as Job

if TYPE_CHECKING:
    from rubato.actors.proxy.placement import EngineSeat, ProxyRequest

DEFAULT = "default"
"""Stands for every task that the map does not name."""

PATIENCE_S = 30.0
"""A class that had no room for so long, while a request waited for it, is passed over: it stands still."""

MEASURE_S = 5.0
"""Limit of asking an engine what its steps cost."""


def check_affinity(job: Job) -> None:
    """Compare the map with the job's tasks and pools. Raises ValueError with one sentence."""
    given = job.section("affinity")
    if not given:
        return
    if given == LEARNED:
        if job.has("engine") and (kind := job.section("engine").kind) in ("vllm", "vllm_server"):
            raise ValueError(f"affinity is learned, but engine.kind={kind} does not observe its steps: map tasks to classes")
        return
    tasks = list(job.section("tasks")) if job.has("tasks") else []
    known = [pool for spec in engine_specs(job).values() for pool in spec.pools.items()]
    classes = sorted({pool.hardware for _, pool in known if pool.hardware})
    pools = dict(known)
    for task, name in given.items():
        try:
            one_of(task, (*tasks, DEFAULT))
        except ValueError as error:
            raise ValueError(f"affinity is a map of tasks: {error}") from None
        if not classes:
            raise ValueError(f"affinity.{task} is {name}, but no pool says its hardware class: set actors.engine.pools.NAME.hardware")
        try:
            one_of(name, classes)
        except ValueError as error:
            meant = pools[name].hardware if name in pools else ""
            hint = f"{name!r} is a pool; its hardware class is {meant}" if meant else str(error)
            raise ValueError(f"affinity.{task} must be the hardware class of a pool: {hint}") from None


class AffinityPicker(LeastLoaded):
    """Which class takes a request; with `affinity: learned`, what was seen of tasks and classes, and the plan that follows from it.

    One class costs nothing: nothing is counted, no engine is asked, and no plan is made.
    """

    def __init__(self, host: PickerHost) -> None:
        super().__init__(host)
        given: str | Mapping[str, str] = host.config.affinity
        self._actor = host.actor
        self._learns = given == LEARNED
        fixed = {} if isinstance(given, str) else dict(given)
        default = fixed.pop(DEFAULT, "")
        self._binding = Binding({task: {name: 1.0} for task, name in fixed.items()}, default)
        self._most_running = 0
        self._class_of: dict[str, str] = {}
        self._classes: dict[str, dict[str, EngineSeat]] = {}
        self._room_at: dict[str, float] = {}
        """When a class was last seen to have room."""
        self._elsewhere: set[str] = set()
        """Tasks whose requests fell back to another class."""
        self._profiles = TaskProfiles()
        self._sums: dict[str, StepSums] = {}
        self._counted: dict[str, Sequence[float]] = {}
        """Of each engine, what `_sums` has of it."""
        self._asked: set[str] = set()
        """Engines that sum up their steps, which they do from when they are first asked."""
        self._held: dict[str, int] = {}
        """Session → tokens of its last turn, which its engine may hold in its KV cache."""
        self._is_told = False
        """That there is an engine which does not observe its steps."""
        self._planning: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def learning(self) -> bool:
        return self._learns and len(self._classes) > 1

    # -- engines ----------------------------------------------------------------------------------------------------

    def joined(self, engine: "EngineSeat") -> "AffinityPicker":
        name = self._class_of.get(engine.name)
        if name is None:
            record = self._actor.directory.find(engine.name)
            name = self._class_of[engine.name] = (record.hardware if record is not None else "") or "unnamed"
            if self._learns and self._binding.shares and measured(name, 1, 1.0, self._sums.get(name, StepSums())) is None:
                self._binding.share_out({})
                self._actor.notice(f"affinity: {name} is new, so every class is open to all until it is measured")
        self._classes.setdefault(name, {})[engine.name] = engine
        for each in self._class_of.keys() - self._asked if self.learning else ():
            self._asked.add(each)
            self._actor.spawn(self._measure(each), name=f"{self._actor.name}.measure")
        return self

    def left(self, engine: "EngineSeat") -> None:
        name = self._class_of.pop(engine.name, "")
        self._counted.pop(engine.name, None)
        self._asked.discard(engine.name)
        engines = self._classes.get(name, {})
        engines.pop(engine.name, None)
        if not engines:
            self._classes.pop(name, None)

    # -- requests ---------------------------------------------------------------------------------------------------

    def queue(self, request: "ProxyRequest") -> str:
        """Each task waits by itself."""
        return request.request.route.task

    def pick(self, request: "ProxyRequest") -> str | Wait:
        """Among the classes that its task may use; in need, among all engines."""
        asked, task = request.request, request.request.route.task
        order = self._binding.order(task, self._class_of.get(self.last_engine(request) or "", ""))
        if not order or asked.weights.exact:
            return super().pick(request)
        now, stuck, none = asyncio.get_running_loop().time(), True, Wait.NO_ROOM
        for name in order:
            engines = self._classes.get(name)
            if engines is None or all_asleep(e.info for e in engines.values()):
                continue
            found = self.least_loaded(request, engines.values())
            if not isinstance(found, Wait):
                self._room_at[name] = now
                self._elsewhere.discard(task)
                return found
            none = found
            stuck = stuck and now - max(request.began, self._room_at.get(name, 0.0)) > PATIENCE_S
        if not stuck:
            return none
        found = super().pick(request)
        if not isinstance(found, Wait):
            self._fell_back(task, order, found)
        return found

    def seated(self, request: "ProxyRequest", engine: "EngineSeat") -> None:
        asked, sticky = request.request, self.last_engine(request)
        super().seated(request, engine)
        if asked.weights.exact or request.seat is not None:  # a share is counted with its first seat
            return
        name = self._class_of.get(engine.name, "")
        if name != self._class_of.get(sticky or ""):
            self._binding.begun(asked.route.task, name)
        if self.learning:
            self._most_running = max(self._most_running, len(self.host.running))
            num = len(asked.prompt) // 4
            held = self._held.get(asked.session, 0) if sticky == engine.name else 0
            self._profiles.began(asked.route.task, num, max(1, num - held))

    def ended(self, request: "ProxyRequest", outcome: GenerateReply | Exception) -> None:
        asked = request.request
        if self.learning and isinstance(outcome, Completion) and not asked.weights.exact:
            num = len(outcome.tokens.ids) // 4
            self._profiles.ended(asked.route.task, num)
            self._held.pop(asked.session, None)
            self._held[asked.session] = len(asked.prompt) // 4 + num
            if len(self._held) > self.host.config.proxy.sessions_kept:
                del self._held[next(iter(self._held))]

    def why(self, request: "ProxyRequest") -> str:
        shares = self._binding.of(request.request.route.task)
        return told(request.request.route.task, shares) if shares else ""

    def waits(self, request: "ProxyRequest") -> None:
        """While a request waits, all that wait are looked at every `PATIENCE_S`: a class that stands still sends no event."""
        if self._looking is None and self._binding.binds:
            self._looking = self._actor.spawn(self._look(), name=f"{self._actor.name}.patience")

    async def _look(self) -> None:
        while self.host.num_waiting():
            await asyncio.sleep(1.01 * PATIENCE_S)
            self.host.look()
        self._looking = None

    def _fell_back(self, task: str, order: Sequence[str], engine: str) -> None:
        self._actor.metrics.count("proxy/fell_back")
        if task not in self._elsewhere:
            self._elsewhere.add(task)
            there = [name for name in order if name in self._classes and not all_asleep(e.info for e in self._classes[name].values())]
            why = f"no {there[0]} had room for {PATIENCE_S:g} s" if there else f"no engine of {' or '.join(order)} is up"
            name = self._class_of.get(engine, "")
            self._actor.notice(f"affinity: requests of task {task or 'of the job'} go to {name} for now: {why}")

    # -- the plan ---------------------------------------------------------------------------------------------------

    def version_began(self, version: int) -> None:
        """Time to plan anew."""
        if self.learning and (self._planning is None or self._planning.done()):
            self._planning = self._actor.spawn(self._plan(), name=f"{self._actor.name}.affinity")

    async def _plan(self) -> None:
        async with asyncio.TaskGroup() as asked:
            for engine in list(self._class_of):
                asked.create_task(self._measure(engine))
        awake = {name: [e.info for e in engines.values() if not e.info.asleep] for name, engines in self._classes.items()}
        classes = [
            measured(name, len(infos), sum(info.num_slots for info in infos) / len(infos), self._sums[name])
            for name, infos in awake.items()
            if infos and name in self._sums
        ]
        if len(classes) < sum(map(bool, awake.values())):
            return
        in_flight, self._most_running = self._most_running, len(self.host.running)
        found = await self._actor.offload(planned, self._profiles.take(), classes, in_flight, self._binding.shares)
        if found is not None:
            self._follow(found)

    async def _measure(self, engine: str) -> None:
        try:
            measured: StepsMeasured = await self._actor.ref(engine).ask(Measure(), timeout=MEASURE_S)
        except AskFailed as error:
            self._actor.log.info("engine_not_measured", engine=engine, error=str(error))
            return
        name = self._class_of.get(engine)
        if not measured.steps:
            self._can_not_learn(engine)
        elif name is not None:
            self._sums.setdefault(name, StepSums()).include(measured.steps, self._counted.get(engine, ()))
            self._counted[engine] = measured.steps

    def _can_not_learn(self, engine: str) -> None:
        if not self._is_told:
            self._is_told = True
            self._actor.notice(f"affinity: {engine} does not observe its steps, so nothing can be learned: map tasks to classes")

    def _follow(self, found: AffinityPlan) -> None:
        self._actor.log.info("affinity_planned", why=found.why, rate_s=found.rate, shares=found.shares)
        if found.shares != self._binding.shares:
            self._binding.share_out(found.shares)
            self._actor.notice(f"affinity: {found.why}")

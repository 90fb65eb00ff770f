"""Hardware affinity in the proxy: the classes of engines that a request may use, by the config's map or by a plan that follows what is seen."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator

from actors.config import engine_specs, one_of
from actors.messages.generation import Aborted, Completion, Generate, Measure, StepsMeasured
from bus.errors import AskFailed
from planning.affinity import AffinityPlan, told
from planning.binding import Binding, ClassSeen, TaskProfiles, planned
from planning.routing import EngineView, RequestView, Route, all_asleep, choose
from planning.step_cost import StepSums
from runtime.actor import Actor
from runtime.config import Config as Job

LEARNED = "learned"

DEFAULT = "default"
"""Stands for every task that the map does not name."""

PATIENCE_S = 30.0
"""A class that had no room for so long, while a request waited for it, is passed over: it stands still."""

MEASURE_S = 5.0
"""Limit of asking an engine what its steps cost."""


def _given(value: object) -> object:
    if isinstance(value, str) and value:
        return one_of(value, (LEARNED,), ", and no map of tasks to hardware classes")
    if value and not (isinstance(value, dict) and all(isinstance(part, str) for part in (*value, *value.values()))):
        raise ValueError(
            f"{value!r} is neither {LEARNED} nor a map of tasks to hardware classes, such as {{math: h20}}"
        )
    return value or {}


AffinityMap = Annotated[str | dict[str, str], BeforeValidator(_given)]
"""`learned`, or task → hardware class; empty where every engine may serve every task."""


def check_affinity(job: Job) -> None:
    """Compare the map with the job's tasks and pools. Raises ValueError with one sentence."""
    given = job.section("affinity")
    if not given:
        return
    if given == LEARNED:
        if job.has("engine") and job.section("engine").kind == "vllm":
            raise ValueError(
                "affinity is learned, but engine.kind=vllm does not observe its steps: map tasks to classes"
            )
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
            raise ValueError(
                f"affinity.{task} is {name}, but no pool says its hardware class: set actors.engine.pools.NAME.hardware"
            )
        try:
            one_of(name, classes)
        except ValueError as error:
            meant = pools[name].hardware if name in pools else ""
            hint = f"{name!r} is a pool; its hardware class is {meant}" if meant else str(error)
            raise ValueError(f"affinity.{task} must be the hardware class of a pool: {hint}") from None


class HardwareAffinity:
    """Which class takes a request; with `affinity: learned`, what was seen of tasks and classes, and the plan that follows from it.

    One class costs nothing: nothing is counted, no engine is asked, and no plan is made.
    """

    def __init__(
        self, actor: Actor, given: str | Mapping[str, str], running: Collection[str], sessions_kept: int
    ) -> None:
        """`running` are the requests that are not answered yet."""
        self._actor = actor
        self._learns = given == LEARNED
        fixed = {} if isinstance(given, str) else dict(given)
        default = fixed.pop(DEFAULT, "")
        self._binding = Binding({task: {name: 1.0} for task, name in fixed.items()}, default)
        self._running = running
        self._most_running = 0
        self._sessions_kept = sessions_kept
        self._class_of: dict[str, str] = {}
        self._classes: dict[str, dict[str, EngineView]] = {}
        self._room_at: dict[str, float] = {}
        """When a class was last seen to have room."""
        self._elsewhere: set[str] = set()
        """Tasks whose requests fell back to another class."""
        self._profiles = TaskProfiles()
        self._sums: dict[str, StepSums] = {}
        self._counted: dict[str, Sequence[float]] = {}
        """Of each engine, what `_sums` has of it."""
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

    def see(self, view: EngineView) -> None:
        """What the router looks at of an engine, new or changed."""
        name = self._class_of.get(view.name)
        if name is None:
            record = self._actor.directory.find(view.name)
            name = self._class_of[view.name] = (record.hardware if record is not None else "") or "unnamed"
            if self._learns and self._binding.shares and name not in self._sums:
                self._binding.share_out({})
                self._actor.notice(f"affinity: {name} is new, so every class is open to all until it is measured")
        self._classes.setdefault(name, {})[view.name] = view

    def forget(self, engine: str) -> None:
        """The engine left."""
        name = self._class_of.pop(engine, "")
        self._counted.pop(engine, None)
        views = self._classes.get(name, {})
        views.pop(engine, None)
        if not views:
            self._classes.pop(name, None)

    # -- requests ---------------------------------------------------------------------------------------------------

    def route(
        self, request: RequestView, task: str, began: float, sticky: str | None, views: Collection[EngineView]
    ) -> Route:
        """The engine for a request of `task` that came at `began`, among the classes that it may use; in need, among all `views`."""
        order = self._binding.order(task, self._class_of.get(sticky or "", ""))
        if not order:
            return choose(request, views, sticky)
        now, stuck, none = asyncio.get_running_loop().time(), True, Route(None, "no room")
        for name in order:
            engines = self._classes.get(name)
            if engines is None or all_asleep(engines.values()):
                continue
            found = choose(request, engines.values(), sticky)
            if found.engine is not None:
                self._room_at[name] = now
                self._elsewhere.discard(task)
                return found
            none = found
            stuck = stuck and now - max(began, self._room_at.get(name, 0.0)) > PATIENCE_S
        if not stuck:
            return none
        found = choose(request, views, sticky)
        if found.engine is not None:
            self._fell_back(task, order, found.engine)
        return found

    def began(self, request: Generate, engine: str, sticky: str | None) -> None:
        """A request got its first seat; `sticky` is the engine of its session's last turn."""
        if request.exact:
            return
        name = self._class_of.get(engine, "")
        if name != self._class_of.get(sticky or ""):
            self._binding.begun(request.task, name)
        if self.learning:
            self._most_running = max(self._most_running, len(self._running))
            num = len(request.prompt) // 4
            held = self._held.get(request.session, 0) if sticky == engine else 0
            self._profiles.began(request.task, num, max(1, num - held))

    def ended(self, request: Generate, outcome: Completion | Aborted | Exception) -> None:
        """A request is answered."""
        if self.learning and isinstance(outcome, Completion) and not request.exact:
            num = len(outcome.tokens.ids) // 4
            self._profiles.ended(request.task, num)
            self._held.pop(request.session, None)
            self._held[request.session] = len(request.prompt) // 4 + num
            if len(self._held) > self._sessions_kept:
                del self._held[next(iter(self._held))]

    def told(self, task: str) -> str:
        """For whoever asks why a request waits."""
        shares = self._binding.of(task)
        return told(task, shares) if shares else ""

    def look_later(self, look: Callable[[], None], waits: Callable[[], bool]) -> None:
        """While `waits()`, call `look` every `PATIENCE_S`: a class that stands still tells nobody."""
        if self._looking is None and self._binding.binds:
            self._looking = self._actor.spawn(self._look(look, waits), name=f"{self._actor.name}.patience")

    async def _look(self, look: Callable[[], None], waits: Callable[[], bool]) -> None:
        while waits():
            await asyncio.sleep(1.01 * PATIENCE_S)
            look()
        self._looking = None

    def _fell_back(self, task: str, order: Sequence[str], engine: str) -> None:
        self._actor.metrics.count("proxy/fell_back")
        if task not in self._elsewhere:
            self._elsewhere.add(task)
            there = [name for name in order if name in self._classes and not all_asleep(self._classes[name].values())]
            why = (
                f"no {there[0]} had room for {PATIENCE_S:g} s" if there else f"no engine of {' or '.join(order)} is up"
            )
            name = self._class_of.get(engine, "")
            self._actor.notice(f"affinity: requests of task {task or 'of the job'} go to {name} for now: {why}")

    # -- the plan ---------------------------------------------------------------------------------------------------

    def phase(self) -> None:
        """A weight version came: time to plan anew."""
        if self.learning and (self._planning is None or self._planning.done()):
            self._planning = self._actor.spawn(self._plan(), name=f"{self._actor.name}.affinity")

    async def _plan(self) -> None:
        async with asyncio.TaskGroup() as asked:
            for engine in list(self._class_of):
                asked.create_task(self._measure(engine))
        awake = {name: [v for v in views.values() if not v.asleep] for name, views in self._classes.items()}
        classes = [
            ClassSeen(name, len(views), sum(v.num_slots for v in views) / len(views), self._sums[name])
            for name, views in awake.items()
            if views and name in self._sums
        ]
        if len(classes) < sum(map(bool, awake.values())):
            return
        in_flight, self._most_running = self._most_running, len(self._running)
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
            self._actor.notice(
                f"affinity: {engine} does not observe its steps, so nothing can be learned: map tasks to classes"
            )

    def _follow(self, found: AffinityPlan) -> None:
        self._actor.log.info("affinity_planned", why=found.why, rate_s=found.rate, shares=found.shares)
        if found.shares != self._binding.shares:
            self._binding.share_out(found.shares)
            self._actor.notice(f"affinity: {found.why}")

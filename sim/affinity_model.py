"""Hardware affinity in virtual time: the live planner's shares, dealt out as the live proxy deals them out. A class is a pool here."""

from collections.abc import Iterable, Mapping, Sequence

from rubato.planning.affinity import AffinityPlan, HardwareClass, Shares
from rubato.planning.binding import Binding, TaskProfiles, measured, planned
from rubato.planning.engine_info import WeightsNeed
from rubato.planning.routing import Choice, EngineView, Wait, choose
from rubato.planning.step_sums import StepSums
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.manager_model import TurnRequest


class ModelledAffinity:
    """As actors/affinity/picker.py, for engines that never fail."""

    def __init__(self, engines: Mapping[str, Sequence[ModelledEngine]], shares: Shares, *, learned: bool) -> None:
        """`engines` by pool; `shares` hold until the first plan, where it is `learned`, and for ever where not."""
        self._engines = engines
        self._class_of = {engine.name: name for name, each in engines.items() for engine in each}
        self._binding = Binding(shares)
        self._learns = learned and len(engines) > 1
        self._profiles = TaskProfiles()
        self._most_running = self.running = 0
        """Requests that are not answered yet, at most since the last plan, and now."""
        self.plans: list[AffinityPlan] = []
        self._sums = {name: StepSums() for name in engines}
        for name, each in engines.items() if self._learns else ():
            for engine in each:
                engine.usage.seen = self._sums[name].add

    def route(self, request: TurnRequest, task: str, views: Mapping[str, EngineView], sticky: str | None) -> Choice | Wait:
        """The engine for a request of `task`, if one has room that it may use."""
        order = self._binding.order(task, self._class_of.get(sticky or "", ""))
        if not order:
            return choose(views.values(), request.session, WeightsNeed(request.min_version), sticky)
        need = WeightsNeed(request.min_version)
        found = (choose([views[e.name] for e in self._engines[name]], request.session, need, sticky) for name in order)
        return next((choice for choice in found if isinstance(choice, Choice)), Wait.NO_ROOM)

    def came(self) -> None:
        self.running += 1
        self._most_running = max(self._most_running, self.running)

    def began(self, task: str, engine: str, sticky: str | None, prompt: int, prefill: int) -> None:
        """A request got its seat; `sticky` is the engine of its session's last turn."""
        name = self._class_of[engine]
        if name != self._class_of.get(sticky or ""):
            self._binding.begun(task, name)
        if self._learns:
            self._profiles.began(task, prompt, prefill)

    def left(self) -> None:
        """A request was cancelled."""
        self.running -= 1

    def ended(self, task: str, decoded: int) -> None:
        self.running -= 1
        if self._learns:
            self._profiles.ended(task, decoded)

    def replan(self) -> None:
        """A weight version was published."""
        if not self._learns:
            return
        seen = [_seen(name, each, self._sums[name]) for name, each in self._engines.items()]
        in_flight, self._most_running = self._most_running, self.running
        found = planned(self._profiles.take(), seen, in_flight, self._binding.shares)
        if found is not None:
            self.plans.append(found)
            if found.shares != self._binding.shares:
                self._binding.share_out(found.shares)


def _seen(name: str, engines: Sequence[ModelledEngine], sums: StepSums) -> HardwareClass | None:
    return measured(name, len(engines), sum(each.num_slots for each in engines) / len(engines), sums)


def fixed_shares(tasks: Mapping[str, Iterable[str]], counts: Mapping[str, int]) -> Shares:
    """What pools that name their `tasks` mean: those of a task share it by their `counts` of engines."""
    named: dict[str, list[str]] = {}
    for pool, its in tasks.items():
        for task in its:
            named.setdefault(task, []).append(pool)
    totals = {task: sum(counts[pool] for pool in pools) for task, pools in named.items()}
    return {task: {pool: counts[pool] / totals[task] for pool in pools} for task, pools in named.items()}

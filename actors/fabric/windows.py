"""Circuits for the windows of a phase: an actor says what it is made of, and the exact schedule says between which of them circuits change."""

from collections.abc import Callable
from typing import NamedTuple

from rubato.actors.fabric.rhythm import Aim
from rubato.actors.fabric.templates import Templates
from rubato.actors.messages.fabric import PhaseWindow, PhaseWindows
from rubato.planning.demand import Demand, Links, flows
from rubato.planning.phase_time import Operation
from rubato.planning.windows import Window, WindowPlan, plan_windows

MOST = 256
"""Windows of a phase: the schedule of as many takes some tens of milliseconds."""


class Planned(NamedTuple):
    """What a plan was made for, and the plan."""

    given: tuple[object, ...]
    candidates: tuple[Links, ...]
    plan: WindowPlan


class Windows:
    """As announced last, of each phase."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._told: dict[str, tuple[PhaseWindow, ...]] = {}
        self._planned: dict[str, Planned] = {}

    def note(self, message: PhaseWindows, racks: Callable[[str, tuple[Demand, ...]], tuple[Demand, ...]]) -> bool:
        """Take them up, with traffic between racks; True when the templates changed. Raises ValueError for more than are worked on."""
        if len(message.windows) > MOST:
            raise ValueError(f"{message.phase} was announced with {len(message.windows)} windows; at most {MOST} are scheduled")
        told = (PhaseWindow(each.name, each.lasts_s, racks(message.phase, each.traffic)) for each in message.windows)
        self._told[message.phase] = tuple(told)
        together: dict[tuple[str, str], int] = {}
        for source, target, size_bytes in (way for each in self._told[message.phase] for way in each.traffic):
            together[source, target] = together.get((source, target), 0) + size_bytes
        return self._templates.learn(message.phase, tuple((*way, size_bytes) for way, size_bytes in together.items()), whole=True)

    def first(self, phase: str, delay_s: float) -> Links | None:
        """The circuits with which the phase begins; None where it has no windows."""
        planned = self._plan(phase, delay_s)
        return planned.candidates[planned.plan.choices[0]] if planned else None

    def aims(self, phase: str, began: float, delay_s: float) -> list[Aim]:
        """The changes within the phase that began at the loop time `began`."""
        planned = self._plan(phase, delay_s)
        changes = planned.plan.changes if planned else ()
        return [Aim(phase, began + c.due_s, began + c.starts_s, restore=True, links=c.links, window=True) for c in changes]

    def _plan(self, phase: str, delay_s: float) -> Planned | None:
        """Candidates are the circuits planned for the windows of each name, and those for all of them in turn."""
        told, templates = self._told.get(phase, ()), self._templates
        if not any(each.traffic for each in told):
            return None
        endpoints = templates.book.endpoints
        given, before = (told, endpoints, templates.dead, delay_s), self._planned.get(phase)
        if before is None or before.given != given:
            by_name: dict[str, list[Demand]] = {}
            for each in told:
                by_name.setdefault(each.name, []).extend(each.traffic)
            turns = [tuple(traffic) for traffic in by_name.values() if traffic]
            candidates = tuple(dict.fromkeys(templates.for_turns(some, endpoints) for some in (turns, *([turn] for turn in turns))))
            windows = [Window((Operation(flows(each.traffic, endpoints)),), each.lasts_s) for each in told]
            before = Planned(given, candidates, plan_windows(windows, candidates, len(endpoints), templates.rates, delay_s))
            self._planned[phase] = before
        return before

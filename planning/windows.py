"""Decides where inside a phase circuits change: between windows, where one outlasts the switch's delay by more than the change gains, exactly.

RFabric (section 4.3.2) changes circuits within forward and backward passes: for attention's context, for experts, for gradients at the end.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rubato.planning.demand import Links
from rubato.planning.phase_time import LinkRates, Operation, phase_s
from rubato.planning.switching import PhaseCost, schedule


class Window(NamedTuple):
    """A part of a phase, between two moments at which circuits may change."""

    operations: tuple[Operation, ...]
    window_s: float = 0.0
    """How long it lasts when its traffic takes no time, which runs beside."""
    serial_s: float = 0.0
    """Computation between its transfers, from the first to the last."""
    overlap: float = 0.0
    """Share of its traffic that hides behind `serial_s`."""

    def busy_s(self, traffic_s: float) -> float:
        """From its begin until its traffic is through, which takes so long by itself."""
        return self.serial_s + traffic_s - min(self.overlap * traffic_s, self.serial_s)


class Change(NamedTuple):
    """Circuits that change between two windows. Times are from the begin of the first one."""

    window: int
    """The one that they are for."""
    links: Links
    due_s: float
    """When the traffic of the window before is through."""
    starts_s: float
    """When that window is over: what the change takes beyond is exposed."""


class WindowPlan(NamedTuple):
    """The windows, which recur."""

    choices: tuple[int, ...]
    """The candidate of each."""
    changes: tuple[Change, ...]
    """All but the one back to the first window's circuits."""
    period_s: float
    exposed_s: float
    num_switches: int


def plan_windows(windows: Sequence[Window], candidates: Sequence[Links], num: int, rates: LinkRates, delay_s: float) -> WindowPlan:
    """The schedule of `planning.switching` over the windows, by the time that the traffic of each is predicted to take.

    Raises ValueError without windows or candidates.
    """
    taken: dict[tuple[tuple[int, ...], int], float] = {}

    def traffic_s(at: int, k: int) -> float:
        key = tuple(map(id, windows[at].operations)), k
        if key not in taken:
            taken[key] = phase_s(windows[at].operations, candidates[k], num, rates)
        return taken[key]

    costs = [
        PhaseCost(window.window_s, tuple(window.busy_s(traffic_s(at, k)) for k in range(len(candidates))))
        for at, window in enumerate(windows)
    ]
    found = schedule(costs, delay_s)
    changes: list[Change] = []
    now = 0.0
    for at, (cost, k) in enumerate(zip(costs, found.choices, strict=True)):
        ends_s, quiet_s = now + cost.lasts_s(k), cost.quiet_s(k)
        following = found.choices[at + 1] if at + 1 < len(costs) else k
        if following != k:
            changes.append(Change(at + 1, candidates[following], ends_s - quiet_s, ends_s))
            ends_s += max(0.0, delay_s - quiet_s)
        now = ends_s
    return WindowPlan(found.choices, tuple(changes), found.period_s, found.exposed_s, found.num_switches)

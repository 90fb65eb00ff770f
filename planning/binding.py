"""What a proxy keeps to share tasks out over hardware classes: which class is whose turn, and what was seen of each task."""

from collections.abc import Mapping, Sequence
from typing import Final

from rubato.planning.affinity import AffinityPlan, HardwareClass, Shares, TaskProfile, plan
from rubato.planning.step_cost import fit
from rubato.planning.step_sums import StepSums

FADE: Final = 0.5
"""What was seen of tasks counts half as much after each plan: two plans after a task has changed, three quarters of it are new."""

MIX_FADE: Final = 0.8
"""The same for how many requests came of each task: which task fits which class does not depend on that, and over one batch it is chance."""

ENOUGH: Final = 4
"""Requests of a task that must have ended before it takes part in a plan."""

AHEAD: Final = 2
"""Sessions that a class may take beyond its share of a task while the one whose turn it is has no room: above, they wait for that."""

FADED: Final = 1e-3
"""A task of which so little is left is not there any more."""


class Binding:
    """Shares tasks out: each request gets the classes that it may use, the one that is owed most of its task first.

    A session keeps its class while its task has a share there. A task without shares may use any class.
    """

    def __init__(self, shares: Shares | None = None, default: str = "") -> None:
        """`default` is the class of all tasks that `shares` do not name."""
        self._default = {default: 1.0} if default else {}
        self.share_out(shares or {})

    def share_out(self, shares: Shares) -> None:
        """From now on these."""
        self.shares = shares
        self._owed: dict[str, dict[str, float]] = {}

    @property
    def binds(self) -> bool:
        """Whether any task may not use every class."""
        return bool(self.shares or self._default)

    def of(self, task: str) -> Mapping[str, float]:
        """Class → share of the task's requests; empty where it may use any."""
        return self.shares.get(task, self._default)

    def order(self, task: str, kept: str = "") -> Sequence[str]:
        """The classes that a request of `task` may use, the best first; `kept` is the class of its session. Empty means any."""
        shares = self.of(task)
        if len(shares) <= 1:
            return tuple(shares)
        owed = self._owed.get(task, {})
        due = {name: owed.get(name, 0.0) + share for name, share in shares.items()}
        names = [name for name in shares if name == kept or due[name] > -AHEAD]
        return sorted(names, key=lambda name: (name != kept, -due[name], name))

    def begun(self, task: str, name: str) -> None:
        """A session of `task` began on class `name`: every class of the task is owed its share of it, and that one got it."""
        shares = self.of(task)
        if len(shares) > 1 and name in shares:
            owed = self._owed.setdefault(task, {})
            for each, share in shares.items():
                owed[each] = owed.get(each, 0.0) + share - (each == name)


class _Seen:
    """Sums over the requests of one task, fading."""

    __slots__ = ("began", "decoded", "ended", "prefilled", "prompts", "requests", "total")

    def __init__(self) -> None:
        self.requests = self.began = self.prompts = self.prefilled = self.ended = self.decoded = 0.0
        self.total = 0

    def fade(self) -> None:
        self.requests *= MIX_FADE
        for name in ("began", "prompts", "prefilled", "ended", "decoded"):
            setattr(self, name, FADE * getattr(self, name))


class TaskProfiles:
    """What was seen of each task's requests, the older the less. `take` is meant for once per step of training."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def began(self, task: str, prompt: int, prefill: int) -> None:
        """A request came with `prompt` tokens, `prefill` of them not in its session's KV cache."""
        seen = self._seen.get(task) or self._seen.setdefault(task, _Seen())
        seen.requests += 1
        seen.began += 1
        seen.prompts += prompt
        seen.prefilled += prefill

    def ended(self, task: str, decoded: int) -> None:
        """A request of the task sampled `decoded` tokens."""
        seen = self._seen.get(task) or self._seen.setdefault(task, _Seen())
        seen.ended += 1
        seen.total += 1
        seen.decoded += decoded

    def profiles(self) -> dict[str, TaskProfile]:
        """Of the tasks of which enough was seen."""
        return {
            name: TaskProfile(s.requests, s.prompts / s.began, s.prefilled / s.began, s.decoded / s.ended)
            for name, s in self._seen.items()
            if s.total >= ENOUGH and min(s.began, s.ended) >= FADED
        }

    def take(self) -> dict[str, TaskProfile]:
        """`profiles`; what was seen so far counts less from now on."""
        known = self.profiles()
        for name, seen in list(self._seen.items()):
            seen.fade()
            if max(seen.began, seen.ended) < FADED:
                del self._seen[name]
        return known


def measured(name: str, engines: int, slots: float, sums: StepSums) -> HardwareClass | None:
    """A class of so many engines by what their steps cost; None while that is not known."""
    cost = fit(sums)
    return None if cost is None else HardwareClass(name, engines, slots, cost)


def planned(
    tasks: Mapping[str, TaskProfile], classes: Sequence[HardwareClass | None], in_flight: float, current: Shares
) -> AffinityPlan | None:
    """`rubato.planning.affinity.plan` of what was seen. None where there is nothing to choose, or a class is not measured yet."""
    known = [each for each in classes if each is not None]
    if not tasks or len(known) < max(2, len(classes)):
        return None
    return plan(tasks, known, in_flight, current)

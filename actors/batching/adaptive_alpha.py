"""Adaptive α, `staleness.alpha: auto`: measures what a step cost and was worth, and sets the bound as planning/adaptive_alpha.py decides.

A restart goes on with its state. Live buffer and RLSim's use the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from rubato.actors.samples.groups import Groups
from rubato.actors.samples.policy import BatchPolicy, PolicyJob, PolicyPlugin
from rubato.planning.adaptive_alpha import AlphaBounds, AlphaState, StepFigures, adapt, begin
from rubato.planning.staleness import Admission, AdmissionView

BEGIN = 1
"""α of a job's first steps: one version hides rollouts behind training."""


@dataclass(slots=True)
class _Handed:
    """The step that was handed out last."""

    step: int
    term: int
    at_s: float
    samples: int
    age: float
    rounds: tuple[str, ...]
    """Held-out rounds of that moment: what they take is no figure of training."""
    ess: float = 1.0
    kl: float = 0.0


class AdaptiveAlpha(PolicyPlugin):
    """Moves the bound on age within `bounds`."""

    key = "adaptive_alpha"

    def __init__(
        self, below: BatchPolicy, groups: Groups, bounds: AlphaBounds, now: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        """`now` gives seconds; `tell` hears each change, in a sentence."""
        super().__init__(below, groups)
        self._bounds, self._now, self._tell = bounds, now, tell
        self._handed: _Handed | None = None
        self._asked: tuple[int, float] = (0, 0.0)
        """The step that is asked for, and since when."""
        self._waiting = 0
        self._counted_s = 0.0
        self._places_s = [0.0, 0.0]
        """Place-seconds without a slot, and in use, since the newest hand-over."""
        self._state = begin(BEGIN, bounds)
        self.restored(None)

    @classmethod
    def of(cls, below: BatchPolicy, groups: Groups, job: PolicyJob) -> Self:
        """As `PolicyPlugin`."""
        staleness = job.config.staleness
        return cls(below, groups, AlphaBounds(staleness.alpha_min, staleness.alpha_max), job.now, job.tell)

    @property
    def admits(self) -> int:
        """The α that admission fills: lower than the bound on age while that comes down."""
        return self._bounds.nearest(self._state.alpha)

    def admit(self, view: AdmissionView) -> Admission:
        """As `BatchPolicy`."""
        return super().admit(replace(view, alpha=self.admits))

    def waiting(self, places: int) -> None:
        """As `PolicyPlugin`."""
        self._count(places)

    def asked(self, step: int, ess: float, kl: float) -> None:
        """Until the batch of `step` is handed out the trainer has nothing to do."""
        if self._handed is not None and self._handed.step == step - 1:
            self._handed.ess, self._handed.kl = ess, kl
        if self._asked[0] != step:
            self._asked = (step, self._now())

    def bound(self, step: int) -> None:
        """The step before is over."""
        self._count(0)
        figures, now = self._figures(step), self._now()
        groups = self.groups.steps[step]
        versions = [group.members[index].outcome.version_first for group in groups for index in group.scored]
        age = step - 1 - sum(versions) / max(1, len(versions))
        rounds = self._rounds()
        self._handed = _Handed(step, self.groups.training.term, now, len(versions), age, rounds)
        self._places_s = [0.0, 0.0]
        if figures is not None:
            self._adapt(figures)
        self._follow()

    def state(self) -> Any:
        """As `PolicyPlugin`."""
        return self._state

    def restored(self, state: msgspec.Raw | None) -> None:
        """As `PolicyPlugin`."""
        if state is not None:
            self._state = msgspec.msgpack.decode(state, type=AlphaState)
        self.groups.alpha = self._bounds.most
        self._follow()

    # -- within -------------------------------------------------------------------------------------------------

    def _figures(self, step: int) -> StepFigures | None:
        """Of the step before; None where something else than training took its time: a restart, or an evaluation."""
        last, now = self._handed, self._now()
        if last is None or last.step != step - 1 or last.term != self.groups.training.term:
            return None
        if last.rounds != self._rounds() or any(not self.groups.rounds[name].complete for name in last.rounds):
            return None
        idle_s, used_s = self._places_s
        return StepFigures(
            seconds=now - last.at_s,
            samples=last.samples,
            waited_s=now - self._asked[1],
            rollout_idle=idle_s / (idle_s + used_s) if idle_s else 0.0,
            spare=sum(1 for _ in self.groups.ready()) >= self.groups.limits.batch_groups,
            age=last.age,
            ess=last.ess,
            kl=last.kl,
        )

    def _adapt(self, figures: StepFigures) -> None:
        before, plan = self._state.alpha, adapt(self._state, figures, self._bounds)
        self._state, self.groups.changes.training = plan.state, True
        if (after := plan.state.alpha) != before:
            self._tell(f"staleness.alpha goes from {before} to {after}: {plan.why}")

    def _follow(self) -> None:
        """A lower α stops admission at once; the bound on age follows when that drops nothing."""
        groups = self.groups
        waiting = [group.version(groups.training.version) for group in (*groups.open(), *groups.ready())]
        young = all(groups.base - version <= self.admits for version in waiting)
        groups.alpha = self.admits if young else max(groups.alpha, self.admits)

    def _rounds(self) -> tuple[str, ...]:
        return tuple(self.groups.rounds)

    def _count(self, more: int) -> None:
        now = self._now()
        elapsed_s, self._counted_s = now - self._counted_s, now
        self._places_s[0] += self._waiting * elapsed_s
        self._places_s[1] += len(self.groups.leases) * elapsed_s
        self._waiting += more

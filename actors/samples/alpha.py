"""`staleness.alpha: auto`: measures what a step cost and was worth, and sets the bound as planning/adaptive_alpha.py decides.

The state is a part of `Training`, which the journal writes: a restart goes on with it. Live buffer and RLSim's use the same.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from actors.samples.groups import Groups
from planning.adaptive_alpha import AlphaBounds, StepFigures, adapt, begin

BEGIN = 1
"""α of a job's first steps: one version hides rollouts behind training."""


@dataclass(slots=True)
class _Handed:
    """The step that was handed out last."""

    step: int
    epoch: int
    at_s: float
    samples: int
    age: float
    rounds: tuple[str, ...]
    """Held-out rounds of that moment: what they take is no figure of training."""
    ess: float = 1.0
    kl: float = 0.0


@dataclass(eq=False)
class AlphaKeeper:
    """Moves the bound of `groups`, which are restored already, within `bounds`; does nothing where there are none."""

    groups: Groups
    bounds: AlphaBounds | None
    now: Callable[[], float]
    """Seconds."""
    tell: Callable[[str], None]
    """Hears each change, in a sentence."""
    _handed: _Handed | None = None
    _asked: tuple[int, float] = (0, 0.0)
    """The step that is asked for, and since when."""
    _wanting: int = 0
    _counted_s: float = 0.0
    _places_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Place-seconds without a slot, and in use, since the newest hand-over."""

    def __post_init__(self) -> None:
        if self.bounds is None:
            return
        training = self.groups.training
        state = training.alpha = training.alpha or begin(BEGIN, self.bounds)
        self.groups.admits = self.bounds.nearest(state.alpha)
        self.groups.alpha = self.bounds.most
        self._follow()

    @contextmanager
    def wanting(self, places: int) -> Generator[None]:
        """So many rollout places are empty, and there is no slot for them."""
        self._count(places)
        try:
            yield
        finally:
            self._count(-places)

    def asked(self, step: int) -> None:
        """The trainer asks for the batch of `step`: until it is handed out it has nothing to do."""
        if self._asked[0] != step:
            self._asked = (step, self.now())

    def handed(self, step: int) -> None:
        """`step` was bound just now: the one before is over."""
        if self.bounds is None:
            return
        self._count(0)
        figures, now = self._figures(step), self.now()
        groups = self.groups.steps[step]
        versions = [group.members[index].outcome.version_first for group in groups for index in group.scored]
        age = step - 1 - sum(versions) / max(1, len(versions))
        rounds = self._rounds()
        self._handed = _Handed(step, self.groups.training.epoch, now, len(versions), age, rounds)
        self._places_s = [0.0, 0.0]
        if figures is not None:
            self._adapt(figures)
        self._follow()

    def trained(self, step: int, ess: float, kl: float) -> None:
        """What training on `step` showed: see `StepFigures`."""
        if self._handed is not None and self._handed.step == step:
            self._handed.ess, self._handed.kl = ess, kl

    # -- within -------------------------------------------------------------------------------------------------

    def _figures(self, step: int) -> StepFigures | None:
        """Of the step before; None where something else than training took its time: a restart, or an evaluation."""
        last, now = self._handed, self.now()
        if last is None or last.step != step - 1 or last.epoch != self.groups.training.epoch:
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
        training = self.groups.training
        assert self.bounds is not None
        assert training.alpha is not None
        before, plan = training.alpha.alpha, adapt(training.alpha, figures, self.bounds)
        training.alpha, self.groups.changes.training = plan.state, True
        if (after := plan.state.alpha) != before:
            self.groups.admits = after
            self.tell(f"staleness.alpha goes from {before} to {after}: {plan.why}")

    def _follow(self) -> None:
        """A lower α stops admission at once; the bound on age follows when that drops nothing."""
        groups = self.groups
        waiting = [group.version(groups.training.version) for group in (*groups.open(), *groups.ready())]
        young = all(groups.base - version <= groups.admits for version in waiting)
        groups.alpha = groups.admits if young else max(groups.alpha, groups.admits)

    def _rounds(self) -> tuple[str, ...]:
        return tuple(self.groups.rounds)

    def _count(self, more: int) -> None:
        now = self.now()
        elapsed_s, self._counted_s = now - self._counted_s, now
        self._places_s[0] += self._wanting * elapsed_s
        self._places_s[1] += len(self.groups.leases) * elapsed_s
        self._wanting += more

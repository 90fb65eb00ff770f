"""The SampleBuffer in virtual time: the live buffer's own groups and rules, without a Store behind them."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from rubato.actors.batching.adaptive_alpha import AdaptiveAlpha
from rubato.actors.batching.stragglers import DropStragglers
from rubato.actors.messages.samples import Ticket
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import Outcome, trajectory_id
from rubato.planning.adaptive_alpha import AlphaBounds
from rubato.planning.staleness import is_stale
from rubato.sim.timeline import Timeline

NEVER_LAPSES_S = 1e9
"""`GroupLimits.ticket_ttl_s` of modelled jobs, where no holder of a ticket dies."""


def ess_of(ages: Sequence[int], drift: float) -> float:
    """The share of effective samples in a batch of samples with these ages in versions, (Σw)² / (n·Σw²), as it is expected.

    An assumed model: log-probabilities drift like a random walk, so that the weight of a sample of age a is log-normal with mean 1 and
    variance exp(a·drift) - 1. `drift` is in nats² per version.
    """
    return len(ages) / sum(math.exp(drift * age) for age in ages) if ages else 1.0


class ModelledBuffer:
    """Issues tickets while there are slots, and hands out a batch when `rubato.planning.staleness.hand_over` says so."""

    def __init__(
        self, timeline: Timeline, groups: Groups, bounds: AlphaBounds | None = None, drift: float = 0.0, *, drops: bool = False
    ) -> None:
        """`bounds` of an α that adapts, to policies that `drift` as `ess_of` says; `drops`: `staleness.stragglers=drop`."""
        self._timeline = timeline
        self._groups = groups
        self._drift = drift
        self._ages: list[list[int]] = []
        self.alphas: list[tuple[int, int, str]] = []
        """Changes of α: the step that was handed out then, the new one, and why."""
        self.trained_names: list[str] = []
        """All trajectories that were trained, in their order."""
        self.on_cancel: Callable[[str, int], None] = lambda trajectory, attempt: None
        """Called for each attempt that is under way and was dropped."""
        self._drops = drops
        if drops:
            groups.add_policy(DropStragglers)
        if bounds is not None:
            groups.add_policy(partial(AdaptiveAlpha, bounds=bounds, now=lambda: timeline.now, tell=self._told))
        self.changed = timeline.event()
        """Something may be claimed."""
        self.freed = timeline.event()
        """Something may be admitted."""
        self.fates: dict[str, int] = {}
        """Trajectories by what became of them."""

    def waiting(self, places: int) -> AbstractContextManager[None]:
        """So many rollout places have no ticket, for want of a slot."""
        return self._groups.waiting(places)

    @property
    def version(self) -> int:
        """Steps trained so far."""
        return self._groups.training.version

    def issue(self) -> Ticket | None:
        """The next rollout, if one may start."""
        tickets = self._groups.issue(1, "env_manager-0", 1, self._timeline.now)
        return tickets[0] if tickets else None

    def put(self, ticket: Ticket, version_first: int, reward: float) -> None:
        """A scored trajectory; one that is too old, or whose group is over, counts as such."""
        if self._groups.settled_fate(ticket) is not None:
            self._count("superseded")
            return
        fate = self._groups.score(ticket.trajectory_id, Outcome(version_first, reward))
        self._count("stale" if fate == "stale" else "scored")
        self._moved(freed=ticket.group_id not in self._groups.live)

    def give_up(self, ticket: Ticket, reason: str, *, retry: bool) -> None:
        """A rollout that came to nothing: another attempt, or its end."""
        self._count(reason)
        if self._groups.settled_fate(ticket) is not None:
            return
        if retry:
            self._groups.take_back(ticket.trajectory_id, reason, counted=True)
        else:
            self._groups.fail(ticket.trajectory_id, "failed", reason)
        self._moved()

    def cancelled(self, ticket: Ticket) -> None:
        """A rollout ended at `on_cancel`: what it had sampled is not modelled."""
        self._count("cancelled")

    def claim(self, step: int) -> list[str] | None:
        """The trajectories that `step` trains, oldest groups first; None while it must wait."""
        groups = self._groups
        groups.asked(step, ess_of(self._ages[-1], self._drift) if self._ages else 1.0, 0.0)
        plan = groups.plan(step, groups.limits.batch_groups)
        self._note_dropped()
        if not plan.take:
            return None
        chosen = groups.chosen(plan)
        self._ages.append([step - 1 - group.members[index].outcome.version_first for group in chosen for index in group.scored])
        groups.bind(step, chosen)
        self._note_dropped()
        names = [trajectory_id(group.id, index) for group in chosen for index in group.scored]
        self.trained_names += names
        return names

    def _note_dropped(self) -> None:
        """Count what was scored and is too old, end what runs in vain, and let others have its slot."""
        ends = [end for end in self._groups.take_changes().ends if end.fate == "stale"]
        self._count("stale", sum(end.outcome.reward is not None for end in ends))
        if ends:
            self._moved()
        cancels = self._groups.take_cancels()
        for rollouts in cancels.values() if self._drops else ():
            for rollout in rollouts:
                self.on_cancel(*rollout)

    def trained(self, step: int) -> None:
        """Step `step` is published: the slots of its groups are free."""
        self._groups.advance(step)
        self._groups.commit(step, self._groups.training.term)
        self._moved()

    @property
    def ages(self) -> tuple[int, ...]:
        """Of every trained trajectory, in versions."""
        return tuple(age for batch in self._ages for age in batch)

    @property
    def ess(self) -> tuple[float, ...]:
        """Of each step."""
        return tuple(ess_of(batch, self._drift) for batch in self._ages)

    def may_train(self, trajectory: str) -> bool:
        """Whether a trajectory that was not trained yet still may be."""
        return self._groups.find(trajectory) is not None

    def still_useful(self, version_first: int) -> bool:
        """Whether a rollout that began under this version may go on at its next turn."""
        return not is_stale(version_first, self.version, self._groups.alpha)

    def _told(self, why: str) -> None:
        (alpha,) = (plugin.admits for plugin in self._groups.plugins if isinstance(plugin, AdaptiveAlpha))
        self.alphas.append((len(self._ages), alpha, why))
        self._moved()

    def _count(self, fate: str, num: int = 1) -> None:
        if num:
            self.fates[fate] = self.fates.get(fate, 0) + num

    def _moved(self, *, freed: bool = True) -> None:
        """Wake waiters to look again; those for a slot only where one may have been freed, since there may be hundreds."""
        self._groups.take_changes()
        happened, self.changed = self.changed, self._timeline.event()
        happened.set()
        if freed:
            happened, self.freed = self.freed, self._timeline.event()
            happened.set()

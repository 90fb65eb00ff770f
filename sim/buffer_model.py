"""The SampleBuffer in virtual time: the live buffer's own groups and rules, without a Store behind them."""

from actors.messages.samples import Ticket
from actors.samples.group import GroupLimits
from actors.samples.groups import Groups
from actors.samples.sample import Outcome, trajectory_id
from sim.timeline import Timeline

NEVER_LAPSES_S = 1e9
"""`GroupLimits.ticket_ttl_s` of modelled jobs, where no holder of a ticket dies."""


class ModelledBuffer:
    """Issues tickets while there are slots, and hands out a batch when `planning.staleness.hand_over` says so."""

    def __init__(self, timeline: Timeline, limits: GroupLimits, alpha: int) -> None:
        self._timeline = timeline
        self._groups = Groups(limits, alpha)
        self._ages: list[int] = []
        self.changed = timeline.event()
        """Something may be admitted or claimed."""
        self.fates: dict[str, int] = {}
        """Trajectories by what became of them."""

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
        self._moved()

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

    def claim(self, step: int) -> list[str] | None:
        """The trajectories that `step` trains, oldest groups first; None while it must wait."""
        groups = self._groups
        plan = groups.plan(step, groups.limits.batch_groups)
        dropped = [end for end in groups.take_changes().ends if end.fate == "stale" and end.outcome.reward is not None]
        self._count("stale", len(dropped))
        if not plan.take:
            return None
        chosen = groups.chosen(plan)
        groups.bind(step, chosen)
        self._ages += [
            step - 1 - group.members[index].outcome.version_first for group in chosen for index in group.scored
        ]
        return [trajectory_id(group.id, index) for group in chosen for index in group.scored]

    def trained(self, step: int) -> None:
        """Step `step` is published: the slots of its groups are free."""
        self._groups.advance(step)
        self._groups.commit(step, self._groups.training.epoch)
        self._moved()

    @property
    def ages(self) -> tuple[int, ...]:
        """Of every trained trajectory, in versions."""
        return tuple(self._ages)

    def _count(self, fate: str, num: int = 1) -> None:
        if num:
            self.fates[fate] = self.fates.get(fate, 0) + num

    def _moved(self) -> None:
        self._groups.take_changes()
        happened, self.changed = self.changed, self._timeline.event()
        happened.set()

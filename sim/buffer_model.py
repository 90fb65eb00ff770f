"""The SampleBuffer in virtual time: the live book and the live rules of admission and hand-over, without a Store behind them."""

from actors.messages.samples import Ticket
from actors.samples.book import Book, Limits
from actors.samples.groups import Group
from actors.samples.sample import trajectory_id
from planning.staleness import hand_over, is_stale, min_version
from sim.timeline import Timeline

NEVER_LAPSES_S = 1e9
"""`Limits.ticket_ttl_s` of modelled jobs, where no holder of a ticket dies."""


class ModelledBuffer:
    """Issues tickets while there are slots, and hands out a batch when `planning.staleness.hand_over` says so."""

    def __init__(self, timeline: Timeline, limits: Limits, alpha: int) -> None:
        self._timeline = timeline
        self.book = Book(limits, alpha, changed=lambda _: None, moved=lambda: None)
        self._bound: list[Group] = []
        self._ages: list[int] = []
        self.changed = timeline.event()
        """Something may be admitted or claimed."""
        self.fates: dict[str, int] = {}
        """Trajectories by what became of them."""

    @property
    def version(self) -> int:
        """Steps trained so far."""
        return self.book.version

    def issue(self) -> Ticket | None:
        """The next rollout, if one may start."""
        tickets = self.book.issue(1, "env_manager-0", 1, self._timeline.now)
        return tickets[0] if tickets else None

    def put(self, ticket: Ticket, version_first: int, reward: float) -> None:
        """A scored trajectory; one that is too old, or whose group is over, counts as such."""
        found = self.book.find(ticket.trajectory_id)
        if found is None or found[1].attempt != ticket.attempt or found[0].fate:
            self._count("superseded")
            return
        group, member = found
        self.book.leases.release(ticket.trajectory_id)
        member.version_first, member.reward = version_first, reward
        stale = is_stale(version_first, self.book.base, self.book.alpha)
        member.state = "failed" if stale else "scored"
        self._count("stale" if stale else "scored")
        self._complete(group)

    def give_up(self, ticket: Ticket, reason: str, *, retry: bool) -> None:
        """A rollout that came to nothing: another attempt, or its end."""
        self._count(reason)
        found = self.book.find(ticket.trajectory_id)
        if found is None or found[1].attempt != ticket.attempt or found[0].fate:
            return
        if not (retry and self.book.take_back(ticket.trajectory_id, counted=True)):
            self.book.leases.release(ticket.trajectory_id)
            found[1].state = "failed"
            self._complete(found[0])
        self._wake()

    def claim(self, step: int) -> list[str] | None:
        """The trajectories that `step` trains, oldest groups first; None while it must wait."""
        limits = self.book.limits
        oldest = min_version(step, self.book.alpha)
        for group in [*self.book.running(), *self.book.ready()]:
            if group.version_known(self.book.base) < oldest:
                self._count("stale", group.num_scored)
                self.book.remove(group.id)
        plan = hand_over(self.book.supply(step, limits.batch_groups))
        if not plan.take:
            return None
        ready = sorted(self.book.ready(), key=lambda group: (group.version(self.book.version), group.id))
        batch = [group for group in ready if group.version(self.book.version) >= plan.min_version][
            : limits.batch_groups
        ]
        names: list[str] = []
        for group in batch:
            group.step = step
            for index, member in enumerate(group.members):
                if member.state == "scored":
                    names.append(trajectory_id(group.id, index))
                    self._ages.append(step - 1 - member.version_first)
        self.book.bound.add(step)
        self._bound = batch
        return names

    def trained(self, step: int) -> None:
        """Step `step` is published: the slots of its groups are free."""
        for group in self._bound:
            self.book.remove(group.id)
        self.book.version = self.book.committed = step
        self.book.bound.discard(step)
        self._wake()

    @property
    def ages(self) -> tuple[int, ...]:
        """Of every trained trajectory, in versions."""
        return tuple(self._ages)

    def _complete(self, group: Group) -> None:
        if not group.complete:
            return
        group.fate = group.verdict()
        if group.trainable:
            group.sealed = True
        else:
            self.book.remove(group.id)
        self._wake()

    def _count(self, fate: str, num: int = 1) -> None:
        self.fates[fate] = self.fates.get(fate, 0) + num

    def _wake(self) -> None:
        happened, self.changed = self.changed, self._timeline.event()
        happened.set()

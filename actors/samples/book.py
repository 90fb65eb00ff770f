"""What the buffer knows: groups under way, whose turn it is, and where training stands. Memory only; nothing here waits."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from actors.messages.samples import Standing, Ticket
from actors.samples.groups import Group, Member
from actors.samples.sample import group_id, split_id, trajectory_id
from actors.samples.tickets import Leases
from planning.staleness import Admission, AdmissionView, SupplyView, admit

CLOSED_KEPT = 4096
"""Groups whose end is remembered for puts that come again; older ones get `superseded`, which also means: forget it."""


DROPPED_KEPT = 1024
"""Groups that ended without training and would be ended again, should the Store forget that: far more than end within its window."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of the configuration that the book goes by."""

    group_size: int
    batch_groups: int
    steps: int
    run_seed: int
    max_attempts: int
    unbounded_batches: int
    ticket_ttl_s: float


class Book:
    """Groups by id, oldest first. Whoever changes a group calls `changed` with its id, or `moved` for version and cursor: it is made durable."""

    def __init__(self, limits: Limits, alpha: int, changed: Callable[[str], None], moved: Callable[[], None]) -> None:
        self.limits = limits
        self.alpha = alpha
        self.changed = changed
        self.moved = moved
        self.version = 0
        self.committed = 0
        self.epoch = 0
        self.cursor = 0
        """Groups admitted so far: the next one's number and task."""
        self.groups: dict[str, Group] = {}
        self.trained: dict[str, Group] = {}
        """Groups that were trained in a step that is not committed yet: they hold no slot, and come back should the Store forget that step."""
        self.dropped: OrderedDict[str, Group] = OrderedDict()
        """The newest groups that ended without being trained."""
        self.rounds: dict[str, Group] = {}
        """Held-out evaluations by group id."""
        self.bound: set[int] = set()
        """Steps that are claimed and not committed."""
        self.leases = Leases(limits.ticket_ttl_s)
        self._closed: OrderedDict[str, tuple[str, tuple[int, ...]]] = OrderedDict()
        self._pending: list[tuple[bool, str, int]] = []

    # -- where things stand ---------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        return Standing(version=self.version, alpha=self.alpha)

    @property
    def base(self) -> int:
        """The version that the next step to be claimed starts from."""
        return max(self.version, self.committed, max(self.bound, default=0))

    @property
    def trained_for_good(self) -> int:
        """Steps trained so far, without those whose batch the Store forgot: they will be trained anew."""
        return min(self.version, max(self.committed, max(self.bound, default=0)))

    def admission(self) -> Admission:
        """How many new groups may start; every group in the book holds a slot."""
        view = AdmissionView(
            alpha=self.alpha,
            batch_groups=self.limits.batch_groups,
            charged=len(self.groups),
            version=self.trained_for_good,
            steps=self.limits.steps,
            unbounded_batches=self.limits.unbounded_batches,
        )
        return admit(view)

    def supply(self, step: int, num_groups: int) -> SupplyView:
        """What there is for the batch of `step`."""
        return SupplyView(
            step=step,
            alpha=self.alpha,
            batch_groups=num_groups,
            ready=tuple(group.version(self.version) for group in self.ready()),
            in_flight=tuple(group.version(self.version) for group in self.running()),
        )

    def ready(self) -> Iterator[Group]:
        """Groups that may be claimed."""
        return (group for group in self.groups.values() if group.sealed and not group.step)

    def running(self) -> Iterator[Group]:
        """Groups of which some member has no outcome, or which are just being sealed."""
        return (group for group in self.groups.values() if not group.sealed and not group.step)

    def find(self, trajectory: str) -> tuple[Group, Member] | None:
        """The live group and member of a trajectory id."""
        try:
            name, index = split_id(trajectory)
        except ValueError:
            return None
        group = self.groups.get(name) or self.rounds.get(name)
        return (group, group.members[index]) if group is not None and index < len(group.members) else None

    def closed_fate(self, ticket: Ticket) -> str:
        """What a put to a group that is no longer in the book is told. What trained was the newest attempt."""
        fate, attempts = self._closed.get(ticket.group_id, ("superseded", ()))
        _, index = split_id(ticket.trajectory_id)
        return fate if index < len(attempts) and attempts[index] == ticket.attempt else "superseded"

    # -- tickets --------------------------------------------------------------------------------------------------

    def issue(self, num: int, holder: str, incarnation: int, now: float) -> list[Ticket]:
        """Up to `num` tickets: held-out tasks, then rollouts to be run again and rest of groups, oldest first, then new groups."""
        tickets: list[Ticket] = []
        while len(tickets) < num:
            if not self._pending and not self._open_group():
                break
            _, name, index = heapq.heappop(self._pending)
            group = self.groups.get(name) or self.rounds.get(name)
            if group is None or group.fate or group.members[index].state != "pending":
                continue
            member = group.members[index]
            member.state, member.attempt, member.version = "running", member.attempt + 1, self.version
            member.holder, member.incarnation = holder, incarnation
            ticket = group.ticket(index, run_seed=self.limits.run_seed, alpha=self.alpha)
            self.leases.grant(ticket.trajectory_id, now)
            self.changed(name)
            tickets.append(ticket)
        return tickets

    def unsend(self, tickets: list[Ticket]) -> None:
        """Take back tickets that never left: the same attempts are issued to the next asker."""
        for ticket in tickets:
            found = self.find(ticket.trajectory_id)
            if found is not None and found[1].state == "running" and found[1].attempt == ticket.attempt:
                found[1].attempt -= 1
                self.again(found[0], ticket.trajectory_id)

    def on_their_way(self, tickets: list[Ticket], now: float) -> list[Ticket]:
        """Those that nobody took back while they were made durable: their leases begin now."""
        kept: list[Ticket] = []
        for ticket in tickets:
            found = self.find(ticket.trajectory_id)
            if found is not None and found[1].attempt == ticket.attempt:
                self.renew(ticket.trajectory_id, ticket.attempt, now)
                kept.append(ticket)
        return kept

    def renew(self, trajectory: str, attempt: int, now: float) -> None:
        """Renew a lease; a ticket that lapsed but went to nobody else yet is revived."""
        found = self.find(trajectory)
        if found is None or found[1].attempt != attempt or found[0].fate:
            return
        if found[1].state == "pending":
            found[1].state = "running"
            self.changed(found[0].id)
        if found[1].state == "running":
            self.leases.grant(trajectory, now)

    def take_back(self, trajectory: str, *, counted: bool) -> bool:
        """A running rollout came to nothing. True: it will be issued again. False: its attempts are used up, and it must be ended."""
        found = self.find(trajectory)
        if found is None or found[1].state != "running":
            return True
        group, member = found
        member.tries += counted
        if member.tries >= self.limits.max_attempts:
            return False
        self.again(group, trajectory)
        return True

    def held_by(self, holder: str) -> list[tuple[str, int]]:
        """Trajectories that run at `holder`, with the incarnation that took them."""
        return [
            (trajectory_id(group.id, index), member.incarnation)
            for group in [*self.groups.values(), *self.rounds.values()]
            for index, member in enumerate(group.members)
            if member.state == "running" and member.holder == holder
        ]

    def holders(self) -> list[str]:
        """Who holds tickets."""
        groups = [*self.groups.values(), *self.rounds.values()]
        return sorted({m.holder for group in groups for m in group.members if m.state == "running"})

    # -- groups ---------------------------------------------------------------------------------------------------

    def add(self, group: Group, now: float) -> None:
        """Take in a group: a new one, a held-out round, or one from before a restart."""
        (self.groups if group.purpose == "train" else self.rounds)[group.id] = group
        for index, member in enumerate(group.members):
            if member.state == "pending":
                heapq.heappush(self._pending, (group.purpose == "train", group.id, index))
            elif member.state == "running":
                self.leases.grant(trajectory_id(group.id, index), now)

    def remove(self, name: str) -> None:
        """The group ended or was trained: its slot is free."""
        group = self.groups.pop(name, None) or self.rounds.pop(name, None)
        if group is None:
            return
        for index in range(len(group.members)):
            self.leases.release(trajectory_id(name, index))
        fate = "" if group.trainable else group.fate or "superseded"
        self._closed[name] = (fate, tuple(member.attempt for member in group.members))
        if len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)
        if group.purpose == "train" and not group.trainable:
            self.dropped[name] = group
            if len(self.dropped) > DROPPED_KEPT:
                self.dropped.popitem(last=False)
        self.changed(name)

    def let_go(self, group: Group) -> None:
        """It was trained: its slot is free, its record stays until its step is committed."""
        self.remove(group.id)
        if group.step > self.committed:
            self.trained[group.id] = group

    def commit(self, step: int) -> None:
        """What was trained in `step` will not come back."""
        for group in [g for g in self.trained.values() if g.step <= step]:
            del self.trained[group.id]
            self.changed(group.id)

    def rebound(self, committed: int, bound: set[int]) -> None:
        """A trainer takes over, and this is what the Store knows of steps: groups of any other step are ready again."""
        self.committed, self.bound = committed, bound
        self.commit(committed)
        held = [*self.trained.values(), *self.groups.values()]
        self._ready_again([g for g in held if g.step > committed and g.step not in bound])

    def bind(self, step: int, names: Collection[str]) -> bool:
        """`step` has these groups. True where it had others, before the Store forgot: they are ready again."""
        self.bound.add(step)
        held = [*self.trained.values(), *self.groups.values()]
        self._ready_again(others := [g for g in held if g.step == step and g.id not in names])
        for group in held:
            if group.id in names:
                group.sealed, group.step = True, step
        return bool(others)

    def _ready_again(self, groups: list[Group]) -> None:
        """No step has them any more."""
        for group in groups:
            group.step = 0
            self.trained.pop(group.id, None)
            self.groups[group.id] = group
        self.groups = dict(sorted(self.groups.items()))

    def again(self, group: Group, trajectory: str) -> None:
        """Its next ticket is due."""
        _, index = split_id(trajectory)
        group.members[index].state = "pending"
        self.leases.release(trajectory)
        heapq.heappush(self._pending, (group.purpose == "train", group.id, index))
        self.changed(group.id)

    def _open_group(self) -> bool:
        """Start a group if one may start."""
        if not self.admission().num_groups:
            return False
        members = [Member() for _ in range(self.limits.group_size)]
        self.add(Group(group_id(self.cursor), self.cursor, members, begun=self.version), 0.0)
        self.cursor += 1
        self.moved()
        return True

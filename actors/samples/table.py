"""Which groups there are, whose turn is next, and what changed since the last durable write: what every move of groups.py stands on."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from actors.messages.samples import PolicyState
from actors.samples.group import UNKNOWN, Changes, Group, GroupLimits, Member, SampleEnd, Training
from actors.samples.sample import group_id, split_id, trajectory_id

ENDED_KEPT = 32_768
"""Samples whose end is remembered, whole groups of them, for puts that come again; older ones get `superseded`, which also means: forget it.
One takes some 700 bytes of the buffer's memory."""


class GroupTable:
    """Groups by what holds them, in order of age."""

    def __init__(self, limits: GroupLimits, alpha: int) -> None:
        self.limits = limits
        self.alpha = self.admits = alpha
        """The bound on age; `admits` is the α that admission fills, the lower of the two while the bound comes down."""
        self.training = Training()
        self.live: dict[str, Group] = {}
        """Groups that hold a slot, oldest first: open, ready or bound."""
        self.trained: dict[str, Group] = {}
        """Groups of trained steps that no checkpoint covers yet: they hold no slot."""
        self.steps: dict[int, list[Group]] = {}
        """Bound and trained steps, each with its groups in the order in which it trains them."""
        self.rounds: dict[str, Group] = {}
        """Held-out evaluations by group id. They are not durable: they can be run again."""
        self.leases: dict[str, float] = {}
        """Running trajectory → loop time at which its ticket lapses."""
        self.changes = Changes()
        self.cancels: dict[tuple[str, int], list[tuple[str, int]]] = {}
        """Holder and its incarnation → trajectories and attempts that it runs in vain, and that nobody told it of yet."""
        self._ended: OrderedDict[str, Group] = OrderedDict()
        self._num_ended = 0
        """Members of those groups."""
        self._pending: list[tuple[bool, str, int]] = []

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes, self.changes = self.changes, Changes()
        return changes

    def take_cancels(self) -> dict[tuple[str, int], list[tuple[str, int]]]:
        """What whom is to be told of since the last call."""
        cancels, self.cancels = self.cancels, {}
        return cancels

    # -- where things stand -------------------------------------------------------------------------------------

    @property
    def policy(self) -> PolicyState:
        return PolicyState(self.training.version, self.alpha)

    @property
    def last_bound(self) -> int:
        """The newest step that has its groups; what is committed counts."""
        return max(self.training.committed, max(self.steps, default=0))

    @property
    def base(self) -> int:
        """The version that the next step to be claimed starts from."""
        return max(self.training.version, self.last_bound)

    def ready(self) -> Iterator[Group]:
        """Groups that may be claimed, oldest first."""
        return (group for group in self.live.values() if group.state == "ready")

    def open(self) -> Iterator[Group]:
        """Groups of which some member has no outcome, oldest first."""
        return (group for group in self.live.values() if group.state == "open")

    def find(self, trajectory: str) -> tuple[Group, Member] | None:
        """The group and the member of a trajectory id, while the group is not over."""
        found = self._look_up(trajectory)
        return None if found is None or found[0].id in self._ended else (found[0], found[0].members[found[1]])

    def _look_up(self, trajectory: str) -> tuple[Group, int] | None:
        try:
            name, index = split_id(trajectory)
        except ValueError:
            return None
        group = self.live.get(name) or self.trained.get(name) or self.rounds.get(name) or self._ended.get(name)
        return (group, index) if group is not None and index < len(group.members) else None

    def running(self) -> Iterator[tuple[str, Member]]:
        """Trajectories that somebody holds the ticket of."""
        for group in (*self.live.values(), *self.rounds.values()):
            for index, member in enumerate(group.members):
                if member.state == "running":
                    yield trajectory_id(group.id, index), member

    # -- for the moves ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """The next group, unless it is there: a Store that forgot that it was admitted may not have forgotten the group."""
        name, (task, row) = group_id(self.training.cursor), self.training.draw(self.limits.mixture)
        self.changes.training = True
        if name not in self.trained and name not in self.live:
            members = [Member() for _ in range(self.limits.group_size + self.limits.extra_rollouts)]
            self._add(Group(name, row, members, begun=self.training.version, task=task))

    def _add(self, group: Group, now: float = 0.0) -> None:
        """Give it a slot, at its place: groups are kept oldest first."""
        newest = next(reversed(self.live), "")
        self.live[group.id] = group
        if group.id < newest:
            self.live = dict(sorted(self.live.items()))
        self._queue(group, now)
        self._changed(group)

    def _queue(self, group: Group, now: float) -> None:
        for index, member in enumerate(group.members):
            if member.state == "pending":
                heapq.heappush(self._pending, (group.purpose == "train", group.id, index))
            elif member.state == "running":
                self._lease(trajectory_id(group.id, index), now)

    def _issue_again(self, group: Group, trajectory: str) -> None:
        _, index = split_id(trajectory)
        group.members[index].state = "pending"
        self.leases.pop(trajectory, None)
        heapq.heappush(self._pending, (group.purpose == "train", group.id, index))
        self._changed(group)

    def _place(self, trajectory: str) -> tuple[Group, int]:
        found = self.find(trajectory)
        if found is None:
            raise ValueError(f"{trajectory} is in no group")
        return found[0], split_id(trajectory)[1]

    def _settle(self, group: Group) -> None:
        if group.num_scored >= self.limits.group_size:
            self._let_go(group)
        if group.complete or group.hopeless:
            ends = group.settle(filtering=self.limits.dynamic_sampling)
            self.training.filtered.note(group)
            if group.state == "ended":
                self._end(group, ends)

    def _end(self, group: Group, ends: list[SampleEnd]) -> None:
        """It is over: its slot is free, and its samples are kept no longer."""
        self.live.pop(group.id, None)
        self.trained.pop(group.id, None)
        self._release(group)
        self.changes.payloads |= dict.fromkeys(group.inline)
        self._num_ended += len(group.members) if group.id not in self._ended else 0
        self._ended[group.id] = group
        while self._num_ended > ENDED_KEPT and len(self._ended) > 1:
            self._num_ended -= len(self._ended.popitem(last=False)[1].members)
        self._note(ends)
        self._changed(group)

    def _let_go(self, group: Group) -> None:
        """Enough were scored: whatever is not over by now trains no more."""
        self._release(group)
        for index, member in enumerate(group.members):
            if not member.settled:
                member.outcome = UNKNOWN if member.state == "running" else member.outcome
                self._note(group.fail(index, "surplus", "enough of its group were scored before"))

    def _release(self, group: Group) -> None:
        """Nothing more can come of it: its leases end, and whoever runs some of it hears so."""
        for index, member in enumerate(group.members):
            self.leases.pop(trajectory_id(group.id, index), None)
            if not member.settled:
                self._cancel(group, index)

    def _cancel(self, group: Group, index: int) -> None:
        """Whoever had the newest ticket of this member, and never said that nothing came of it, runs it in vain."""
        member = group.members[index]
        if member.holder:
            rollout = (trajectory_id(group.id, index), member.attempt)
            self.cancels.setdefault((member.holder, member.incarnation), []).append(rollout)

    def _note(self, ends: Iterable[SampleEnd]) -> None:
        for end in ends:
            self.changes.ends.append(end)
            self.training.tally.end(end.fate, max(0, end.outcome.tokens), end.task)

    def _tell(self, group: Group, tokens: int, fate: str = "") -> None:
        """So many tokens were sampled for `group`, which the tally does not know of yet."""
        self.training.tally.tell(tokens, fate if group.purpose == "train" else "eval")
        self.changes.training = True

    def _lease(self, trajectory: str, now: float) -> None:
        self.leases[trajectory] = now + self.limits.ticket_ttl_s

    def _changed(self, group: Group) -> None:
        if group.purpose == "train":
            self.changes.groups[group.id] = None

"""All groups of a run, in memory: whose turn it is, what a step trains, and what has changed since the last durable write.

Nothing here waits. The journal (journal.py) makes every change durable before a reply speaks of it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rubato.actors.messages.samples import PolicyState, Ticket
from rubato.actors.samples.group import (
    MIN_SCORED,
    NOTHING,
    UNKNOWN,
    Changes,
    Group,
    GroupLimits,
    Member,
    Receipt,
    SampleEnd,
    Training,
    teach,
)
from rubato.actors.samples.policy import BatchPolicy, MakePolicy, PlainPolicy, PolicyPlugin, records_of, restore
from rubato.actors.samples.sample import Outcome, OutOfOrder, StaleTerm, group_id, group_number, split_id, trajectory_id
from rubato.planning.staleness import Admission, AdmissionView, HandOver, SupplyView, is_stale, min_version

ROUNDS_KEPT = 8
"""Results of held-out evaluations that are kept for an asker that lost its reply."""

ENDED_KEPT = 32_768
"""Samples whose end is remembered, whole groups of them, for puts that come again; older ones get `superseded`, which also means: forget it.
One takes some 300 bytes of the buffer's memory."""


class Groups:
    """Groups by what holds them, in order of age. Every change of one or of `training` is made here, and noted in `changes`."""

    def __init__(self, limits: GroupLimits, alpha: int, policies: Iterable[MakePolicy] = ()) -> None:
        """`policies` are as `add_policy` takes them."""
        self.limits = limits
        self.alpha = alpha
        """The bound on age."""
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
        """Holder and its incarnation → trajectories and attempts that it runs in vain; the cancel is still to be sent."""
        self._ended: OrderedDict[str, Group] = OrderedDict()
        self._num_ended = 0
        """Members of those groups."""
        self._pending: list[tuple[bool, str, int]] = []
        self.batching: BatchPolicy = PlainPolicy()
        """The outermost policy: it is asked, and asks those that it is around."""
        self.plugins: list[PolicyPlugin] = []
        """All policies but the plain one: they hear of what happens, in the order of the configuration."""
        for make in policies:
            self.add_policy(make)

    def add_policy(self, make: MakePolicy) -> None:
        """Put a plug-in around the policies so far, `PlainPolicy` innermost: it is asked first from here on."""
        self.batching = plugin = make(self.batching, self)
        self.plugins.append(plugin)

    def take_changes(self) -> Changes:
        """Changes since the last call."""
        changes, self.changes = self.changes, Changes()
        return changes

    def take_cancels(self) -> dict[tuple[str, int], list[tuple[str, int]]]:
        """The cancels to send since the last call, by holder."""
        cancels, self.cancels = self.cancels, {}
        return cancels

    # -- where things stand -------------------------------------------------------------------------------------

    @property
    def policy(self) -> PolicyState:
        return PolicyState(self.training.version, self.alpha, self.base)

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
        """Trajectories whose ticket is held, with their members."""
        for group in (*self.live.values(), *self.rounds.values()):
            for index, member in enumerate(group.members):
                if member.state == "running":
                    yield trajectory_id(group.id, index), member

    def admission(self) -> Admission:
        """How many new groups may start. A step whose groups the Store forgot will be trained anew, so it does not count as trained."""
        view = AdmissionView(
            alpha=self.alpha,
            batch_groups=self.limits.batch_groups,
            charged=len(self.live),
            version=min(self.training.version, self.last_bound),
            steps=self.limits.steps,
            unbounded_batches=self.limits.unbounded_batches,
        )
        return self.batching.admit(view)

    def supply(self, step: int, num_groups: int) -> SupplyView:
        """Groups that there are for the batch of `step`."""
        now = self.training.version
        ready, in_flight = (tuple(group.version(now) for group in each) for each in (self.ready(), self.open()))
        return SupplyView(step=step, alpha=self.alpha, batch_groups=num_groups, ready=ready, in_flight=in_flight)

    def settled_fate(self, ticket: Ticket) -> str | None:
        """The fate for the holder of `ticket` where nothing more may come of it ("": its own sample, taken before); else None."""
        group, index = self._look_up(ticket.trajectory_id) or (None, 0)
        if group is None or group.members[index].attempt != ticket.attempt:
            return "superseded"
        if group.purpose == "train" and (group.task, group.row) != (ticket.task, ticket.row):
            return "superseded"  # the Store forgot a group, and another prompt's has its name
        return group.fate_of(index) if group.members[index].settled or group.state != "open" else None

    def wants(self, trajectory: str, attempt: int) -> bool:
        """Whether something may still come of this attempt."""
        group, index = self._look_up(trajectory) or (None, 0)
        if group is None or group.state != "open":
            return False
        member = group.members[index]
        return member.attempt == attempt and not member.settled and bool(member.holder)

    # -- tickets ------------------------------------------------------------------------------------------------

    def issue(self, num: int, holder: str, incarnation: int, now: float) -> list[Ticket]:
        """Up to `num` tickets: held-out tasks, then rollouts to be run again and rest of groups, oldest first, then new groups."""
        tickets: list[Ticket] = []
        while len(tickets) < num:
            if not self._pending and not self._more():
                break
            _, name, index = heapq.heappop(self._pending)
            group = self.live.get(name) or self.rounds.get(name)
            if group is None or group.state != "open" or group.members[index].state != "pending":
                continue
            self._cancel(group, index)  # the attempt before
            version = self.training.version if group.purpose == "train" else group.begun
            group.run(index, holder, incarnation, version)
            ticket = group.ticket(index, self.limits.run_seed)
            self._lease(ticket.trajectory_id, now)
            self._changed(group)
            tickets.append(ticket)
        return tickets

    def _more(self) -> bool:
        """Open another group, where there may be one."""
        for plugin in self.plugins:
            if (opened := plugin.open()) is not None:
                return opened
        if may := self.admission().num_groups > 0:
            self._open()
        return may

    def unsend(self, tickets: Iterable[Ticket]) -> None:
        """Take back tickets that never left: the same attempts are issued to the next asker."""
        for ticket in tickets:
            found = self.find(ticket.trajectory_id)
            if found is not None and found[1].state == "running" and found[1].attempt == ticket.attempt:
                found[1].unsent()
                self._issue_again(found[0], ticket.trajectory_id)

    def on_their_way(self, tickets: Iterable[Ticket], now: float) -> list[Ticket]:
        """Tickets that were not taken back while they were made durable: their leases begin now."""
        kept: list[Ticket] = []
        for ticket in tickets:
            found = self.find(ticket.trajectory_id)
            if found is not None and found[1].attempt == ticket.attempt:
                self.renew(ticket.trajectory_id, ticket.attempt, now)
                kept.append(ticket)
        return kept

    def renew(self, trajectory: str, attempt: int, now: float, holder: str = "", incarnation: int = 0) -> None:
        """Renew a lease; a ticket that lapsed and was not issued again yet is revived. A `holder` that came back has it as what it is now."""
        found = self.find(trajectory)
        if found is None or found[1].attempt != attempt or found[0].state != "open":
            return
        self.training.tally.lost_attempts -= found[1].is_lost
        self.changes.training |= found[1].is_lost
        if found[1].heard_of(holder, incarnation):
            self._changed(found[0])
        if found[1].state == "running":
            self._lease(trajectory, now)

    def take_back(self, trajectory: str, reason: str, *, counted: bool, failed: bool = False, spent: Outcome | None = None) -> str:
        """A running rollout came to nothing: it is issued again (""), or ends where its attempts are used up (`failed`).

        A failed attempt is retried with a new seed, a lost one with the same seed. `spent`: what the attempt had sampled, if reported.
        """
        found = self.find(trajectory)
        if found is None or found[1].settled:
            return ""
        group, member = found
        if member.state == "pending":  # it lapsed before: only what it had sampled is new
            if spent is not None and member.is_lost:
                self.training.tally.lost_attempts -= 1
                member.holder = ""
                self._tell(group, spent.tokens, "retried")
                self._changed(group)
            return ""
        if spent is not None:
            member.holder = ""
        member.tries = min(member.tries + counted, member.attempt)  # one that was heard of again may be lost again
        member.failures += failed
        self.training.tally.lost_attempts += spent is None
        if member.tries >= self.limits.max_attempts:
            member.outcome = UNKNOWN
            self._cancel(group, split_id(trajectory)[1])
            return self.fail(trajectory, "failed", reason, spent)
        self._tell(group, spent.tokens if spent else 0, "retried")
        self._issue_again(group, trajectory)
        return ""

    # -- what becomes of rollouts -------------------------------------------------------------------------------

    def score(self, trajectory: str, outcome: Outcome, payload: bytes | None = None, digest: str = "") -> str:
        """A rollout was scored: its sample's payload, or the digest of its file. Returns its fate so far.

        One that would be too old for the next step to be claimed ends `stale`.
        """
        group, index = self._place(trajectory)
        self.training.tally.lost_attempts -= group.members[index].is_lost
        group.members[index].outcome = outcome
        self._tell(group, outcome.tokens)
        if group.purpose == "train" and is_stale(outcome.version_first, self.base, self.alpha):
            return self.fail(trajectory, "stale", "")
        self.leases.pop(trajectory, None)
        group.take(index, digest)
        self._changed(group)
        if group.purpose == "train":
            if payload is not None:
                self.changes.payloads[trajectory] = payload
            self._settle(group)
        return group.fate_of(index)

    def fail(self, trajectory: str, fate: str, reason: str, spent: Outcome | None = None) -> str:
        """A rollout ends without a sample, having `spent` that much more than was reported; returns its fate."""
        group, index = self._place(trajectory)
        self.leases.pop(trajectory, None)
        if spent is not None:
            self.training.tally.lost_attempts -= group.members[index].is_lost
            group.members[index].outcome = spent
            self._tell(group, spent.tokens)
        ends = group.fail(index, fate, reason)
        if group.purpose == "train":
            self._note(ends)
            self._changed(group)
            self._settle(group)
        return fate

    def late(self, ticket: Ticket, spent: Outcome) -> None:
        """Note what a rollout sampled that could train no more while it ran. Reported again, or of a former attempt, it is ignored."""
        group, index = self._look_up(ticket.trajectory_id) or (None, 0)
        if group is None or group.members[index].attempt != ticket.attempt:
            return
        member, fate = group.members[index], ""
        if group.state == "ended" and member.state == "running":
            member.state, fate = "failed", group.fate
        elif member.fate == "surplus" and member.outcome == UNKNOWN:
            member.outcome, fate = NOTHING, member.fate
            self._changed(group)
        if fate:
            self._tell(group, spent.tokens, fate)
            self.training.tally.measured(fate, spent.tokens)

    def drop_old(self, oldest: int) -> None:
        """End the groups, open or ready, that hold a first token older than `oldest`: they would never train."""
        for group in [*self.open(), *self.ready()]:
            if group.version_scored(self.base) < oldest:
                self._end(group, group.discard("stale"))

    def end_unused(self) -> None:
        """The job is over: end whatever no step is bound to."""
        for group in [*self.open(), *self.ready()]:
            self._end(group, group.discard("unused"))

    def lose(self, group: Group, members: Iterable[int]) -> None:
        """The samples of these members of a ready or bound group are gone: the rest trains without them, if enough are left."""
        for index in members:
            self._note(group.fail(index, "lost", "its payload is gone or damaged"))
        self._changed(group)
        if group.state == "ready":
            self._settle(group)
        else:
            teach(self.steps[group.step], self.limits)

    # -- steps --------------------------------------------------------------------------------------------------

    def check_term(self, term: int) -> None:
        """Raises StaleTerm to a trainer that was replaced. A newer term than any known is one that the Store forgot."""
        if term < self.training.term:
            raise StaleTerm(f"term {term} acts, but {self.training.term} is the newest: another trainer took over")
        if term > self.training.term:
            self.training.term, self.changes.training = term, True

    def plan(self, step: int, num_groups: int) -> HandOver:
        """Plan of the batch of `step`, which has no groups yet. Groups that are too old for it end first: they hold slots.

        Raises OutOfOrder for a step that is committed, and for one whose predecessor has no groups: the Store forgot them.
        """
        begins = "the trainer begins again with its checkpoint"
        if step <= self.training.committed:
            raise OutOfOrder(f"step {step} was claimed, but {self.training.committed} is committed already: {begins}")
        if step > self.last_bound + 1:
            why = f"{self.last_bound} is the last that has groups: the Store forgot those between"
            raise OutOfOrder(f"step {step} was claimed, but {why}, and {begins}")
        self.drop_old(min_version(step, self.alpha))
        return self.batching.next_batch(self.supply(step, num_groups))

    def asked(self, step: int, ess: float, kl: float) -> None:
        """The trainer asks for the batch of `step`; `ess` and `kl` are what training on the step before showed, as `Claim` has them."""
        for plugin in self.plugins:
            plugin.asked(step, ess, kl)

    @contextmanager
    def waiting(self, places: int) -> Generator[None]:
        """So many rollout places are empty, and there is no slot for them."""
        for plugin in self.plugins:
            plugin.waiting(places)
        try:
            yield
        finally:
            for plugin in self.plugins:
                plugin.waiting(-places)

    def chosen(self, plan: HandOver) -> list[Group]:
        """The groups of a plan, in the order in which they train."""
        ready = list(self.ready())
        return [ready[at] for at in plan.chosen]

    def bind(self, step: int, groups: list[Group]) -> None:
        """`step` trains these groups, in this order."""
        self.steps[step] = groups
        for group in groups:
            group.bind(step)
            self._changed(group)
        teach(groups, self.limits)
        self.changes.training = True
        for plugin in self.plugins:
            plugin.bound(step)

    def figures(self, step: int) -> dict[str, float]:
        """Metrics of a bound step from the policies, for its row."""
        return {name: value for plugin in self.plugins for name, value in plugin.figures(step).items()}

    def advance(self, step: int) -> None:
        """Steps up to `step` are trained, maybe anew: their slots are free."""
        if step > self.training.version:
            self.training.version, self.changes.training = step, True
        for group in [g for each, groups in self.steps.items() if each <= step for g in groups if g.state == "bound"]:
            group.train()
            del self.live[group.id]
            self.trained[group.id] = group
            self._changed(group)
        for plugin in self.plugins:
            plugin.trained(step)

    def take_over(self, term: int, step: int) -> None:
        """A trainer of a new `term` begins after `step`, which its checkpoint covers: what was trained since is trained again."""
        self.check_term(term)
        self.commit(step, term)
        self.advance(step)
        for group in list(self.trained.values()):
            group.fall_back()
            del self.trained[group.id]
            self._add(group)
        self._withdraw()

    def _withdraw(self) -> None:
        """Of a step without groups no version comes: that is known no more. Holders end the rollouts that need one as they renew their leases."""
        self.training.version, self.changes.training = min(self.training.version, self.last_bound), True

    def commit(self, step: int, term: int) -> None:
        """A durable checkpoint covers every step up to `step`."""
        for each in range(self.training.committed + 1, step + 1):
            for group in self.steps.pop(each, ()):
                self._end(group, group.commit(term))
            self.training.committed = each
            self.changes.training = True
        for plugin in self.plugins:
            plugin.committed(step)

    def covers(self, step: int) -> bool:
        """Whether the groups of every step up to `step` that is not committed are known."""
        return all(each in self.steps for each in range(self.training.committed + 1, step + 1))

    def raised(self, step: int, term: int) -> list[Group]:
        """Training on `step` raised; returns the groups that end as `poisoned` by that. A trainer begins anew then: its term counts once."""
        training = self.training
        if term == training.raised_term:
            return []
        self.changes.training = True
        if not training.note_raise(step, term) or any(group.state != "bound" for group in self.steps.get(step, ())):
            return []
        training.raises = 0
        poisoned = self.steps.pop(step, [])
        for group in poisoned:
            self._end(group, group.poison())
        self._given_up([step])
        return poisoned

    def drop_bound(self, alpha: int) -> list[int]:
        """Steps without a checkpoint that hold what is too old for `alpha`, which was larger when they were bound, and those after them: their
        groups end `stale`, and others train in them. Versions that came of them are withdrawn: the trainer publishes the one before anew.
        Returns the steps."""
        steps = sorted(self.steps)
        old = (s for s in steps if any(g.version_scored(self.base) < min_version(s, alpha) for g in self.steps[s]))
        if (first := next(old, None)) is None:
            return []
        dropped = [step for step in steps if step >= first]
        for group in [group for step in dropped for group in self.steps.pop(step)]:
            group.unbind()
            self._end(group, group.discard("stale"))
        self._given_up(dropped)
        self._withdraw()
        return dropped

    def discard(self, group: Group, fate: str, why: str) -> None:
        """An open or ready group will not train."""
        for member in group.members:
            member.reason = member.reason or why
        self._end(group, group.discard(fate))

    def _given_up(self, steps: Sequence[int]) -> None:
        for plugin in self.plugins:
            plugin.given_up(steps)

    # -- what a restart and a checkpoint bring ------------------------------------------------------------------

    def restore(self, training: Training, groups: Iterable[Group], now: float) -> None:
        """Take over what the Store has. Running tickets keep their attempt and get a fresh lease, so that their holders may still put.

        Raises ConfigError where a policy is not configured any more that the run can't go on without.
        """
        self.training = training
        for group in groups:
            if group.state == "trained":
                self.trained[group.id] = group
            else:
                self._add(group, now)
            if group.step:
                self.steps.setdefault(group.step, []).append(group)
            while training.cursor <= group_number(group.id):
                self._draw()  # it was opened before, and the Store forgot that
        for bound in self.steps.values():
            bound.sort(key=lambda group: (group.version(0), group.id))
        restore(self.plugins, training.policies)

    def record(self) -> Training:
        """`training` as it is journaled: with what each policy has to remember."""
        self.training.policies = records_of(self.plugins)
        return self.training

    def _draw(self) -> tuple[str, int] | None:
        """Task and row of the group with the next number; None where a policy draws them itself. The number counts as used."""
        if not any(plugin.draws for plugin in self.plugins):
            return self.training.draw(self.limits.mixture)
        self.training.cursor += 1
        return None

    def cover(self, receipts: Iterable[Receipt]) -> None:
        """Bring in line what a checkpoint says of the steps that it covers: a Store that forgot them shows in nothing else.

        A Store that forgot earlier steps too is a new one. What it would sample again may have been trained in them: it is passed over.
        """
        given, forgot = [each for each in receipts if each.step > self.training.committed], False
        first = min((each.step for each in given), default=0)
        is_new = any(step not in self.steps for step in range(self.training.committed + 1, first))
        for receipt in given:
            held = {group.id: group for group in self.steps.get(receipt.step, ())}
            names = dict.fromkeys(end.group_id for end in receipt.ends)
            forgot |= held.keys() != names.keys()
            for group in [group for name, group in held.items() if name not in names]:
                group.unbind()
                self.trained.pop(group.id, None)
                self._add(group)
            known = [name for name in names if name not in self._ended]
            self.steps[receipt.step] = [held.get(name) or self._bring_back(name, receipt) for name in known]
            while self.training.cursor < receipt.cursor:  # it was admitted before the step was handed out
                if is_new:
                    self._draw()
                else:
                    self._open()
                self.changes.training = True
        if given and (newest := max(each.step for each in given)) > self.training.version:
            self.training.version, self.changes.training = newest, True
        for plugin in self.plugins if forgot else ():
            plugin.forgotten(max(given, key=lambda receipt: receipt.step))

    def _bring_back(self, name: str, receipt: Receipt) -> Group:
        """A group as the checkpoint knows it, in place of what the Store remembers of it, which is older."""
        ends = [end for end in receipt.ends if end.group_id == name]
        older = self.live.pop(name, group := Group.trained_in(name, receipt.step, ends))
        for index, member in enumerate(group.members):
            self.leases.pop(trajectory_id(name, index), None)
            self.changes.payloads[trajectory_id(name, index)] = None
            known = 0 if older is group else max(0, older.members[index].outcome.tokens)
            self._tell(group, max(0, member.outcome.tokens) - known)
            if member.state == "failed" and (older is group or older.members[index].state != "failed"):
                self._note([ends[index]])
        self.trained[name] = group
        self._changed(group)
        return group

    # -- held-out rounds ----------------------------------------------------------------------------------------

    def round(self, name: str, num: int, version: int = 0, samples: int = 1) -> Group:
        """The round of this name, begun now where it is new: `num` prompts of each task, each `samples` times, under `version` alone.

        They go before training and hold no slots. There is one at a time: what is unfinished of another one ends.
        """
        if name not in self.rounds:
            complete = [old for old, group in self.rounds.items() if group.complete]
            for old in set(self.rounds) - set(complete[max(0, len(complete) + 1 - ROUNDS_KEPT) :]):
                self._release(self.rounds.pop(old))
            exam = tuple(self.limits.mixture.exam(num))
            members = [Member() for _ in exam for _ in range(samples)]
            self.rounds[name] = Group(name, 0, members, purpose="eval", begun=version, samples=samples, exam=exam)
            self._queue(self.rounds[name], 0.0)
        return self.rounds[name]

    # -- within -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """The next group, unless it is there: a Store that forgot that it was admitted may not have forgotten the group."""
        name, prompt = group_id(self.training.cursor), self._draw()
        self.changes.training = True
        if prompt is not None and name not in self.trained and name not in self.live:
            self._add(self._new(name, *prompt, self.limits.group_size + self.limits.extra_rollouts))

    def _new(self, name: str, task: str, row: int, num_members: int) -> Group:
        return Group(name, row, [Member() for _ in range(num_members)], begun=self.training.version, task=task)

    def launch(self, task: str, row: int, num_members: int) -> str:
        """Open a group for a prompt that a policy drew; its name."""
        while (name := group_id(self.training.cursor)) in self.live or name in self.trained:
            self.training.cursor += 1
        self.training.cursor += 1
        self.changes.training = True
        self._add(self._new(name, task, row, num_members))
        return name

    def ended(self, name: str) -> Group | None:
        """The group of this name, where it ended and is remembered."""
        return self._ended.get(name)

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
            ending = self.batching.complete(group) if group.num_scored >= MIN_SCORED else None
            ends = group.settle(ending.fate if ending else "")
            self.training.barren.note(group, ending.why or ending.fate if ending else "")
            if group.state == "ended":
                self._end(group, ends)
        for plugin in self.plugins:
            plugin.settled(group)

    def _end(self, group: Group, ends: list[SampleEnd]) -> None:
        """It is over: its slot is free, and its samples are kept no longer."""
        self.live.pop(group.id, None)
        self.trained.pop(group.id, None)
        self._release(group)
        self.changes.payloads |= dict.fromkeys(group.inline)
        self._num_ended += len(group.members) if group.id not in self._ended else 0
        self._ended[group.id] = group.remembered()
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
        """Nothing more can come of it: its leases end, and its holders get a cancel."""
        for index, member in enumerate(group.members):
            self.leases.pop(trajectory_id(group.id, index), None)
            if not member.settled:
                self._cancel(group, index)

    def _cancel(self, group: Group, index: int) -> None:
        """The holder of this member's newest ticket runs it in vain, unless it has reported that nothing came of it."""
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

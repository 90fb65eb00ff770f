"""Random lives of all groups, with restarts and trainers that fall back: what always holds."""

from collections import Counter

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rubato.actors.samples.group import TRAINED, UNKNOWN, Group, GroupLimits, Receipt, Training
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import Outcome
from rubato.planning.staleness import min_version

BATCH_GROUPS, STEPS = 2, 30


class Life:
    """Managers, a trainer and a buffer that dies. Every event takes a number that decides what it is about."""

    def __init__(self, alpha, group_size, extra=0):
        self.alpha = alpha
        self.limits = GroupLimits(
            group_size=group_size,
            batch_groups=BATCH_GROUPS,
            steps=STEPS,
            run_seed=1,
            max_attempts=2,
            unbounded_batches=3,
            ticket_ttl_s=10.0,
            extra_rollouts=extra,
        )
        self.groups = Groups(self.limits, alpha)
        self.term = 0
        self.now = 0.0
        self.held = []
        self.cancelled = set()
        self.logged = []
        self.bound = {}
        self.receipts = {}
        self.stored = {}
        self.payloads = set()
        self.generated = 0
        self.draw(0)

    def spent(self, number):
        """Somebody sampled so much."""
        self.generated += number
        return Outcome(-1, None, number, 1)

    # -- what managers do -------------------------------------------------------------------------------------

    def admit(self, number):
        self.held += self.groups.issue(1 + number % 12, "env_manager-1", 1, self.now)

    def put(self, number):
        """Up to four rollouts, the oldest tickets first or the newest."""
        for each in range(1 + number % 4):
            if not self.held:
                return
            ticket = self.held.pop(0 if number % 5 else -1)
            if self.groups.settled_fate(ticket) is not None:
                self.late(ticket, number)
                continue
            first = min(ticket.version + number % 3, self.groups.training.version)
            payload, digest = (None, "digest") if number % 7 == 0 else (b"payload", "")
            outcome = Outcome(first, float((number + each) % 2), self.spent(number % 50).tokens)
            self.groups.score(ticket.trajectory_id, outcome, payload, digest)

    def give_up(self, number):
        if not self.held:
            return
        ticket = self.held.pop(number % len(self.held))
        if self.groups.settled_fate(ticket) is not None:
            self.late(ticket, number)
            return
        spent = self.spent(number % 40)
        if number % 2:
            self.groups.take_back(ticket.trajectory_id, "env_timeout", counted=True, spent=spent)
        else:
            self.groups.fail(ticket.trajectory_id, "failed", "env_step_failed", spent)

    def late(self, ticket, number):
        """Told twice, it counts once; of an attempt that was replaced, not at all."""
        group, index = self.groups._look_up(ticket.trajectory_id) or (None, 0)
        member = group and group.members[index]
        if member and member.attempt == ticket.attempt:
            ran = group.state == "ended" and member.state == "running"
            if ran or (member.fate == "surplus" and member.outcome == UNKNOWN):
                self.spent(number % 30)
        for _ in range(2):
            self.groups.late(ticket, Outcome(-1, None, number % 30))

    def unsend(self, number):
        if self.held:
            self.groups.unsend([self.held.pop(number % len(self.held))])

    def lapse(self, number):
        self.now += (0.0, 6.0, 11.0)[number % 3]
        for name in sorted(n for n, lapses in self.groups.leases.items() if lapses <= self.now):
            self.groups.take_back(name, "lease_lapsed", counted=True)
            self.groups.leases.pop(name, None)

    def lose(self, number):
        ready = list(self.groups.ready())
        if ready:
            group = ready[number % len(ready)]
            index = group.scored[number % group.num_scored]
            self.write(0)
            self.payloads.discard(f"{group.id}.{index}")
            self.groups.lose(group, [index])

    # -- what the trainer does --------------------------------------------------------------------------------

    def claim(self, number):
        """The step behind the last one, or the first that was poisoned."""
        step = next(s for s in range(self.groups.training.committed + 1, STEPS + 3) if s not in self.groups.steps)
        self.groups.advance(step - 1)
        if step > STEPS:
            return
        plan = self.groups.plan(step, BATCH_GROUPS)
        if not plan.take:
            return
        chosen = self.groups.chosen(plan)
        self.groups.bind(step, chosen)
        assert len(chosen) == BATCH_GROUPS
        for group in chosen:
            assert 2 <= group.num_scored <= self.limits.group_size
            for index in group.scored:
                age = step - 1 - group.members[index].outcome.version_first
                assert self.alpha < 0 or age <= self.alpha
        self.told(step)

    def told(self, step):
        """What the trainer is handed: the order, and the receipt for its checkpoint."""
        groups = self.groups.steps[step]
        self.bound[step] = [group.id for group in groups]
        ends = tuple(end for group in groups for end in group.ends(self.term))
        self.receipts[step] = Receipt(step, self.groups.training.cursor, ends)

    def advance(self, number):
        if bound := self.steps_in_state("bound"):
            self.groups.advance(bound[0])
            self.groups.drop_old(min_version(self.groups.base + 1, self.alpha))

    def commit(self, number):
        if steps := self.trained_steps():
            self.groups.commit(steps[number % len(steps)], self.term)

    def draw(self, number):
        """Another trainer begins after a checkpoint that covers some of what was trained."""
        self.term += 1
        saved = [self.groups.training.committed, *self.trained_steps()]
        self.groups.take_over(self.term, saved[number % len(saved)])
        assert not self.groups.trained
        for step, groups in self.groups.steps.items():
            assert [group.id for group in groups] == self.bound[step], "the same groups in the same order"
            assert {group.state for group in groups} == {"bound"}

    def raises(self, number):
        if steps := self.steps_in_state("bound"):
            step = steps[0]
            self.term += 1
            self.groups.check_term(self.term)
            for group in self.groups.raised(step, self.term):
                assert group.fate == "poisoned"
                self.receipts.pop(step, None)

    # -- what dies and comes back -----------------------------------------------------------------------------

    def write(self, number):
        """The journal's write: what is durable from now on."""
        changes = self.groups.take_changes()
        for name in changes.groups:
            group = self.groups.live.get(name) or self.groups.trained.get(name)
            self.stored.pop(name, None)
            if group is not None:
                self.stored[name] = msgspec.msgpack.encode(group)
        for name, payload in changes.payloads.items():
            (self.payloads.discard if payload is None else self.payloads.add)(name)
        self.logged += changes.ends

    def restart(self, number):
        """A new buffer goes on from what was written, with or without a checkpoint that says the same."""
        self.write(0)
        before, self.groups = self.groups, Groups(self.limits, self.alpha)
        groups = [msgspec.msgpack.decode(value, type=Group) for _, value in sorted(self.stored.items())]
        training = msgspec.msgpack.decode(msgspec.msgpack.encode(before.training), type=Training)
        self.groups.restore(training, groups, self.now)
        if number % 2:
            known = [step for step in sorted(self.receipts) if step in before.steps]
            self.groups.cover(self.receipts[step] for step in known)
        assert self.groups.live == before.live
        assert self.groups.trained == before.trained
        assert self.groups.steps == before.steps
        assert list(self.groups.live) == list(before.live)
        self.cancelled |= {key(ticket) for ticket in self.held if not self.groups.wants(*key(ticket))}  # as they renew

    # -- what always holds ------------------------------------------------------------------------------------

    def check(self):
        self.check_ends()
        self.check_slots()
        self.check_steps()
        self.check_tokens()
        self.check_cancels()

    def check_cancels(self):
        """Whoever runs something in vain was told so, and nobody else."""
        told = self.groups.take_cancels().get(("env_manager-1", 1), [])
        assert len(told) == len(set(told))
        assert not any(self.groups.wants(*rollout) for rollout in told)
        self.cancelled |= set(told)
        assert {key(ticket) for ticket in self.held if not self.groups.wants(*key(ticket))} <= self.cancelled

    def check_tokens(self):
        """What was sampled is held, or has a fate; and every sample that ended has the length it was sampled to."""
        tally, alive = self.groups.training.tally, (*self.groups.live.values(), *self.groups.trained.values())
        held = sum(sum(group.held_tokens) for group in alive)
        assert tally.generated == sum(tally.tokens.values()) + held == self.generated
        ended = Counter(end.fate != "unused" for end in [*self.logged, *self.groups.changes.ends])
        assert sum(length.ended for length in tally.lengths.values()) == ended[True]

    def check_ends(self):
        """One end per sample: of each that can't train any more, and of no other."""
        ends = [*self.logged, *self.groups.changes.ends]
        times = Counter(end.trajectory_id for end in ends)
        alive = {**self.groups.live, **self.groups.trained}
        expected = Counter(
            f"{name}.{index}"
            for name in (f"g{number:08d}" for number in range(self.groups.training.cursor))
            for index in range(self.limits.group_size + self.limits.extra_rollouts)
            if name not in alive or alive[name].members[index].state == "failed"
        )
        assert times == expected
        for end in ends:
            if end.fate in TRAINED:
                assert 0 < end.step <= self.groups.training.committed
                assert self.alpha < 0 or end.step - 1 - end.outcome.version_first <= self.alpha
            else:
                assert (end.step, end.term) == (0, 0)

    def check_slots(self):
        """Slots are what is open, ready or bound; only open groups have rollouts that run."""
        live = self.groups.live
        assert list(live) == sorted(live)
        assert {group.state for group in live.values()} <= {"open", "ready", "bound"}
        assert {group.state for group in self.groups.trained.values()} <= {"trained"}
        batches = 3 if self.alpha < 0 else self.alpha + 1
        bound = sum(group.state == "bound" for group in live.values())
        assert len(live) <= batches * BATCH_GROUPS + bound
        running = set()
        for group in live.values():
            assert (group.state == "open") == (not group.complete)
            running |= {f"{group.id}.{i}" for i, member in enumerate(group.members) if member.state == "running"}
        assert running == set(self.groups.leases)

    def check_steps(self):
        """A group is bound or trained exactly where a step has it, and one step has it."""
        inside = [group.id for groups in self.groups.steps.values() for group in groups]
        assert len(inside) == len(set(inside))
        for step, groups in self.groups.steps.items():
            assert step > self.groups.training.committed
            assert {group.step for group in groups} == {step}
        for group in (*self.groups.live.values(), *self.groups.trained.values()):
            assert (group.id in inside) == (group.state in ("bound", "trained"))

    def check_stored(self):
        """Once everything is written, the Store has what lives, and nothing else."""
        self.write(0)
        alive = {**self.groups.live, **self.groups.trained}
        assert set(self.stored) == set(alive)
        assert self.payloads == {
            f"{group.id}.{index}" for group in alive.values() for index in group.scored if not group.members[index].digest
        }

    def steps_in_state(self, state):
        return sorted(step for step, groups in self.groups.steps.items() if {g.state for g in groups} == {state})

    def trained_steps(self):
        """A checkpoint covers every step up to its own."""
        trained, found = set(self.steps_in_state("trained")), []
        while self.groups.training.committed + len(found) + 1 in trained:
            found.append(self.groups.training.committed + len(found) + 1)
        return found


def key(ticket):
    return ticket.trajectory_id, ticket.attempt


EVENTS = ("admit", "admit", "put", "put", "put", "put", "give_up", "unsend", "lapse", "lose")
EVENTS += ("claim", "claim", "advance", "advance", "commit", "draw", "raises", "write", "restart")


@example(alpha=-1, group_size=2, extra=0, events=[*[("admit", 0)] * 17, ("give_up", 1), ("admit", 0), ("lapse", 506)])
@settings(max_examples=60, deadline=None)
@given(
    alpha=st.sampled_from([-1, 0, 1, 2, 4]),
    group_size=st.integers(2, 4),
    extra=st.integers(0, 2),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000)), min_size=20, max_size=120),
)
def test_whatever_happens_in_whatever_order_every_sample_ends_once(alpha, group_size, extra, events):
    life = Life(alpha, group_size, extra)
    for name, number in events:
        getattr(life, name)(number)
        life.check()
    life.check_stored()


@settings(max_examples=20, deadline=None)
@given(alpha=st.sampled_from([-1, 0, 1, 2]), seed=st.lists(st.integers(0, 1000), min_size=10, max_size=40))
def test_a_job_goes_on_after_whatever_happened(alpha, seed):
    """Managers and a trainer that do their work reach the next step, whichever disturbances came before."""
    life = Life(alpha, 2)
    for number in seed:
        for name in ("admit", "put", "put", EVENTS[number % len(EVENTS)], "put"):
            getattr(life, name)(number)
    life.lapse(2)
    before = life.groups.training.committed
    for number in range(40):
        for name in ("admit", "put", "put", "put", "claim", "advance", "commit"):
            getattr(life, name)(number * 4 + 3)
        life.lapse(2 if number % 10 == 9 else 0)
        life.check()

    assert life.groups.training.committed >= min(before + 2, STEPS)

"""The buffer's groups go by rounds: whatever fails, restarts or is forgotten, every row is trained exactly once in each epoch."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.actors.batching.tail_batching import PUT_OFF, TailBatching
from rubato.actors.data.prompts import Mixture, Prompts
from rubato.actors.samples.group import Group, GroupLimits, Receipt, Training
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import Outcome
from rubato.planning.prompts import Epochs, shuffled

decode, encode = msgspec.msgpack.decode, msgspec.msgpack.encode


@dataclass
class Job:
    """A trainer with checkpoints, a buffer, and a Store that may lose its newest writes, all in one loop of random events."""

    alpha: int
    batch_groups: int
    group_size: int
    rows: int
    epochs: int
    etas: tuple[float, float]
    seed: int
    faults: bool
    history: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """Step → rows, as the weights of now were made."""
    receipts: dict[int, bytes] = field(default_factory=dict)
    checkpoint: tuple[int, dict, dict] = (0, {}, {})
    term: int = 0
    step: int = 0
    """Trained by the trainer that lives."""
    ends: list = field(default_factory=list)
    sizes: list = field(default_factory=list)
    ages: list = field(default_factory=list)
    kinds: list = field(default_factory=list)

    def buffer(self):
        prompts = Prompts(1.0, Epochs(lambda epoch: shuffled(self.rows, self.seed, epoch)), rows=self.rows)
        steps = -(-self.rows * self.epochs // self.batch_groups)
        limits = GroupLimits(self.group_size, self.batch_groups, steps, 1, 99, 8, 1e9, mixture=Mixture({"task": prompts}))
        tail = partial(TailBatching, etas=self.etas, on_round=lambda round_: self.kinds.append(round_.kind))
        return Groups(limits, self.alpha, [tail])

    def begin(self):
        self.chance, self.groups = Random(self.seed), self.buffer()
        self.groups.restore(Training(), [], 0.0)
        self.running, self.old = [], self.stored()

    def run(self):
        self.begin()
        return self.go_on()

    def go_on(self):
        for _ in range(20_000):
            self.tick()
            if self.checkpoint[0] == self.groups.limits.steps:
                return self
        raise AssertionError("it never ends")

    def stored(self):
        alive = [group for group in self.groups.live.values() if group.state != "ended"]
        alive += self.groups.trained.values()
        return encode(self.groups.record()), [encode(group) for group in sorted(alive, key=lambda group: group.id)]

    def tick(self):
        self.running += self.groups.issue(self.chance.randint(0, 20), "env_manager-1", 1, 0.0)
        for _ in range(min(len(self.running), self.chance.randint(0, 12))):
            self.rollout(self.running.pop(self.chance.randrange(len(self.running))))
        if self.step < self.groups.limits.steps:
            self.train()
        if self.chance.random() < 0.3 and self.step > self.checkpoint[0]:
            self.save()
        if self.faults:
            self.disturb()
        self.ends += self.groups.take_changes().ends

    def rollout(self, ticket):
        if self.groups.settled_fate(ticket) is not None:
            return
        if self.faults and self.chance.random() < 0.05:
            self.groups.take_back(ticket.trajectory_id, "lost", counted=False)
            return
        self.groups.score(ticket.trajectory_id, Outcome(ticket.version, self.chance.random(), 5), b"sample")

    def train(self):
        step = self.step + 1
        self.groups.advance(self.step)
        if step not in self.groups.steps:
            plan = self.groups.plan(step, self.batch_groups)
            if not plan.take:
                return
            self.groups.bind(step, self.groups.chosen(plan))
        bound, training = self.groups.steps[step], self.groups.record()
        ends = tuple(end for group in bound for end in group.ends(self.term))
        self.receipts[step] = encode(Receipt(step, training.cursor, ends, training.policies))
        self.history[step] = [(group.task, group.row) for group in bound]
        self.sizes += [group.num_scored for group in bound]
        self.ages += [step - 1 - group.version_scored(0) for group in bound]
        if self.chance.random() < 0.8:
            self.step = step
            self.groups.advance(step)

    def save(self):
        kept = [{step: each[step] for step in each if step <= self.step} for each in (self.history, self.receipts)]
        self.checkpoint = (self.step, *kept)
        self.groups.commit(self.step, self.term)
        self.groups.advance(self.step)

    def disturb(self):
        held = {(ticket.trajectory_id, ticket.attempt) for ticket in self.running}
        for name in [name for name, member in self.groups.running() if (name, member.attempt) not in held]:
            self.groups.take_back(name, "lease_lapsed", counted=False)
        event = self.chance.random()
        if event < 0.03:
            self.trainer_falls_back()
        elif event < 0.06:
            self.buffer_restarts(self.stored())
        elif event < 0.09:
            self.buffer_restarts(self.old)
            self.trainer_falls_back()
        elif event < 0.13:
            self.old = self.stored()

    def trainer_falls_back(self):
        self.term += 1
        self.step, self.history, self.receipts = self.checkpoint[0], dict(self.checkpoint[1]), dict(self.checkpoint[2])
        self.groups.cover(self.known_receipts())
        self.groups.take_over(self.term, self.step)

    def known_receipts(self):
        return [decode(self.checkpoint[2][step], type=Receipt) for step in sorted(self.checkpoint[2])]

    def buffer_restarts(self, stored):
        self.ends += self.groups.take_changes().ends
        training, groups = stored
        self.groups = self.buffer()
        self.groups.restore(decode(training, type=Training), [decode(group, type=Group) for group in groups], 0.0)
        self.groups.training.term = self.term
        self.groups.cover(self.known_receipts())


jobs = st.builds(
    Job,
    alpha=st.integers(0, 3),
    batch_groups=st.integers(1, 5),
    group_size=st.integers(2, 4),
    rows=st.sampled_from((4, 6, 10, 20)),
    epochs=st.integers(1, 3),
    etas=st.sampled_from(((1.0, 1.0), (1.25, 1.25), (1.5, 1.0), (1.0, 1.5), (2.0, 1.5))),
    seed=st.integers(0, 10_000),
    faults=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(job=jobs)
def test_every_row_is_trained_once_in_each_epoch_whatever_restarts_and_whatever_the_store_forgets(job):
    job.run()

    trained = Counter(row for rows in job.history.values() for _, row in rows)
    beyond = -(-job.rows * job.epochs // job.batch_groups) * job.batch_groups - job.rows * job.epochs
    assert set(job.sizes) == {job.group_size}
    assert max(job.ages) <= job.alpha
    assert sorted(trained) == list(range(job.rows))
    assert set(trained.values()) <= {job.epochs, *((job.epochs + 1,) if beyond else ())}
    assert sum(trained.values()) == job.rows * job.epochs + beyond


def test_what_a_round_puts_off_ends_as_surplus_and_its_prompt_comes_back():
    job = Job(alpha=0, batch_groups=4, group_size=2, rows=20, epochs=2, etas=(1.25, 1.5), seed=3, faults=False).run()

    put_off = [end for end in job.ends if end.reason == PUT_OFF]
    trained = Counter(row for rows in job.history.values() for _, row in rows)
    assert {"short", "long"} == set(job.kinds)
    assert put_off
    assert {end.fate for end in put_off} == {"surplus"}
    assert all(trained[end.row] == 2 for end in put_off)
    gone = {end.group_id for end in put_off}
    assert not any(end.group_id in gone for end in job.ends if end.fate in ("trained", "zero_spread"))


@settings(max_examples=40, deadline=None)
@given(job=jobs, lower=st.integers(0, 2), after=st.integers(10, 60))
def test_a_run_that_goes_on_with_a_lower_alpha_trains_nothing_older_and_all_its_steps(job, lower, after):
    job.faults = False
    job.begin()
    for _ in range(after):
        job.tick()
    job.alpha = min(job.alpha, lower)

    job.buffer_restarts(job.stored())
    job.trainer_falls_back()
    job.groups.drop_bound(job.alpha)
    job.ages = []
    job.go_on()

    assert max(job.ages, default=0) <= job.alpha
    assert [*job.history] == [*range(1, job.groups.limits.steps + 1)]
    assert {len(rows) for rows in job.history.values()} == {job.batch_groups}
    assert set(job.sizes) == {job.group_size}

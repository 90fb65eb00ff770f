"""A job with random completion times: no age above the bound, no deadlock, the same twice; and nothing dropped where it waits."""

import dataclasses
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.staleness import AdmissionView, SupplyView, admit, hand_over, min_version, too_old


@dataclass
class Job:
    """The smallest model of a run: groups take `durations` ticks, a step takes `train_ticks`."""

    alpha: int
    batch_groups: int
    steps: int
    durations: list[int]
    train_ticks: int
    waits: bool = True
    version: int = 0
    claimed: int = 0
    started: int = 0
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    training: tuple[int, int] | None = None
    bound: int = 0
    ages: list[int] = field(default_factory=list)
    dropped: int = 0
    history: list[tuple] = field(default_factory=list)

    def run(self):
        tick = 0
        while True:
            self.finish(tick)
            if self.version == self.steps:
                return self
            self.hand_over(tick)
            self.admit(tick)
            due = [end for _, end in self.running.values()] + ([self.training[1]] if self.training else [])
            assert due, f"nothing runs and step {self.claimed + 1} never comes"
            tick = max(tick + 1, min(due))

    def finish(self, tick):
        if self.training and self.training[1] <= tick:
            self.version, self.training, self.bound = self.training[0], None, 0
        for group, (version, end) in sorted(self.running.items()):
            if end <= tick:
                self.ready[group] = version
                del self.running[group]

    def hand_over(self, tick):
        if self.training or self.claimed == self.steps:
            return
        step = self.claimed + 1
        ready, in_flight = tuple(self.ready.values()), tuple(version for version, _ in self.running.values())
        plan = hand_over(SupplyView(step, self.alpha, self.batch_groups, ready, in_flight), waits=self.waits)
        if not plan.take:
            return
        stale = [group for group, version in self.ready.items() if version < plan.min_version]
        self.dropped += len(stale)
        for group in stale:
            del self.ready[group]
        for _, group in sorted((version, group) for group, version in self.ready.items())[: self.batch_groups]:
            self.ages.append(step - 1 - self.ready.pop(group))
            self.history.append((step, group, tick))
        self.claimed, self.bound, self.training = step, self.batch_groups, (step, tick + self.train_ticks)
        if not self.waits:
            self.drop()

    def drop(self):
        under_way = [(group, version) for group, (version, _) in self.running.items()] + list(self.ready.items())
        for at in too_old((version for _, version in under_way), self.claimed + 1, self.alpha):
            group = under_way[at][0]
            self.running.pop(group, None)
            self.ready.pop(group, None)
            self.dropped += 1

    def admit(self, tick):
        charged = len(self.running) + len(self.ready) + self.bound
        view = AdmissionView(self.alpha, self.batch_groups, charged, self.version, self.steps)
        for _ in range(admit(view).num_groups):
            duration = self.durations[self.started % len(self.durations)]
            self.running[self.started] = (self.version, tick + duration)
            self.started += 1


jobs = st.builds(
    Job,
    alpha=st.sampled_from([-1, 0, 1, 2, 4]),
    batch_groups=st.integers(1, 6),
    steps=st.integers(1, 12),
    durations=st.lists(st.one_of(st.integers(0, 5), st.integers(50, 400)), min_size=1, max_size=40),
    train_ticks=st.integers(1, 20),
)


@given(job=jobs)
def test_the_bound_holds_and_nothing_is_dropped_whatever_the_completion_times(job):
    job.run()

    assert job.dropped == 0
    assert len(job.ages) == job.steps * job.batch_groups
    assert job.alpha == -1 or max(job.ages) <= job.alpha
    assert min(job.ages) >= 0


@given(job=jobs)
def test_the_bound_holds_and_every_step_comes_where_stragglers_are_dropped(job):
    job.waits = False
    job.run()

    assert len(job.ages) == job.steps * job.batch_groups
    assert job.alpha == -1 or max(job.ages) <= job.alpha
    assert min(job.ages) >= 0
    assert job.alpha > 0 or job.dropped == 0
    assert job.started == len(job.ages) + job.dropped + len(job.running) + len(job.ready)


@given(job=jobs)
def test_every_group_that_starts_is_trained(job):
    job.run()

    assert job.started == job.steps * job.batch_groups
    assert not job.running
    assert not job.ready


@given(job=jobs)
def test_the_same_job_runs_the_same_way_twice(job):
    again = Job(job.alpha, job.batch_groups, job.steps, job.durations, job.train_ticks)

    assert job.run().history == again.run().history


@given(
    step=st.integers(1, 50),
    alpha=st.integers(-1, 5),
    batch=st.integers(1, 6),
    ready=st.lists(st.integers(0, 50)),
    in_flight=st.lists(st.integers(0, 50)),
)
def test_a_plan_depends_on_no_order_and_takes_only_what_is_young_enough(step, alpha, batch, ready, in_flight):
    plan = hand_over(SupplyView(step, alpha, batch, tuple(ready), tuple(in_flight)))
    other = hand_over(SupplyView(step, alpha, batch, tuple(ready[::-1]), tuple(in_flight[::-1])))

    assert [ready[at] for at in plan.chosen] == [ready[::-1][at] for at in other.chosen]
    assert dataclasses.replace(plan, chosen=()) == dataclasses.replace(other, chosen=())
    assert len(set(plan.chosen)) == len(plan.chosen) == (batch if plan.take else 0)
    assert all(ready[at] >= plan.min_version for at in plan.chosen)
    assert plan.why
    assert plan.min_version == min_version(step, alpha)
    assert not plan.take or sum(version >= plan.min_version for version in ready) >= batch


@given(step=st.integers(1, 50), alpha=st.integers(-1, 5), batch=st.integers(1, 6), ready=st.lists(st.integers(0, 50)))
def test_with_nothing_in_flight_enough_groups_are_never_withheld(step, alpha, batch, ready):
    plan = hand_over(SupplyView(step, alpha, batch, tuple(ready), ()))

    assert plan.take == (sum(version >= plan.min_version for version in ready) >= batch)

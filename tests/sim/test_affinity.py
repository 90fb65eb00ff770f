"""Learned affinity in virtual time: the live planner over a whole job."""

import pytest
from pydantic import ValidationError

from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.sim.affinity_model import ModelledAffinity, fixed_shares
from rubato.sim.buffer_model import NEVER_LAPSES_S, ModelledBuffer
from rubato.sim.cluster import ClusterCosts, ClusterJobSpec, PoolSpec, engines_of
from rubato.sim.job import Job
from rubato.sim.manager_model import TurnRequest
from rubato.sim.proxy_model import ModelledProxy
from rubato.sim.timeline import Timeline
from rubato.sim.workload import Episode, TaskSpec, episode, task_of
from tests.sim.test_job import part


def engine(gpu: str, **changes) -> dict:
    return {"gpu": part(f"hardware/{gpu}.yaml"), "model": part("models/qwen3-8b.yaml"), "num_slots": 16, **changes}


def pool(gpu: str, count: int, **changes) -> PoolSpec:
    return PoolSpec.model_validate({"name": gpu, "count": count, "engine": engine(gpu), **changes})


def task(name: str, shown: int, sampled: int) -> TaskSpec:
    one = {law: {"law": "constant", "value": value} for law, value in {"turns": 1, "prompt_tokens": shown, "observation_tokens": 1, "action_tokens": sampled}.items()}  # fmt: skip
    return TaskSpec.model_validate({"name": name, **one})


READ, WRITE = (2400, 8), (32, 512)
STEPS, SWAP_AT = 10, 5


class Swapping(ClusterCosts):
    """From the groups of step `swap_at` on each task has the other's profile."""

    def __init__(self, spec: ClusterJobSpec, swap_at: int) -> None:
        super().__init__(spec, seed=1)
        self._swap_at = swap_at
        self._tasks = (task("a", *READ), task("b", *WRITE)), (task("a", *WRITE), task("b", *READ))
        self.job = spec

    def episode(self, ticket) -> Episode:
        late = int(ticket.group_id[1:]) >= self._swap_at * self.job.batch_groups
        drawn = task_of(self._tasks[late], 1, ticket.group_id)
        return episode(drawn, 1, ticket.trajectory_id, ticket.attempt)


def job(pools, swap_at=10**6, **changes) -> tuple[Job, Swapping]:
    spec = ClusterJobSpec.model_validate({
        "pools": pools, "trainer": {"gpu": part("hardware/h800.yaml"), "model": part("models/qwen3-8b.yaml"), "gpus": 8}, "tasks": [task("a", *READ), task("b", *WRITE)],
        "weights": {"push_bytes_s": 1e11, "pull_bytes_s": 1e11, "load_bytes_s": 1e11},
        "batch_groups": 32, "group_size": 4, "environments": 96, "steps": STEPS, "alpha": 1, **changes,
    })  # fmt: skip
    costs = Swapping(spec, swap_at)
    limits = GroupLimits(
        group_size=4, batch_groups=32, steps=STEPS, run_seed=1, max_attempts=3, unbounded_batches=8,
        ticket_ttl_s=NEVER_LAPSES_S,
    )  # fmt: skip
    return Job(ModelledBuffer(costs.timeline, Groups(limits, spec.alpha)), STEPS, costs), costs


def seconds(simulated: Job) -> float:
    """Of the second half of the steps."""
    rows = simulated.run()
    return rows[-1].ended_s - rows[STEPS // 2 - 1].ended_s


MIXED = [pool("h800", 1), pool("h20", 3)]


def mapped(**tasks: str) -> list[PoolSpec]:
    return [pool(gpu, n, tasks=[t for t, g in tasks.items() if g == gpu]) for gpu, n in (("h800", 1), ("h20", 3))]


def test_what_is_learned_comes_within_five_percent_of_the_best_map_and_beats_each_class_alone():
    learned = seconds(job(MIXED, affinity="learned")[0])
    maps = [seconds(job(mapped(a=first, b=second))[0]) for first in ("h800", "h20") for second in ("h800", "h20")]
    alone = [seconds(job([pool("h800", 2)])[0]), seconds(job([pool("h20", 6)])[0])]

    assert learned <= min(maps) / 0.95
    assert learned * 1.2 <= max(alone)


def test_tasks_that_change_places_are_mapped_anew_within_three_steps():
    simulated, costs = job(MIXED, SWAP_AT, affinity="learned")
    simulated.run()

    favourites = [{t: max(shares, key=shares.get) for t, shares in plan.shares.items()} for plan in costs.affinity.plans]
    assert favourites[SWAP_AT - 1] == {"a": "h800", "b": "h20"}
    assert favourites[SWAP_AT + 2] == {"a": "h20", "b": "h800"}


def test_with_one_class_nothing_is_counted_and_the_job_is_that_without_affinity():
    without, _ = job([pool("h800", 2)])
    learned, costs = job([pool("h800", 2)], affinity="learned")

    assert without.run() == learned.run()
    assert costs.affinity.plans == []
    assert all(each.usage.seen is None for each in costs.engines)


def test_a_domain_whose_pool_is_full_holds_up_no_other():
    timeline = Timeline()
    pools = (pool("h800", 1), pool("h20", 1))
    engines = engines_of(timeline, pools)
    affinity = ModelledAffinity({"h800": engines[:1], "h20": engines[1:]}, {"a": {"h800": 1.0}, "b": {"h20": 1.0}}, learned=False)
    proxy = ModelledProxy(timeline, engines, affinity)
    for number in range(40):
        timeline.start(proxy.generate(TurnRequest(f"a{number}"), 100, 2000, "a"))
    asked = timeline.start(proxy.generate(TurnRequest("b0"), 100, 2, "b"))

    timeline.run(until=asked.ended)

    assert timeline.now < 1.0
    assert engines[1].usage.prefilled == 100


def test_pools_that_name_one_domain_share_it_by_their_engines():
    shares = fixed_shares({"near": ("a",), "far": ("a", "b")}, {"near": 1, "far": 3})

    assert shares == {"a": {"near": 0.25, "far": 0.75}, "b": {"far": 1.0}}


def test_a_job_that_learns_takes_no_tasks_of_its_pools():
    with pytest.raises(ValidationError, match="affinity is learned, so tasks of the pool h800 have no effect"):
        job(mapped(a="h800", b="h20"), affinity="learned")

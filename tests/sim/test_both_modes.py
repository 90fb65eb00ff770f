"""The modelled job and the real actors agree on throughput: same episodes, same engine and trainer models, same planners."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from rubato.sim.cluster import ClusterCosts, ClusterJobSpec, cluster_job
from rubato.sim.live.run import run

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
WARM = 2


def part(name: str) -> dict:
    return yaml.safe_load((CONFIGS / name).read_text())


def job(alpha: int, engines: int = 2) -> ClusterJobSpec:
    """Eight rollouts and two groups of a step per engine."""
    engine = {"gpu": part("hardware/h800.yaml"), "model": part("models/qwen3-8b.yaml"), "num_slots": 16}
    task = {
        "name": "game", "turns": {"law": "uniform", "low": 3, "high": 8}, "prompt_tokens": {"law": "constant", "value": 200},
        "observation_tokens": {"law": "constant", "value": 50}, "action_tokens": {"law": "constant", "value": 64}, "max_context": 2048,
        "step_s": {"law": "lognormal", "median": 1.0, "sigma": 0.8, "most": 20},
    }  # fmt: skip
    pool = {"name": "h800", "count": engines, "engine": engine}
    trainer = {"gpu": engine["gpu"], "model": engine["model"], "gpus": 1, "fixed_s": 1.0}
    weights = {"push_bytes_s": 1e12, "pull_bytes_s": 1e12, "load_bytes_s": 1e11}
    return ClusterJobSpec.model_validate(
        {
            "pools": [pool], "trainer": trainer, "tasks": [task], "weights": weights, "alpha": alpha,
            "batch_groups": 2 * engines, "group_size": 4, "environments": 8 * engines, "steps": 10 if engines == 2 else 4,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("alpha", "engines"), [(0, 2), (1, 2), pytest.param(1, 48, marks=pytest.mark.nightly)])
def test_both_modes_agree_on_throughput_within_3_percent(alpha, engines, tmp_path):
    spec = job(alpha, engines)
    modelled = cluster_job(spec, seed=1)

    modelled.run()
    rows = run(spec, 1, tmp_path).rows

    ours = modelled.rows[-1].published_s - modelled.rows[WARM - 1].published_s
    live = rows[-1]["time/wall_s"] - rows[WARM - 1]["time/wall_s"]
    print(f"alpha {alpha}, {engines} engines: modelled {ours:.2f} s, real actors {live:.2f} s")
    assert len(rows) == spec.steps
    assert live == pytest.approx(ours, rel=0.03)


def test_alpha_adapts_in_both_modes_alike(tmp_path):
    spec = job(1).model_copy(update={"alpha": "auto", "alpha_max": 3, "environments": 32, "steps": 30})
    modelled = cluster_job(spec, seed=1)

    modelled.run()
    rows = run(spec, 1, tmp_path).rows

    alphas = [1] + [int(row["staleness/alpha"]) for row in rows]
    moved = [(step, after) for step, (before, after) in enumerate(pairwise(alphas), 1) if before != after]
    assert moved == [(step, alpha) for step, alpha, _ in modelled.buffer.alphas]
    assert [alpha for _, alpha in moved] == [2, 3]


def test_a_step_may_take_minutes(tmp_path):
    spec = job(1)
    trainer = spec.trainer.model_copy(update={"fixed_s": 300.0})

    rows = run(spec.model_copy(update={"trainer": trainer, "steps": 2}), 1, tmp_path).rows

    assert [row["step"] for row in rows] == [1, 2]


READ = {
    "name": "read", "turns": {"law": "uniform", "low": 2, "high": 4}, "prompt_tokens": {"law": "uniform", "low": 1000, "high": 3000},
    "observation_tokens": {"law": "uniform", "low": 200, "high": 600}, "action_tokens": {"law": "uniform", "low": 8, "high": 40},
    "max_context": 8192, "step_s": {"law": "lognormal", "median": 0.5, "sigma": 0.5, "most": 5},
}  # fmt: skip
WRITE = {
    "name": "write", "turns": {"value": 1}, "prompt_tokens": {"law": "uniform", "low": 100, "high": 200},
    "observation_tokens": {"value": 20}, "action_tokens": {"law": "uniform", "low": 200, "high": 1200}, "max_context": 2048,
    "share": 2,
}  # fmt: skip


def pool(name: str, gpu: str, count: int, **changes) -> dict:
    engine = {"gpu": part(f"hardware/{gpu}.yaml"), "model": part("models/qwen3-8b.yaml"), "num_slots": 16}
    return {"name": name, "count": count, "engine": engine, **changes}


def slow_network(given: dict, bytes_s: float) -> dict:
    return {**given, "engine": {**given["engine"], "gpu": {**given["engine"]["gpu"], "nic_busbw_bytes_s": bytes_s}}}


def mixed(**changes) -> ClusterJobSpec:
    """Two tasks on two engines, eight rollouts each."""
    given = job(1).model_dump(mode="json") | {"pools": [pool("compute", "h800", 2)], "tasks": [READ, WRITE], "draw": "mixture"}
    return ClusterJobSpec.model_validate(given | {"batch_groups": 4, "environments": 24, "steps": 8} | changes)


KINDS = {
    "tasks": mixed(),
    "pools and affinity": mixed(pools=[pool("compute", "h800", 1, tasks=["read"]), pool("memory", "h20", 2, tasks=["write"])]),
    "learned affinity": mixed(pools=[pool("compute", "h800", 1), pool("memory", "h20", 2)], affinity="learned"),
    "stragglers dropped": mixed(
        tasks=[{**READ, "share": 2}, {**WRITE, "action_tokens": {"law": "quantiles", "points": [[0, 100], [0.9, 200], [1, 1600]]}}],
        stragglers="drop", steps=16,
    ),
    "rewards": mixed(tasks=[READ, {**WRITE, "reward_s": {"law": "uniform", "low": 0.3, "high": 0.9}}], reward_workers=2),
    "elastic rewards": mixed(
        tasks=[READ, {**WRITE, "reward_s": {"law": "uniform", "low": 0.3, "high": 0.9}}],
        reward_workers=4, reward_min_workers=0, reward_start_s=0.3,
    ),
    "prefill and decode": mixed(
        pools=[pool("reads", "h800", 1, serves="prefill"), pool("writes", "h20", 2, serves="decode")], environments=32
    ),
    "moves": mixed(pools=[slow_network(pool("compute", "h800", 2), 50e9)], move_every_s=0.2),
    "moves over a slow network": mixed(pools=[slow_network(pool("compute", "h800", 2), 1e9)], move_every_s=0.2),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_both_modes_agree_within_3_percent_on_each_kind_of_job(kind, tmp_path):
    """Over three seeds: equals are routed by the names of engines and sessions, which the modes do not share, so one seed is chance."""
    spec, ours, real = KINDS[kind], 0.0, 0.0
    for seed in (1, 2, 3):
        modelled, folder = cluster_job(spec, seed), tmp_path / str(seed)
        folder.mkdir()

        modelled.run()
        live = run(spec, seed, folder)

        assert bool(modelled.buffer.fates.get("cancelled")) == (spec.stragglers == "drop")
        ours += modelled.rows[-1].published_s - modelled.rows[WARM - 1].published_s
        real += live.rows[-1]["time/wall_s"] - live.rows[WARM - 1]["time/wall_s"]
        assert bool(live.moved) == kind.startswith("moves")
    print(f"{kind}: modelled {ours:.2f} s, real actors {real:.2f} s ({real / ours - 1:+.1%})")
    assert real == pytest.approx(ours, rel=0.03)


def test_reward_workers_come_and_go_in_both_modes_alike(tmp_path):
    spec, made = KINDS["elastic rewards"], []
    modelled = cluster_job(spec, 1, costs=lambda *given: made.append(ClusterCosts(*given)) or made[0])

    modelled.run()
    live = run(spec, 1, tmp_path)

    workers = made[0].reward_workers
    assert workers.most == spec.reward_workers
    assert workers.cold_starts > 2 * spec.reward_workers  # they went, and came again
    assert live.reward_starts == pytest.approx(workers.cold_starts, rel=0.2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward_workers": 2, "reward_min_workers": 3}, "reward_min_workers=3 is more than reward_workers=2"),
        ({"reward_min_workers": 0}, "no effect without reward_workers"),
    ],
)
def test_bounds_of_reward_workers_that_can_not_be_are_one_sentence(changes, said):
    with pytest.raises(ValueError, match=said):
        mixed(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draw": "chance"}, "set draw to mixture"),
        ({"tasks": [{**WRITE, "reward_failure": 0.1}]}, "no reward fails"),
        ({"tasks": [{**WRITE, "reward_s": {"value": 1}}]}, "set reward_workers"),
        ({"pools": [pool("a", "h800", 1, tasks=["read"]), pool("b", "h20", 1, tasks=["read"])]}, "name it in one pool"),
    ],
)
def test_the_real_actors_are_not_run_where_they_could_not_agree(changes, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        run(mixed(**changes), 1, tmp_path)


def test_stages_are_all_or_none():
    with pytest.raises(ValueError, match="need pools for both stages"):
        mixed(pools=[pool("reads", "h800", 1, serves="prefill")])

"""The modelled job and the real actors agree on throughput: same episodes, same engine and trainer models, same planners."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from sim.cluster import ClusterJobSpec, cluster_job
from sim.live.run import run

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


@pytest.mark.parametrize(
    ("alpha", "engines"),
    [pytest.param(0, 2, marks=pytest.mark.slow), (1, 2), pytest.param(1, 48, marks=pytest.mark.slow)],
)
def test_both_modes_agree_on_throughput_within_3_percent(alpha, engines, tmp_path):
    spec = job(alpha, engines)
    modelled = cluster_job(spec, seed=1)

    modelled.run()
    rows = run(spec, 1, tmp_path)

    ours = modelled.rows[-1].published_s - modelled.rows[WARM - 1].published_s
    live = rows[-1]["time/wall_s"] - rows[WARM - 1]["time/wall_s"]
    print(f"alpha {alpha}, {engines} engines: modelled {ours:.2f} s, real actors {live:.2f} s")
    assert len(rows) == spec.steps
    assert live == pytest.approx(ours, rel=0.03)


def test_alpha_adapts_in_both_modes_alike(tmp_path):
    spec = job(1).model_copy(update={"alpha": "auto", "alpha_max": 3, "environments": 32, "steps": 30})
    modelled = cluster_job(spec, seed=1)

    modelled.run()
    rows = run(spec, 1, tmp_path)

    alphas = [1] + [int(row["staleness/alpha"]) for row in rows]
    moved = [(step, after) for step, (before, after) in enumerate(pairwise(alphas), 1) if before != after]
    assert moved == [(step, alpha) for step, alpha, _ in modelled.buffer.alphas]
    assert [alpha for _, alpha in moved] == [2, 3]


def test_a_step_may_take_minutes(tmp_path):
    spec = job(1)
    trainer = spec.trainer.model_copy(update={"fixed_s": 300.0})

    rows = run(spec.model_copy(update={"trainer": trainer, "steps": 2}), 1, tmp_path)

    assert [row["step"] for row in rows] == [1, 2]


def test_the_real_actors_are_not_run_where_they_could_not_agree(tmp_path):
    spec = job(1)
    task = spec.tasks[0].model_copy(update={"action_tokens": spec.tasks[0].turns})

    with pytest.raises(ValueError, match="one constant number of tokens"):
        run(spec.model_copy(update={"tasks": (task,)}), 1, tmp_path)

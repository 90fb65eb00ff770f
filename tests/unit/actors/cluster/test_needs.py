"""What a job takes of a cluster, as its config says."""

from pathlib import Path

import pytest

from rubato.actors.cluster.needs import limit_over, needs_of
from rubato.runtime.config.compose import load

CONFIGS = Path(__file__).parents[4] / "configs"


def needs(*overrides, config="cluster_job.yaml"):
    return needs_of(load(CONFIGS / config, overrides))


def test_a_scripted_step_is_known_with_every_response_at_max_tokens():
    found = needs()
    halves = needs("engine.num_slots=8")
    longer = needs("rollout.max_new_tokens=8")

    assert (found.rollout_s, found.train_s) == pytest.approx((24 * 0.04, 1.0))
    assert halves.rollout_s == pytest.approx(2 * found.rollout_s)
    assert longer.rollout_s == pytest.approx(2 * found.rollout_s)


def test_a_paced_engine_s_model_and_hardware_count():
    slow = needs("engine.pace={hardware: h20, model: qwen3-8b, scale: 10}")
    fast = needs("engine.pace={hardware: h20, model: qwen3-8b}")

    assert slow.rollout_s == pytest.approx(10 * fast.rollout_s)
    assert fast.rollout_bytes == pytest.approx(4 * 8.19e9, rel=0.01)
    assert fast.train_bytes == pytest.approx(18 * 8.19e9, rel=0.01)


def test_of_an_engine_that_computes_nothing_is_known_beforehand():
    found = needs(config="quickstart.yaml")

    assert (found.rollout_s, found.train_s) == (0.0, 0.0)
    assert (found.rollout_gpus, found.train_gpus) == (2, 1)


def test_gpus_of_pools_are_counted():
    found = needs("actors.engine={class: 'rubato.actors.engines.worker:EngineWorker', pools: {far: {count: 2, gpus: 4}}}")

    assert found.rollout_gpus == 8


def test_what_a_step_would_take_at_max_tokens_follows_from_what_it_sampled():
    found = needs(config="quickstart.yaml")

    assert (found.max_tokens, found.steps, found.engines, found.cores) == (14, 130, 2, 1.0)
    assert limit_over({"rollout/sampled_mean": 3.5}, found) == pytest.approx(4.0)
    assert limit_over({"rollout/sampled_mean": 20.0}, found) == 1.0
    assert limit_over({"step": 3.0}, found) == 0.0


def test_workers_that_a_job_names_take_a_core_each():
    assert needs("env.workers=4", config="quickstart.yaml").cores == 4.0

"""Failures in RLSim: what a hit costs follows from who was away, and from nothing else."""

from itertools import count
from pathlib import Path

import pytest

from rubato.runtime.errors import ConfigError
from rubato.sim.failures import ROLES, hits_of, useful_share
from rubato.sim.outcome import silent
from rubato.sim.scenario import load

SCENARIO = Path(__file__).parents[2] / "configs" / "sim" / "failures.yaml"
STEPS, PACE_S, AWAY_S = 8, 20.0, 3.0
ONE_HIT = [f"job.steps={STEPS}", f"job.every={STEPS}", *(f"away_s.{role}={AWAY_S}" for role in ROLES)]


def scenario(*changes: str):
    return load(SCENARIO, changes).scenario


def hit_by(role: str):
    """A seed whose only hit is of `role`, and that hit."""
    return next((seed, hit) for seed in count() for hit in hits_of(seed, STEPS, STEPS) if hit.role == role and hit.step > 2)


def lost_s(role: str, how: str = "rubato") -> float:
    """What that hit costs, in seconds."""
    return STEPS * PACE_S / useful_share(scenario(*ONE_HIT), PACE_S, how, hit_by(role)[0]) - STEPS * PACE_S


def test_a_run_is_the_same_twice_and_has_the_figures_of_its_claims():
    loaded = load(SCENARIO, ["job.steps=20", "seeds=[1,2]"])

    first, second = loaded.kind.run(loaded.scenario, silent), loaded.kind.run(loaded.scenario, silent)

    assert (first.figures, first.tables, first.notes) == (second.figures, second.tables, second.notes)
    assert {claim.name for claim in loaded.scenario.claims} <= set(first.figures)


def test_one_step_in_so_many_is_hit_and_no_role_again_before_all_were():
    hits = hits_of(3, 100, 10)

    assert [(hit.step - 1) // 10 for hit in hits] == list(range(10))
    assert {hit.role for hit in hits[: len(ROLES)]} == set(ROLES)


@pytest.mark.parametrize("role", ["trainer", "host"])
def test_who_loses_the_step_that_is_trained_costs_what_was_done_of_it_and_the_way_back(role):
    _, hit = hit_by(role)

    assert lost_s(role) == pytest.approx(hit.share * PACE_S + AWAY_S)


@pytest.mark.parametrize("role", ["engine", "llm_proxy"])
def test_who_only_rolls_out_costs_nothing_while_the_trainer_has_a_batch(role):
    assert lost_s(role) == pytest.approx(0.0, abs=1e-6)


def test_a_lost_manager_costs_what_its_rollouts_are_late_for_the_next_batch():
    job = scenario().job
    rollout_s = job.turns * job.tokens * job.token_share * PACE_S

    assert 0 < lost_s("env_manager") < rollout_s + AWAY_S


def test_a_job_that_restarts_whole_loses_its_step_whoever_is_hit():
    for role in ROLES:
        _, hit = hit_by(role)

        assert lost_s(role, "whole") == pytest.approx(hit.share * PACE_S + AWAY_S)


def test_a_role_without_a_way_back_is_named():
    with pytest.raises(ConfigError, match="away_s lacks redis"):
        scenario("away_s={engine: 1, env_manager: 1, trainer: 1, sample_buffer: 1, llm_proxy: 1, host: 1}")

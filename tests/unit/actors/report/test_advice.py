"""What rows of metrics.jsonl say to the planner of advice."""

from itertools import pairwise

import pytest

from rubato.actors.report.advice import STEPS_SEEN, advice_metrics, advice_of, view_of
from rubato.planning.advice import AdviceView

ROW = {
    "time/step": 2.0,
    "time/wait_for_batch": 1.8,
    "time/train": 0.1,
    "perf/samples_s": 8.0,
    "rollout/wall_s_mean": 2.0,
    "rollout/env_frac": 0.25,
    "rollout/room": 16.0,
    "rollout/slots": 4.0,
    "rollout/env_workers": 8.0,
    "weights/pause_s": 0.5,
    "idle/engine-1": 0.0,
    "idle/engine-3": 0.0,
    "idle/env_manager-1": 0.75,
    "idle/trainer-1": 0.9,
}


def rows(num=12, **others):
    clock = {"time/unix_s": 2.0, "cpu/host": 3.0}
    return [
        {"step": float(n), **ROW, **others, "cpu/cores": 2.0} | {key: n * each for key, each in clock.items()} for n in range(1, num + 1)
    ]


def test_an_alpha_that_adapts_is_as_the_newest_row_has_it():
    view = view_of(rows(**{"staleness/alpha": 3.0}), alpha=1)

    assert view is not None
    assert view.alpha == 3


def test_a_view_has_the_means_of_the_newest_steps_and_what_there_is_of_each_role():
    assert view_of(rows(), alpha=1) == AdviceView(
        step_s=2.0,
        waited_s=1.8,
        train_s=0.1,
        alpha=1,
        batch=16,
        rollout_s=2.0,
        env_share=0.25,
        engines=2,
        slots=4,
        managers=1,
        room=16,
        pause_s=0.5,
        env_workers=8,
        manager_busy=0.0,
        host_busy=pytest.approx(0.75),
    )


def test_rewards_are_told_apart_from_generation_and_environments():
    scored = {"rollout/reward_frac": 0.5, "rollout/reward_workers": 4.0, "rollout/reward_each_s": 0.1}
    services = {"rollout/reward_alone_s": 0.3, "idle/reward_service-1": 0.0, "idle/reward_service-2": 0.0}

    view = view_of(rows(**scored, **services), alpha=1)

    assert view is not None
    assert (view.reward_share, view.reward_workers, view.reward_services) == (0.5, 4, 2)
    assert (view.reward_each_s, view.reward_alone_s) == (0.1, 0.3)


def test_a_manager_that_waits_for_its_workers_is_not_held_to_be_busy_itself():
    assert view_of(rows(), 1).manager_busy == 0.0
    assert view_of(rows(**{"rollout/env_workers": 0.0}), 1).manager_busy == 0.25


def test_steps_that_are_long_past_and_the_first_do_not_count():
    early, late = rows(3, **{"time/step": 9.0}), rows(STEPS_SEEN + 3)[3:]

    assert view_of([*early, *late], 1).step_s == 2.0
    assert view_of([rows(1, **{"time/step": 9.0})[0], *rows(2)[1:]], 1).step_s == 2.0


@pytest.mark.parametrize("missing", ["rollout/wall_s_mean", "rollout/room", "idle/env_manager-1", "time/step"])
def test_rows_without_the_figures_give_no_advice(missing):
    lacking = [{name: value for name, value in row.items() if name != missing} for row in rows()]

    assert advice_of(lacking, 1) is None
    assert advice_metrics(lacking, 1) == {}


def test_a_row_carries_the_gain_of_each_change_the_first_first():
    found = advice_metrics(rows(), 1)

    assert next(iter(found.items())) == ("advice/generation-bound/engine_2_more", pytest.approx(0.6))
    assert all(a >= b for a, b in pairwise(found.values()))


def test_no_rows_give_no_advice():
    assert view_of([], 1) is None

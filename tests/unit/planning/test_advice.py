"""Advice: what holds a job up is found, and what would help is told with its gain."""

from dataclasses import replace

import pytest

from rubato.planning.advice import AdviceView, advise, what_if

ROLLOUTS_FIRST = AdviceView(
    step_s=2.0, waited_s=1.8, train_s=0.1, alpha=1, batch=16, rollout_s=1.0, env_share=0.2, engines=2, slots=64, managers=1, room=64
)
"""8 rollouts in flight on average, 32 slots of the sample buffer, nobody saturated: alpha is what holds it up."""


def first(view):
    return advise(view).changes[0]


def gain(view, name):
    return next(change.gain for change in what_if(view) if change.name == name)


def test_full_slots_of_engines_ask_for_engines():
    view = replace(ROLLOUTS_FIRST, slots=4, rollout_s=2.0, room=16)

    assert (first(view).name, first(view).after) == ("engine", 4)
    assert first(view).gain == pytest.approx(1.0)
    assert advise(view).why == "generation-bound: 2 engines more give +100%"


def test_what_engines_stand_still_for_is_not_gained_by_more_of_them():
    view = replace(ROLLOUTS_FIRST, slots=4, rollout_s=2.0, room=16, pause_s=1.0)

    assert gain(view, "engine") == pytest.approx(2.0 / 1.5 - 1)


def test_busy_environment_workers_ask_for_workers_by_their_key_before_managers():
    view = replace(ROLLOUTS_FIRST, rollout_s=2.0, env_share=0.9, env_workers=2, room=16)

    told = "environment-bound: env.workers 2 → 4 gives +100%, 1 environment manager more +100%"
    assert advise(view).why == told


def test_workers_that_idle_are_not_asked_for():
    view = replace(ROLLOUTS_FIRST, env_workers=8)

    assert gain(view, "env_workers") == 0.0


def test_more_workers_than_managers_have_are_told_for_each_manager():
    view = replace(ROLLOUTS_FIRST, rollout_s=2.0, env_share=0.9, env_workers=4, managers=2, batch=32, room=64, slots=256)

    assert first(view)[:3] == ("env_workers", 2, 4)


SCORED = replace(
    ROLLOUTS_FIRST, step_s=2.0, rollout_s=2.0, env_share=0.1, reward_share=0.8, slots=4, room=16,
    reward_workers=1, reward_services=1, reward_each_s=0.125, reward_alone_s=0.125,
)  # fmt: skip
"""16 samples of a step take its one reward worker the whole step."""


def test_busy_reward_workers_ask_for_more_of_them_and_not_for_engines():
    advice = advise(SCORED)

    assert advice.why == "reward-bound: reward.workers 1 → 2 gives +100%"
    assert advice.changes[0].key == "reward_workers_1_more"
    assert gain(SCORED, "engine") == gain(SCORED, "env_manager") == 0.0


def test_more_reward_workers_are_wanted_up_to_where_something_else_is_as_slow():
    two = replace(SCORED, reward_workers=2, reward_services=1, reward_each_s=0.25)
    engines_next = replace(SCORED, reward_share=0.2, slots=12, reward_each_s=0.125)

    assert (first(two).before, first(two).after) == (2, 4)
    assert gain(engines_next, "reward_workers") < 0.2


def test_functions_whose_calls_take_as_long_however_many_are_in_them_are_no_reason_for_workers():
    one_long_call = replace(SCORED, reward_share=0.5, reward_each_s=0.001, reward_alone_s=1.0)

    assert gain(one_long_call, "reward_workers") == 0.0


def test_workers_of_several_reward_services_are_told_as_one_service_has_them():
    services = replace(SCORED, reward_workers=4, reward_services=2, reward_each_s=0.5)

    assert first(services).words == "reward.workers 2 → 4"


def test_managers_without_room_ask_for_room_before_processes():
    view = replace(ROLLOUTS_FIRST, room=8, env_share=0.9)

    assert [change.key for change in advise(view).changes] == ["concurrency_2_times", "env_manager_1_more"]
    assert advise(view).why.startswith("environment-bound: env.concurrency 8 → 16 gives +100%, 1 environment manager")


def test_free_engines_and_managers_ask_for_a_larger_alpha():
    assert first(ROLLOUTS_FIRST).words == "α 1 → 2"
    assert first(ROLLOUTS_FIRST).gain == pytest.approx(0.5)  # three batches of slots where there were two
    assert advise(ROLLOUTS_FIRST).bound == "rollout-bound"


def test_a_job_without_a_bound_on_age_is_not_told_to_raise_it():
    assert "alpha" not in {change.name for change in what_if(replace(ROLLOUTS_FIRST, alpha=-1))}


def test_a_trainer_that_never_waits_is_what_has_to_be_faster():
    view = replace(ROLLOUTS_FIRST, waited_s=0.0, train_s=1.8, rollout_s=0.5)

    assert advise(view).bound == "training-bound"
    assert first(view).gain == pytest.approx(2.0 / 1.1 - 1)
    assert len(advise(view).changes) == 1


def test_synchronous_steps_gain_from_both_sides():
    """Half a step is training: with alpha 0 each half can be shortened, and alpha 1 lets them overlap."""
    view = replace(ROLLOUTS_FIRST, alpha=0, waited_s=1.0, train_s=1.0, slots=8, rollout_s=1.0, env_share=0.0)

    assert gain(view, "trainer") == pytest.approx(1 / 3)
    assert gain(view, "engine") == pytest.approx(1 / 3)
    assert gain(view, "alpha") == pytest.approx(1.0)


def test_what_meets_the_next_limit_gains_only_up_to_it():
    view = replace(ROLLOUTS_FIRST, slots=4, rollout_s=2.0, room=16, waited_s=0.5)

    assert gain(view, "engine") == pytest.approx(2.0 / 1.5 - 1)


def test_a_manager_whose_loop_is_busy_asks_for_another():
    view = replace(ROLLOUTS_FIRST, manager_busy=0.97, rollout_s=5.0)

    assert first(view).name == "env_manager"


def test_a_job_in_balance_is_told_so():
    view = replace(ROLLOUTS_FIRST, waited_s=0.01, train_s=0.02, rollout_s=0.1)

    assert advise(view).bound == ""
    assert advise(view).why.startswith("balanced")

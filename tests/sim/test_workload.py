"""What chance decides of a rollout: by name alone, within the task's limits."""

from random import Random
from statistics import quantiles

import pytest
from pydantic import ValidationError

from rubato.sim.distribution import Constant, LogNormal, Normal, Quantiles, Uniform
from rubato.sim.workload import ResetFailure, TaskSpec, episode, task_of


def task(**changes) -> TaskSpec:
    base = {
        "name": "game", "turns": Uniform(law="uniform", low=1, high=60),
        "prompt_tokens": Constant(value=500), "observation_tokens": Uniform(law="uniform", low=10, high=400),
        "action_tokens": LogNormal(law="lognormal", median=200, sigma=1.0, most=4000), "max_context": 4096,
    }  # fmt: skip
    return TaskSpec.model_validate(base | changes)


def test_an_episode_depends_on_seed_and_name_alone():
    first = [episode(task(), 1, f"t{number}") for number in range(5)]
    again = [episode(task(), 1, f"t{number}") for number in reversed(range(5))]

    assert first == again[::-1]
    assert episode(task(), 2, "t0") != first[0]
    assert episode(task(), 1, "t0", attempt=2) != first[0]


def test_no_episode_passes_its_context():
    episodes = [episode(task(), 1, f"t{number}") for number in range(200)]

    assert max(drawn.tokens for drawn in episodes) <= 4096
    assert all(turn.sampled >= 1 and turn.shown >= 1 for drawn in episodes for turn in drawn.turns)


def test_a_reset_that_hangs_is_tried_again():
    failing = task(reset_s=Constant(value=5), reset_failure=ResetFailure(probability=0.5, hang_s=60))

    resets = [episode(failing, 1, f"t{number}").resets_s for number in range(400)]

    assert all(tries[-1] == 5 and set(tries[:-1]) <= {60.0} for tries in resets)
    assert 150 < sum(len(tries) > 1 for tries in resets) < 250


def test_members_of_a_group_share_their_task():
    tasks = [task(name="a"), task(name="b", share=3.0)]

    names = [task_of(tasks, 1, f"g{number}").name for number in range(400)]

    assert task_of(tasks, 1, "g7").name == names[7]
    assert 250 < names.count("b") < 350


def test_drawn_quantiles_are_the_stated_ones():
    law = Quantiles(law="quantiles", points=((0, 0), (0.5, 10), (0.9, 20), (1, 100)))
    chance = Random(1)

    drawn = quantiles([law.draw(chance) for _ in range(4000)], n=10)

    assert drawn[4] == pytest.approx(10, abs=1)
    assert drawn[8] == pytest.approx(20, abs=3)


def test_a_latency_is_never_negative():
    law, chance = Normal(law="normal", mean=1, sigma=10), Random(1)

    assert min(law.draw(chance) for _ in range(200)) == 0


@pytest.mark.parametrize("points", [((0.1, 1), (1, 2)), ((0, 1), (0.5, 2)), ((0, 3), (1, 2)), ((0, 1), (0, 2), (1, 3))])
def test_points_that_are_no_distribution_are_refused(points):
    with pytest.raises(ValidationError):
        Quantiles(law="quantiles", points=points)

"""What a call of the reward functions takes, told apart into a fixed part and one for each trajectory."""

import random

import pytest

from rubato.actors.rewards.service import CallCost


def cost_of(seconds, sizes):
    cost = CallCost()
    for num in sizes:
        cost.note(num, seconds(num))
    return cost


@pytest.mark.parametrize(
    ("seconds", "each_s", "alone_s"),
    [(lambda num: 0.1 * num, 0.1, 0.1), (lambda num: 1.0, 0.0, 1.0), (lambda num: 0.5 + 0.02 * num, 0.02, 0.52)],
    ids=["one after the other", "all at once", "both"],
)
def test_calls_of_several_sizes_show_what_one_trajectory_more_takes(seconds, each_s, alone_s):
    cost = cost_of(seconds, [random.Random(at).randint(1, 64) for at in range(200)])

    assert cost.each_s == pytest.approx(each_s, abs=1e-6)
    assert cost.alone_s == pytest.approx(alone_s, abs=1e-6)


def test_where_calls_have_one_size_each_trajectory_counts_its_share():
    cost = cost_of(lambda num: 0.8, [8] * 30)

    assert cost.each_s == cost.alone_s == pytest.approx(0.1)


def test_the_newest_calls_count_and_none_takes_nothing():
    changed = cost_of(lambda num: 1.0 * num, [1, 2, 3] * 50)
    for num in [1, 2, 3] * 200:
        changed.note(num, 0.1 * num)

    assert changed.each_s == pytest.approx(0.1, rel=0.01)
    assert CallCost().each_s == CallCost().alone_s == 0.0

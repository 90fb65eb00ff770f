"""The summary of a live comparison of fixed α with auto."""

import math

from tools.bench.alpha_live import NEVER, Summary, summary


def test_auto_is_set_against_the_lowest_mean_of_a_fixed_alpha_with_the_seeds_on_which_it_is_ahead():
    found = summary({"auto": [10.0, 30.0, 11.0], "0": [40.0, NEVER, 50.0], "1": [11.0, 9.0, 13.0]})

    assert found == Summary({"auto": 17.0, "0": NEVER, "1": 11.0}, "1", 17.0 / 11.0, 2)


def test_a_goal_that_no_fixed_alpha_reached_is_no_figure():
    assert math.isinf(summary({"auto": [10.0], "1": [NEVER]}).auto_over_best)

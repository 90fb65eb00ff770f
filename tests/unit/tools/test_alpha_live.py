"""The summary of a live comparison of fixed α with auto."""

import math

from tools.bench.alpha_live import NEVER, summary


def test_auto_is_set_against_the_lowest_median_of_a_fixed_alpha():
    found = summary({"auto": [10.0, 30.0, 11.0], "0": [40.0, NEVER, 50.0], "1": [10.0, 9.0, 12.0]})

    assert found == {"auto": 11.0, "0": 50.0, "1": 10.0, "auto_over_best": 1.1}


def test_a_goal_that_no_fixed_alpha_reached_is_no_figure():
    assert math.isinf(summary({"auto": [10.0], "1": [NEVER]})["auto_over_best"])

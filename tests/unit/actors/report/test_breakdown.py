"""What rewards consist of, and what environments tell in numbers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import MOST_FIGURES
from rubato.actors.report.breakdown import SHOWN, breakdown, left_out, numbers_of


def told(info=None, **scores):
    return SimpleNamespace(scores=scores, info=info or {})


def test_of_an_info_only_finite_numbers_are_taken_and_truth_counts_as_one():
    info = {"moves": 3, "won": True, "share": np.float32(0.5), "name": "x", "bad": math.nan, "far": math.inf, 7: 1.0}

    assert numbers_of(info | {"huge": 10**400, "none": None, "x" * 65: 1.0}) == {"moves": 3.0, "won": 1.0, "share": 0.5}


def test_an_info_with_too_many_numbers_gives_the_first_by_name():
    found = numbers_of({f"k{n:03d}": n for n in reversed(range(200))})

    assert list(found) == [f"k{n:03d}" for n in range(MOST_FIGURES)]


def test_each_mean_is_over_the_samples_that_have_the_figure():
    samples = [told({"moves": 2.0}, env=1.0, exact=0.5), told({"moves": 4.0, "won": 1.0}, env=0.0), told()]

    assert breakdown(samples) == {"reward/env": 0.5, "reward/exact": 0.5, "env/moves": 3.0, "env/won": 1.0}
    assert breakdown([]) == {}


def test_what_is_left_out_is_known_by_name():
    samples = [told({f"k{n:02d}": 0.0 for n in range(20)}), told({f"k{n:02d}": 0.0 for n in range(20, SHOWN + 2)})]

    assert len(breakdown(samples)) == SHOWN
    assert left_out(samples) == ["k32", "k33"]
    assert left_out(samples[:1]) == []


def test_a_foreign_score_can_not_pass_for_the_batchs_own_figures():
    assert breakdown([told(mean=9.0, exact=1.0)]) == {"reward/exact": 1.0}


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        (("pkg.mod:exact", "my.py:format"), ("exact", "format")),
        (("a.py:f", "b.py:f", "a.py:f"), ("f", "f_2", "f_3")),
        (("a.py:mean", "a.py:env", "a.py:std"), ("mean_1", "env_2", "std_3")),
        (("a.py:f_2", "b.py:f_2"), ("f_2", "f_2_2")),
    ],
)
def test_each_reward_function_has_a_name_of_its_own(functions, names):
    assert RewardSection(functions=functions).names == names

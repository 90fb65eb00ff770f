"""Deadlines of reward calls: by task and function, from correct responses alone."""

import asyncio

import pytest

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score
from rubato.actors.rewards.deadlines import AnchoredLimit
from rubato.actors.rewards.invoke import HttpBackend, _Again
from rubato.actors.rewards.local import LocalBackend
from rubato.actors.rewards.scorer import Scorer
from rubato.runtime.observe.figures import Metrics

ONE, OTHER = Score("t1.1", ("a",), b"\x80", "one"), Score("t2.1", ("a",), b"\x80", "other")


@pytest.fixture
def deadlines():
    return AnchoredLimit(RewardSection(functions=("m:f",), timeout_s=30.0, deadline_factor=1.5))


def test_the_longest_correct_response_of_a_task_sets_the_deadline_of_its_next_calls(deadlines):
    deadlines.took("f", [ONE], [1.0], 4.0)
    deadlines.took("f", [ONE], [0.5], 3.0)

    assert deadlines.of("f", [ONE]) == 6.0
    assert deadlines.of("g", [ONE]) == deadlines.of("f", [OTHER]) == 30.0


@pytest.mark.parametrize(("seconds", "limit_s"), [(0.1, 2.0), (29.0, 30.0)])
def test_it_stays_within_its_bounds(deadlines, seconds, limit_s):
    deadlines.took("f", [ONE], [1.0], seconds)

    assert deadlines.of("f", [ONE]) == limit_s


def test_wrong_and_unscored_responses_are_no_anchor(deadlines):
    deadlines.took("f", [ONE, ONE], [0.0, NotScored("raised", "why")], 0.1)

    assert deadlines.of("f", [ONE]) == 30.0


def test_without_a_factor_every_call_has_all_the_time():
    limit = Scorer(RewardSection(functions=("m:f",), timeout_s=5.0))._limit

    limit.took("f", [ONE], [1.0], 0.1)

    assert not limit.per_task
    assert limit.of("f", [ONE]) == 5.0


def test_with_a_factor_each_trajectory_has_a_call_of_its_own():
    scorer = Scorer(RewardSection(functions=("m:f",), deadline_factor=1.5))

    assert isinstance(scorer._limit, AnchoredLimit)
    assert scorer.one_each


def test_no_deadline_is_above_the_time_limit():
    deadlines = AnchoredLimit(RewardSection(functions=("m:f",), timeout_s=1.0, deadline_factor=1.5))

    deadlines.took("f", [ONE], [1.0], 0.1)

    assert deadlines.of("f", [ONE]) == 1.0


SLOW_TO_LOAD = """
import time
time.sleep(0.5)
loaded = time.monotonic()

def f(completions, **columns):
    return [loaded] * len(completions)
"""


class Taken(AnchoredLimit):
    seconds = -1.0

    def took(self, function, requests, scores, seconds):
        self.seconds = seconds


async def test_a_process_that_has_to_start_and_import_first_sets_no_anchor_by_that(tmp_path):
    function = f"{tmp_path / 'slow.py'}:f"
    (tmp_path / "slow.py").write_text(SLOW_TO_LOAD)
    section = RewardSection(functions=(function,), deadline_factor=1.5)
    taken = Taken(section)
    backend = LocalBackend(section, Metrics(), taken)
    assert await backend.load(function) == ""
    backend._pool._workers[0].kill("another call on it hung")

    (loaded,) = await backend.call(function, [ONE])
    ended = asyncio.get_running_loop().time()  # the same clock as in the function
    await backend.close()

    assert 0 <= taken.seconds <= ended - loaded


def test_tries_that_failed_and_pauses_are_no_part_of_what_an_answer_took(on_stage):
    async def play(context):
        section = RewardSection(url="http://there/", timeout_s=30.0, deadline_factor=1.5)
        taken = Taken(section)
        backend, left = HttpBackend(Metrics(), taken), [_Again("unreachable", "no answer", 0.0)]

        async def one_try(*asked):
            if left:
                await asyncio.sleep(20.0)
                raise left.pop()
            await asyncio.sleep(3.0)
            return b'{"scores": [1.0]}'

        backend._try = one_try

        assert await backend.call("http://there/", [ONE]) == [1.0]
        assert taken.seconds == 3.0

    on_stage(play)

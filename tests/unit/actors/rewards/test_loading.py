"""Loading reward functions while workers die around it."""

from typing import ClassVar

import pytest

from rubato.actors.config import RewardSection
from rubato.actors.rewards.scorer import Scorer
from rubato.runtime.pool.errors import PoolError, UserCodeRaised, WorkerDied, WorkerKilled
from rubato.runtime.pool.values import Traits


class DyingPool:
    """Fails its first calls as told."""

    failures: ClassVar[list[PoolError]] = []

    def __init__(self, failures):
        self.failures, self.calls = list(failures), 0

    async def preload(self, name, *, deadline_s, attributes=()):
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return Traits(False, False, {})


def scorer(*failures):
    made = Scorer(RewardSection(functions=("m:f",)))
    made._local._pool = DyingPool(failures)
    return made


@pytest.mark.parametrize("failure", [WorkerDied("its process died of SIGKILL", "crashed"), WorkerKilled("another call hung")])
async def test_a_worker_that_is_killed_as_it_loads_a_function_is_replaced(failure):
    made = scorer(failure, failure)

    assert await made.start() == ""
    assert made._local._pool.calls == 3


async def test_a_function_whose_workers_die_each_time_is_refused_with_the_reason():
    made = scorer(*[WorkerDied("its process died of SIGSEGV", "crashed")] * 3)

    assert await made.start() == "reward function m:f can't be loaded: failed: its process died of SIGSEGV"


async def test_a_function_that_raises_is_refused_at_once():
    made = scorer(UserCodeRaised("KeyError", "KeyError('x')", "m.py:1"))

    assert "raised" in await made.start()
    assert made._local._pool.calls == 1

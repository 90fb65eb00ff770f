"""What `monitor --why` and the watchdog say of a whole job on virtual time; the whole matrix of faults is in tests/chaos."""

import random

import pytest

from tests.faulty_job import FreezingLoop, running
from tests.why_cases import LOOK_S, SEED, SINGLE, case_name, check, named

NUM_QUICK = 2
"""Faults drawn from the matrix for the fast check."""


@pytest.mark.parametrize("case", random.Random(SEED).sample([[case] for case in SINGLE], NUM_QUICK), ids=case_name)
def test_a_fault_is_named_with_its_holder_and_kind_within_five_seconds(case, tmp_path):
    check(case, tmp_path)


def test_a_job_in_which_nothing_is_wrong_has_no_blocked_stage(tmp_path):
    async def main():
        async with running(tmp_path) as job:
            looks = []
            for _ in range(10):
                await FreezingLoop.sleep(LOOK_S)
                looks.append(await job.blocked())
            return looks

    assert [named(look) for look in FreezingLoop.run(main, seed=SEED)] == [set()] * 10


def test_the_watchdog_tells_once_of_what_is_blocked_for_longer_than_its_limit(tmp_path):
    async def main():
        async with running(tmp_path) as job:
            job.inflict("env_manager-1", "hang")
            await FreezingLoop.sleep(12.0)
            return job.told

    told = [line for line in FreezingLoop.run(main, seed=SEED) if "trainer-1 waits" in line]

    assert len(told) == 1
    assert "env_manager-1 is stalled: no progress in env.step of g" in told[0]
    assert told[0].endswith("; limit env.step_timeout_s=60")

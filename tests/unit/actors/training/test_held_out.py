"""What an evaluation leaves for the next row, and what the user is told of failed tasks."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.messages.samples import EvalResult
from actors.report import Run, summary
from actors.training.publishing import EvalSection, HeldOut
from runtime.observe.log import logger


class Buffer:
    def __init__(self, result):
        self._result = result

    async def ask(self, request, *, timeout):
        return self._result


def evaluated(num, failed, reward=1.0):
    told = []
    buffer = Buffer(EvalResult(4, reward, num, failed))
    trainer = SimpleNamespace(ref=lambda target: buffer, log=logger("test"), notice=told.append)
    held_out = HeldOut(trainer, EvalSection())
    asyncio.run(held_out.evaluate(20, 1, num + failed))
    return held_out.take(), told


def test_a_failed_task_is_counted_beside_the_reward_of_the_others():
    row, told = evaluated(1, 199)

    assert row == {"eval/reward": 1.0, "eval/num": 1, "eval/failed": 199, "eval/version": 4}
    assert told == ["evaluation after step 20: 199 of 200 tasks failed, and eval/reward leaves them out"]


@pytest.mark.parametrize(("failed", "notices"), [(0, 0), (2, 0), (3, 1)])
def test_more_than_one_task_in_a_hundred_that_failed_is_worth_a_notice(failed, notices):
    assert len(evaluated(200 - failed, failed)[1]) == notices


def test_where_every_task_failed_there_is_no_reward():
    assert "eval/reward" not in evaluated(0, 8, reward=0.0)[0]


@pytest.mark.parametrize(
    ("num", "failed", "words"),
    [
        (200, 0, "(held-out 1.00)"),
        (1, 199, "(held-out 1.00 over 1 of 200 tasks; 199 failed)"),
        (0, 8, "(held-out: no reward over 0 of 8 tasks; 8 failed)"),
    ],
)
def test_the_summary_says_of_how_many_tasks_the_reward_is(num, failed, words, tmp_path):
    row = {"step": 1.0, "reward/mean": 0.5} | evaluated(num, failed)[0]

    assert words in summary(Run(tmp_path, [row], {}, 1, 1, "model", "Env", []))[0]

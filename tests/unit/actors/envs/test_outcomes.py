"""When failures become a sentence, and when they end the job."""

from actors.envs.failures import EnvFailure, Subject
from actors.envs.outcomes import EnvRecord
from actors.messages.samples import Ticket

TICKET = Ticket("t1", "g1", 1, 17, 4211, 0, 1)
RAISED = EnvFailure("env_reset_failed", "reset", "raised in reset: KeyError('goal')")


def record():
    return EnvRecord(Subject("my_env.py:MyEnv", "runs/a/logs/env_manager-1.jsonl"), reset_tries=3)


def test_the_first_failure_of_a_kind_is_told_in_one_sentence():
    found = record()

    told = [found.bad(TICKET, RAISED)[0] for _ in range(3)]

    assert told == [
        "env my_env.py:MyEnv raised in reset (task 17, seed 4211): KeyError('goal'). 3 of 3 tries failed; its group is dropped. "
        "Log: runs/a/logs/env_manager-1.jsonl",
        "",
        "",
    ]


def test_an_environment_that_never_works_ends_the_job_after_32_rollouts():
    found = record()

    verdicts = [found.bad(TICKET, RAISED)[1] for _ in range(32)]

    assert verdicts[:31] == [""] * 31
    assert verdicts[31].endswith("32 of the last 32 rollouts failed in their environment")


def test_an_environment_that_worked_once_is_judged_by_its_last_64_rollouts():
    found = record()
    found.good()

    verdicts = [bool(found.bad(TICKET, RAISED)[1]) for _ in range(64)]

    assert verdicts.index(True) == 62


def test_a_lost_worker_says_nothing_about_the_environment():
    found = record()
    lost = EnvFailure("env_lost", "step", "was lost in step: its process was killed")

    assert {found.bad(TICKET, lost) for _ in range(100)} == {("", "")}

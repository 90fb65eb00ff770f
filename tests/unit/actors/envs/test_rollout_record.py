"""When failures become a sentence, and when they end the job."""

from actors.envs.hosting import EnvFailure
from actors.envs.rollout import GaveUp, RolloutRecord
from actors.envs.section import EnvSection
from actors.messages.samples import Ticket

TICKET = Ticket("t1", "g1", 1, 17, 4211, 0)
RAISED = GaveUp(
    "env_reset_failed", failure=EnvFailure("env_reset_failed", "reset", "raised in reset: KeyError('goal')")
)


def record():
    return RolloutRecord(EnvSection(**{"class": "my_env.py:MyEnv"}), "runs/a/logs/env_manager-1.jsonl")


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
    failure = EnvFailure("env_lost", "step", "was lost in step: its process was killed")
    lost = GaveUp("env_lost", failure=failure, retry=True)

    assert {found.bad(TICKET, lost) for _ in range(100)} == {("", "")}


def test_rollouts_that_no_retry_can_mend_are_told_once_and_end_the_job():
    found = record()

    ends = [found.bad(TICKET, GaveUp("generation_failed", f"the prompt has {n} tokens")) for n in range(40, 72)]

    assert [notice for notice, _ in ends if notice] == [
        "a rollout ended as generation_failed (task 17, seed 4211): the prompt has 40 tokens. Log: runs/a/logs/env_manager-1.jsonl"
    ]
    assert [bool(verdict) for _, verdict in ends] == [False] * 31 + [True]
    assert ends[-1][1].endswith("32 of the last 32 rollouts failed")


def test_a_rollout_that_crashes_every_time_ends_the_job_though_each_is_tried_again():
    found = record()

    assert [found.bad(TICKET, GaveUp("crashed", "KeyError('x')", retry=True)) for _ in range(32)][-1][1]


def test_what_another_attempt_or_the_reward_service_deals_with_is_no_verdict_on_rollouts():
    found = record()
    ends = [
        GaveUp("generation_failed", "aborted 3 times", retry=True),
        GaveUp("stale", retry=True),
        GaveUp("reward_failed", "nan"),
    ]

    assert {found.bad(TICKET, end) for end in ends for _ in range(100)} == {("", "")}

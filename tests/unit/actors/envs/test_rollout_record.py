"""When failures become a sentence, and when they end the job."""

from rubato.actors.envs.hosting import EnvFailure
from rubato.actors.envs.recorder import GaveUp
from rubato.actors.envs.rollout import PROMPTS_KEPT, RolloutRecord
from rubato.actors.envs.section import EnvSection
from rubato.actors.messages.samples import Ticket

TICKET = Ticket("t1", "g1", 1, 17, 4211, 0)
RAISED = GaveUp("env_reset_failed", failure=EnvFailure("env_reset_failed", "reset", "raised in reset: KeyError('goal')"))
HUNG = GaveUp("env_timeout", failure=EnvFailure("env_timeout", "step", "hung in step: no answer within 60 s"))
CRASHED = GaveUp("crashed", "KeyError('x')", retry=True)


def record():
    return RolloutRecord(EnvSection(**{"class": "my_env.py:MyEnv"}), "runs/a/logs/env_manager-1.jsonl")


def ticket(task, member=0):
    return Ticket(f"g{task}.{member}", f"g{task}", 1, task, 4211, 0)


def fail(found, task, end=RAISED):
    """A rollout of `task` begins and fails."""
    found.begun(ticket(task))
    return found.bad(ticket(task), end)


def pass_(found, task):
    found.begun(ticket(task))
    found.good(ticket(task))


def test_the_first_failure_of_a_kind_is_told_in_one_sentence():
    found = record()
    for _ in range(3):
        found.begun(TICKET)

    told = [found.bad(TICKET, RAISED)[0] for _ in range(3)]

    assert told == [
        [
            "env my_env.py:MyEnv raised in reset (task 17, seed 4211): KeyError('goal'). 3 of 3 tries failed; its group is dropped. "
            "Log: runs/a/logs/env_manager-1.jsonl"
        ],
        [],
        [],
    ]


def test_an_environment_that_never_works_ends_the_job_after_32_tasks():
    found = record()

    verdicts = [fail(found, task)[1] for task in range(32)]

    assert verdicts[:31] == [""] * 31
    assert verdicts[31].endswith("32 of the last 32 tasks failed in their environment")


def test_rollouts_of_one_task_fail_together_and_count_once():
    found = record()

    assert [fail(found, task=3)[1] for _ in range(100)] == [""] * 100


def test_an_environment_in_which_every_task_hangs_ends_the_job_before_their_rollouts_all_hung_one_after_another():
    found = record()
    for task in range(10):
        for member in range(8):
            found.begun(ticket(task, member))

    verdicts = [found.bad(ticket(task), HUNG)[1] for task in range(8)]

    assert verdicts[:7] == [""] * 7
    assert verdicts[7].endswith(". 8 tasks hung, and no rollout of any task got through")


def test_tasks_that_hang_end_no_job_in_which_others_get_through():
    found = record()
    pass_(found, 100)

    assert [fail(found, task, HUNG)[1] for task in range(40)] == [""] * 40


def test_an_environment_that_worked_once_is_judged_by_its_last_64_tasks():
    found = record()
    pass_(found, 0)

    verdicts = [bool(fail(found, task)[1]) for task in range(1, 65)]

    assert verdicts.index(True) == 62


def test_tasks_that_are_played_longer_are_waited_for_before_those_that_failed_behind_them_count():
    found = record()
    playing = ticket(0)
    found.begun(playing)

    verdicts = [fail(found, task)[1] for task in range(1, 100)]
    found.good(playing)

    assert verdicts == [""] * 99
    assert not fail(found, 100, RAISED)[1].startswith("32 of")


def test_a_task_fails_by_the_share_of_its_rollouts_that_do():
    found = record()

    verdicts = []
    for task in range(100):
        for member in range(8):
            found.begun(ticket(task, member))
        found.good(ticket(task))
        verdicts += [found.bad(ticket(task), RAISED)[1] for _ in range(7)]

    assert verdicts == [""] * 700


def test_a_rollout_that_never_ends_does_not_keep_a_job_from_its_verdict_for_ever():
    found = record()
    found.begun(ticket(0))

    verdicts = [bool(fail(found, task)[1]) for task in range(1, 2 * PROMPTS_KEPT)]

    assert verdicts.index(True) == PROMPTS_KEPT - 1


def test_the_share_of_failing_tasks_is_told_and_the_job_goes_on():
    found = record()

    told, verdicts = [], []
    for task in range(200):
        if task % 7 < 4:
            notices, verdict = fail(found, task)
            told += notices
            verdicts.append(verdict)
        else:
            pass_(found, task)

    assert set(verdicts) == {""}
    assert told[1:] == [
        "5 of the last 8 tasks failed in their environment; the job goes on with the others",
        "37 of the last 64 tasks failed in their environment; the job goes on with the others",
    ]


def test_a_rollout_that_fails_here_and_there_is_no_share_of_tasks():
    found = record()

    told = []
    for task in range(7):
        for member in range(8):
            found.begun(ticket(task, member))
            if member:
                found.good(ticket(task))
        told += found.bad(ticket(task), RAISED)[0]
    pass_(found, 7)
    told += fail(found, 7)[0]

    assert len(told) == 2
    assert told[1] == "1 of the last 8 tasks failed in their environment; the job goes on with the others"


def test_a_lost_worker_says_nothing_about_the_environment():
    found = record()
    failure = EnvFailure("env_lost", "step", "was lost in step: its process was killed")
    lost = GaveUp("env_lost", failure=failure, retry=True)

    assert all(fail(found, task, lost) == ([], "") for task in range(100))


def test_rollouts_that_no_retry_can_mend_are_told_once_and_end_the_job():
    found = record()

    ends = [fail(found, n, GaveUp("generation_failed", f"the prompt has {n} tokens")) for n in range(40, 72)]

    assert [notice for notices, _ in ends for notice in notices] == [
        "a rollout ended as generation_failed (task 40, seed 4211): the prompt has 40 tokens. Log: runs/a/logs/env_manager-1.jsonl"
    ]
    assert [bool(verdict) for _, verdict in ends] == [False] * 31 + [True]
    assert ends[-1][1].endswith("32 of the last 32 tasks failed")


def test_a_rollout_that_crashes_every_time_ends_the_job_though_each_is_tried_again():
    found = record()

    assert [fail(found, task, CRASHED) for task in range(32)][-1][1]


def test_what_another_attempt_or_the_reward_service_deals_with_is_no_verdict_on_rollouts():
    found = record()
    ends = [GaveUp("generation_failed", "aborted 3 times", retry=True), GaveUp("stale", retry=True), GaveUp("reward_failed", "nan")]

    assert all(fail(found, task, end) == ([], "") for end in ends for task in range(100))

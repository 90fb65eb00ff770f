"""An environment manager whose environments alone fail is set aside: it eats no tickets, and is tried again ever more rarely."""

import asyncio

import pytest

from rubato.actors.messages.samples import GiveUp
from rubato.planning.failures import PAUSE_S, STREAK

GOOD, BAD = "env_manager-1", "env_manager-2"


@pytest.fixture
def stage(make_stage):
    stage = make_stage(alpha=1, batch_groups=2 * STREAK, max_attempts=4)
    stage.present.add(BAD)
    return stage


async def fail(stage, ticket, reason="env_reset_failed"):
    return await stage.buffer.give_up(GiveUp(ticket, reason))


async def set_aside(stage):
    """Tickets of the bad one in as many groups as it takes, all failed, while the good one gets one through."""
    tickets = await stage.admit(2 * STREAK, holder=BAD)
    (first,) = await stage.admit(1, holder=GOOD)
    await fail(stage, tickets[0])
    await stage.put(first)
    return [await fail(stage, ticket) for ticket in tickets[2::2]]


def test_it_is_told_once_gets_no_more_and_its_last_failure_goes_to_another(stage):
    async def scene():
        await stage.start()
        replies = await set_aside(stage)

        assert [reply.aside for reply in replies] == [False] * (STREAK - 2) + [True]
        assert replies[-1].fate == ""
        (told,) = stage.notices
        assert told.startswith(f"{BAD} is set aside: its environments failed on {STREAK} tasks in a row")
        asking = stage.tasks.create_task(stage.admit(5, holder=BAD, wait_s=1.0))
        await asyncio.sleep(0.5)
        (wait,) = stage.buffer.waits.snapshot(asyncio.get_running_loop().time())
        assert (wait.what, wait.stage) == (BAD, "aside")
        assert wait.detail.startswith(f"{BAD} is set aside, 10 s more: its environments failed on {STREAK} tasks")
        assert await asking == []
        (again, *_) = await stage.admit(1, holder=GOOD)
        assert again.attempt == 2

    stage.run(scene)


def test_it_is_tried_with_one_ticket_after_pauses_that_grow_until_one_gets_through(stage, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rubato.actors.samples.leases.HolderRecords._now", lambda self: now[0])

    async def scene():
        await stage.start()
        await set_aside(stage)
        for pause_s in (PAUSE_S, 2 * PAUSE_S):
            now[0] += pause_s - 1
            assert await stage.admit(5, holder=BAD) == []
            now[0] += 1
            (trial,) = await stage.admit(5, holder=BAD)
            assert await stage.admit(5, holder=BAD) == []
            await stage.put((await stage.admit(1, holder=GOOD))[0])
            assert (await fail(stage, trial)).fate == ""
        now[0] += 4 * PAUSE_S
        (trial,) = await stage.admit(5, holder=BAD)
        await stage.put(trial)

        assert len(await stage.admit(5, holder=BAD)) == 5
        assert len(stage.notices) == 2
        assert stage.notices[1].startswith(f"{BAD} gets tickets again")

    stage.run(scene)


@pytest.mark.parametrize("alone", [True, False])
def test_nobody_is_set_aside_where_nobody_else_gets_through_or_is_there(stage, alone):
    async def scene():
        await stage.start()
        if alone:
            await set_aside(stage)
            stage.present.remove(GOOD)
        else:
            for ticket in (await stage.admit(2 * STREAK, holder=BAD))[::2]:
                assert not (await fail(stage, ticket)).aside

        assert await stage.admit(1, holder=BAD)

    stage.run(scene)


def test_a_new_incarnation_begins_anew_and_the_rollouts_of_one_task_count_once(stage):
    async def scene():
        await stage.start()
        await set_aside(stage)

        assert await stage.admit(1, holder=BAD, incarnation=2)

        one, two, *_ = await stage.admit(2, holder=GOOD)
        for ticket in (one, two):
            await fail(stage, ticket)
        assert not stage.buffer._records.is_aside(GOOD)

    stage.run(scene)


def test_what_fails_outside_the_environments_sets_nobody_aside(stage):
    async def scene():
        await stage.start()
        tickets = await stage.admit(2 * STREAK, holder=BAD)
        (first,) = await stage.admit(1, holder=GOOD)
        await fail(stage, tickets[0], "generation_failed")
        await stage.put(first)
        for ticket in tickets[2::2]:
            assert not (await fail(stage, ticket, "generation_failed")).aside

    stage.run(scene)

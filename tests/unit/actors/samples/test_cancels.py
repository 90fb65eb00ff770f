"""Rollouts that nothing can come of any more: which they are, who hears of it, and that it costs nothing but time."""

import asyncio
from dataclasses import replace

import pytest

from rubato.actors.messages.samples import Cancel, Close, GiveUp, RenewLeases
from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import Outcome

LIMITS = GroupLimits(group_size=2, batch_groups=1, steps=100, run_seed=1, max_attempts=2, unbounded_batches=8, ticket_ttl_s=10.0)


def issue(groups, num, holder="env_manager-1"):
    return groups.issue(num, holder, 1, 0.0)


def score(groups, ticket, reward=1.0, version=0):
    return groups.score(ticket.trajectory_id, Outcome(version, reward, tokens=5), b"payload")


def named(*tickets, holder="env_manager-1"):
    return {(holder, 1): [(ticket.trajectory_id, ticket.attempt) for ticket in tickets]}


def test_a_group_of_which_too_few_can_be_scored_ends_at_once_with_what_still_runs():
    groups = Groups(replace(LIMITS, group_size=3), 2)
    one, two, three, *_ = issue(groups, 9)

    groups.fail(one.trajectory_id, "failed", "why")
    assert groups.take_cancels() == {}
    groups.fail(two.trajectory_id, "failed", "why")

    assert groups.take_cancels() == named(three)
    assert groups.settled_fate(three) == "group_too_small"
    assert [(end.fate, end.outcome.tokens) for end in groups.take_changes().ends][-1] == ("group_too_small", -1)


def test_enough_scored_rollouts_make_a_group_and_the_others_end_as_surplus():
    groups = Groups(replace(LIMITS, extra_rollouts=2), 2)
    one, two, three, four, *_ = issue(groups, 3) + issue(groups, 1, "env_manager-2")

    score(groups, one, 0.0)
    score(groups, four, 1.0)

    assert groups.take_cancels() == named(two, three)
    assert [end.fate for end in groups.take_changes().ends] == ["surplus", "surplus"]
    (group,) = groups.ready()
    assert group.scored == [0, 3]
    assert not groups.leases


def test_what_a_surplus_rollout_had_sampled_is_counted_once():
    groups = Groups(replace(LIMITS, extra_rollouts=1), 2)
    one, two, late, *_ = issue(groups, 3)
    for ticket in (one, two):
        score(groups, ticket)

    for _ in range(2):
        assert groups.settled_fate(late) == "surplus"
        groups.late(late, Outcome(-1, None, 7, 1))

    tally = groups.training.tally
    assert tally.tokens == {"surplus": 7}
    assert tally.generated == 7 + 2 * 5


def test_a_replaced_attempt_is_cancelled_as_the_next_one_is_issued():
    groups = Groups(LIMITS, 2)
    (old,) = issue(groups, 1)
    groups.take_back(old.trajectory_id, "lease_lapsed", counted=True)
    assert groups.take_cancels() == {}

    (new,) = issue(groups, 1, "env_manager-2")

    assert new.trajectory_id == old.trajectory_id
    assert groups.take_cancels() == named(old)


@pytest.mark.parametrize("end", ["told", "unsent"])
def test_whoever_said_that_nothing_came_of_it_or_never_had_it_is_not_told(end):
    groups = Groups(LIMITS, 2)
    (ticket,) = issue(groups, 1)
    if end == "told":
        groups.take_back(ticket.trajectory_id, "env_timeout", counted=True, spent=Outcome(-1, None, 3))
    else:
        groups.unsend([ticket])

    issue(groups, 1)

    assert groups.take_cancels() == {}


def test_a_held_out_round_that_another_one_replaces_is_cancelled():
    groups = Groups(LIMITS, 2)
    groups.round("eval-1.0", 2)
    tickets = issue(groups, 2)

    groups.round("eval-1.1", 2)

    assert groups.take_cancels() == named(*tickets)


def cancels(stage):
    return [(name, message) for name, message in stage.process.told if isinstance(message, Cancel)]


def test_the_holders_hear_of_it_and_what_they_run_on_is_told_again_as_they_renew(make_stage):
    stage = make_stage(alpha=1, batch_groups=1)

    async def scene():
        await stage.start()
        one, two, *_ = await stage.admit(2)
        await stage.buffer.close(Close())
        await asyncio.sleep(0.1)
        ((name, first),) = cancels(stage)
        held = tuple((ticket.trajectory_id, ticket.attempt) for ticket in (one, two))
        await stage.buffer.renew_leases(RenewLeases(held[:1], name, 1))
        await asyncio.sleep(0.1)
        _, (_, again) = cancels(stage)

        assert (name, first.rollouts, first.incarnation, first.issuer) == ("env_manager-1", held, 1, stage.incarnation)
        assert again.rollouts == held[:1]
        assert set((await stage.fates()).values()) == {"unused"}

    stage.run(scene)


def test_a_cancel_that_was_wrong_costs_another_attempt_and_no_try(make_stage):
    stage = make_stage(alpha=1, batch_groups=1, max_attempts=1)

    async def scene():
        await stage.start()
        first, *_ = await stage.admit(1)
        stored = await stage.buffer.give_up(GiveUp(first, "cancelled", retry=True, tokens=3))
        again, *_ = await stage.admit(1)

        assert stored.fate == ""
        assert (again.trajectory_id, again.attempt, again.noise) == (first.trajectory_id, 2, first.noise)
        assert await stage.put(again) == ""

    stage.run(scene)

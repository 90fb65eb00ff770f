"""The life of one group: which moves there are, and what ends are told."""

import dataclasses
from pathlib import Path

import pytest

from rubato.actors.config import SamplesSection, TrainSection
from rubato.actors.data.prompts import Mixture
from rubato.actors.samples.group import Group, Member, SampleEnd, limits_of, teach
from rubato.actors.samples.run_files import line_of
from rubato.actors.samples.sample import Outcome
from rubato.runtime.actor import RunInfo

STATES = ("open", "ready", "bound", "trained", "ended")

MOVES = {
    "take": (lambda group: group.take(0, ""), {"open"}),
    "fail": (lambda group: group.fail(0, "failed", "why"), {"open", "ready", "bound"}),
    "settle": (lambda group: group.settle(), {"open", "ready"}),
    "bind": (lambda group: group.bind(3), {"ready"}),
    "unbind": (lambda group: group.unbind(), {"bound", "trained"}),
    "train": (lambda group: group.train(), {"bound"}),
    "fall_back": (lambda group: group.fall_back(), {"trained"}),
    "commit": (lambda group: group.commit(1), {"bound", "trained"}),
    "poison": (lambda group: group.poison(), {"bound"}),
    "discard": (lambda group: group.discard("stale"), {"open", "ready"}),
}


def group_of(*rewards, state="open", **fields):
    """A member for each reward; None is a failed one."""
    members = [
        Member("failed", attempt=1, fate="failed", reason="why")
        if reward is None
        else Member("scored", attempt=1, outcome=Outcome(-1, reward))
        for reward in rewards
    ]
    return Group("g00000005", 5, members, state=state, **fields)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("move", list(MOVES))
def test_a_move_is_made_from_its_states_and_refused_from_all_others(move, state):
    act, allowed = MOVES[move]
    group = group_of(0.0, 1.0, state=state, step=3)

    if state in allowed:
        act(group)
        return
    with pytest.raises(ValueError, match=f"group g00000005 is {state}, where only"):
        act(group)
    assert group == group_of(0.0, 1.0, state=state, step=3)


def test_a_group_lives_from_its_first_ticket_to_a_committed_step():
    group = Group("g00000005", 5, [Member("running", attempt=1), Member("running", attempt=2)])
    states = [group.state]
    group.members[0].outcome = Outcome(4, 1.0, tokens=7, turns=2, wall_s=0.5)
    group.take(0, "")
    group.members[1].outcome = Outcome(3, 0.0)
    group.take(1, "digest")
    for move in (group.settle, lambda: group.bind(6), group.train, group.fall_back, group.train):
        move()
        states.append(group.state)

    ends = group.commit(9)

    assert states == ["open", "ready", "bound", "trained", "bound", "trained"]
    assert (group.state, group.fate) == ("ended", "trained")
    assert ends == [
        SampleEnd("g00000005.0", "g00000005", 1, 5, "trained", 6, 9, Outcome(4, 1.0, 7, 2, 0.5), ""),
        SampleEnd("g00000005.1", "g00000005", 2, 5, "trained", 6, 9, Outcome(3, 0.0), ""),
    ]


@pytest.mark.parametrize(
    ("rewards", "fate"), [((0.0, 1.0, None), "trained"), ((1.0, 1.0, None), "zero_spread"), ((1.0, 1.0, 1.0), "zero_spread")]
)
def test_a_complete_group_has_one_verdict(rewards, fate):
    group = group_of(*rewards)

    assert group.complete
    assert group.verdict == fate
    group.settle()
    group.bind(2)
    assert [end.fate for end in group.commit(1)] == [fate] * sum(reward is not None for reward in rewards)


LIMITS = limits_of(TrainSection(), SamplesSection(), RunInfo("r", Path(), seed=1, steps=9), Mixture())
FLAT, OTHER = (1.0, 1.0), (0.0, 0.0)


@pytest.mark.parametrize(
    ("limits", "rewards", "fates"),
    [
        ({}, (FLAT, (0.0, 1.0)), ["zero_spread", "trained"]),
        ({"over_batch": True}, (FLAT, OTHER), ["trained", "trained"]),
        ({"over_batch": True}, (FLAT, FLAT), ["zero_spread", "zero_spread"]),
        ({"all_teach": True}, (FLAT, FLAT), ["trained", "trained"]),
    ],
    ids=["within groups", "over the batch", "a batch without spread", "near a reference"],
)
def test_a_group_is_trained_where_its_step_learns_from_it(limits, rewards, fates):
    groups = [group_of(*each, state="bound", step=2) for each in rewards]

    teach(groups, dataclasses.replace(LIMITS, **limits))
    receipts = [group.ends(1) for group in groups]
    again = [Group.trained_in(group.id, 2, ends) for group, ends in zip(groups, receipts, strict=True)]

    assert [group.verdict for group in groups] == fates
    assert [end.fate for ends in receipts for end in ends] == [fate for fate in fates for _ in range(2)]
    assert [group.verdict for group in again] == fates


def test_a_penalty_on_cut_samples_is_spread_too():
    group = group_of(1.0, 1.0, state="bound", step=2)
    group.members[1].outcome = Outcome(0, 1.0, cut=True)

    teach([group], dataclasses.replace(LIMITS, cut_penalty=0.5))

    assert group.verdict == "trained"


def test_what_a_running_rollout_sampled_is_not_known_as_its_group_ends():
    group = Group("g00000005", 5, [Member("running", attempt=1), Member("scored", attempt=1, outcome=Outcome(0, 1.0, 7, 2))])

    lines = [line_of(end) for end in group.discard("stale")]

    assert [(line["tokens"], line["turns"]) for line in lines] == [(None, None), (7, 2)]


@pytest.mark.parametrize("rewards", [(1.0, None, None), (None, None, None)])
def test_a_group_with_fewer_than_two_scores_is_too_small(rewards):
    group = group_of(*rewards)

    ends = group.settle()

    assert (group.state, group.fate) == ("ended", "group_too_small")
    assert [end.fate for end in ends] == ["group_too_small"] * sum(reward is not None for reward in rewards)


@pytest.mark.parametrize(("rewards", "fate"), [((1.0, 1.0, None), "filtered"), ((1.0, 0.0, 1.0), "")])
def test_a_group_that_the_policy_refuses_ends_as_it_completes(rewards, fate):
    group = group_of(*rewards)

    ends = group.settle(fate)

    assert (group.state, group.fate) == (("ended", fate) if fate else ("ready", ""))
    assert [end.fate for end in ends] == ["filtered"] * (2 if fate else 0)


@pytest.mark.parametrize("fate", ["stale", "unused"])
def test_a_member_that_failed_keeps_the_fate_that_was_told(fate):
    group = Group("g00000005", 5, [Member("running", attempt=1) for _ in range(3)])

    first = group.fail(1, "failed", "env_timeout")
    rest = group.discard(fate)

    assert [(end.trajectory_id, end.fate, end.reason) for end in first] == [("g00000005.1", "failed", "env_timeout")]
    assert [(end.trajectory_id, end.fate) for end in rest] == [("g00000005.0", fate), ("g00000005.2", fate)]
    assert [group.fate_of(index) for index in range(3)] == [fate, "failed", fate]


@pytest.mark.parametrize("fate", ["stale", "poisoned"])
def test_an_end_without_training_has_neither_step_nor_term(fate):
    group = group_of(0.0, 1.0, state="bound" if fate == "poisoned" else "ready", step=4)

    ends = group.poison() if fate == "poisoned" else group.discard(fate)

    assert {(end.fate, end.step, end.term) for end in ends} == {(fate, 0, 0)}


def test_holders_are_not_told_that_a_sample_trained():
    group = group_of(0.0, 1.0, None, state="bound", step=4)

    before = [group.fate_of(index) for index in range(3)]
    group.commit(1)

    assert before == [group.fate_of(index) for index in range(3)] == ["", "", "failed"]


def test_a_group_that_lost_its_step_may_be_bound_to_another():
    group = group_of(0.0, 1.0, state="trained", step=4)

    group.unbind()
    step = group.step
    group.bind(9)

    assert (step, group.step, group.state) == (0, 9, "bound")


def test_the_version_of_a_group_is_the_oldest_that_any_member_may_have():
    running = Member(state="running", version=4)
    scored = Member(state="scored", version=3, outcome=Outcome(5, 0.0))
    failed = Member(state="failed", version=1)

    assert Group("g", 0, [running, scored, failed]).version(7) == 4
    assert Group("g", 0, [running, scored, failed]).version_scored(7) == 5
    assert Group("g", 0, [Member(), failed]).version(7) == 7
    assert Group("g", 0, [Member(), failed]).version_scored(7) == 7


def test_a_group_comes_back_from_what_a_checkpoint_says_of_its_ends():
    group = group_of(0.0, None, 1.0, state="trained", step=4)
    group.members[0].outcome = Outcome(2, 0.0, tokens=7, turns=2, wall_s=0.5)

    again = Group.trained_in(group.id, 4, group.ends(3))

    assert again.ends(3) == group.ends(3)
    assert [again.fate_of(index) for index in range(3)] == ["", "failed", ""]
    assert again.commit(8) == group.commit(8)


def test_held_out_tickets_have_task_row_and_seed_each():
    group = Group("eval-x", 0, [Member(attempt=1), Member(attempt=1)], purpose="eval", exam=(("", 0), ("sums", 0)))

    tickets = [group.ticket(index, run_seed=1) for index in range(2)]

    assert [(t.task, t.row, t.purpose) for t in tickets] == [("", 0, "eval"), ("sums", 0, "eval")]
    assert tickets[0].seed != tickets[1].seed

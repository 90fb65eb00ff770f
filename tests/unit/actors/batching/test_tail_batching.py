"""The buffer's groups by rounds: what a round opens, what it puts off, and what takes the place of what can't be trained."""

from dataclasses import replace
from functools import partial

import pytest

from rubato.actors.batching.tail_batching import FORGOTTEN, PUT_OFF, TailBatching, check_sections
from rubato.actors.config import SamplesSection, StalenessSection
from rubato.actors.data.prompts import Mixture, Prompts
from rubato.actors.messages.samples import Ticket
from rubato.actors.samples.group import Group, GroupLimits, Training
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import Outcome
from rubato.planning.prompts import Epochs
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.errors import ConfigError

ROWS = Mixture({"task": Prompts(1.0, Epochs(lambda epoch: range(100)), rows=100)})
LIMITS = GroupLimits(
    group_size=2, batch_groups=2, steps=4, run_seed=1, max_attempts=2, unbounded_batches=8, ticket_ttl_s=10.0, mixture=ROWS
)  # fmt: skip


@pytest.fixture
def groups():
    """Two groups of two train; three of three are launched."""
    return opened()


def opened(training=None, held=(), alpha=0):
    return by_rounds(LIMITS, training, held, alpha)


def by_rounds(limits, training=None, held=(), alpha=0, etas=(1.5, 1.5)):
    groups = Groups(limits, alpha, [partial(TailBatching, etas=etas)])
    groups.restore(training or Training(), held, 0.0)
    return groups


def issue(groups, num=100):
    return groups.issue(num, "env_manager-1", 1, 0.0)


def score(groups, tickets, version=0):
    for at, ticket in enumerate(tickets):
        groups.score(ticket.trajectory_id, Outcome(version, float(at), tokens=5), b"payload")


def claim(groups, step):
    plan = groups.plan(step, 2)
    assert plan.take, plan.why
    groups.bind(step, groups.chosen(plan))
    return [group.row for group in groups.steps[step]]


def by_group(tickets):
    found = {}
    for ticket in tickets:
        found.setdefault(ticket.group_id, []).append(ticket)
    return list(found.values())


def test_a_short_round_launches_more_of_both_and_cancels_what_is_not_among_the_first(groups):
    first, second, third = by_group(issue(groups))
    assert len(first) == len(second) == len(third) == 3
    assert groups.admission().num_groups == 0

    score(groups, [first[0], third[0], third[2], second[1]])
    groups.take_cancels()
    score(groups, [second[2]])

    ends = {end.trajectory_id: end for end in groups.take_changes().ends}
    told = [ticket.trajectory_id for ticket in (second[0], first[1], first[2])]
    assert [name for name, _ in groups.take_cancels()["env_manager-1", 1]] == told
    assert {end.fate for end in ends.values()} == {"surplus"}
    assert [ends[ticket.trajectory_id].reason for ticket in first] == [PUT_OFF] * 3
    assert groups.settled_fate(first[1]) == "surplus"
    assert claim(groups, 1) == [1, 2]
    assert issue(groups) == []  # α is 0: the weights come first


def test_prompts_that_were_put_off_are_trained_in_a_long_round_without_speculation(groups):
    rows = []
    for step in (1, 2, 3):
        for tickets in by_group(issue(groups))[-2:]:
            score(groups, tickets[:2], version=step - 1)
        rows.append(claim(groups, step))
        groups.advance(step)

    assert rows == [[1, 2], [4, 5], [0, 3]]
    assert [ticket.row for ticket in issue(groups)] == [6, 6, 7, 7]  # what is left is too little to speculate


def test_another_prompt_takes_the_place_of_one_whose_rollouts_fail(groups):
    tickets = issue(groups)
    for ticket in tickets[:2]:
        groups.fail(ticket.trajectory_id, "failed", "why")

    (again,) = by_group(issue(groups))

    assert [ticket.row for ticket in again] == [3, 3, 3]
    score(groups, [*again[:2], *tickets[6:8]])
    assert claim(groups, 1) == [2, 3]


def test_a_group_that_became_too_old_is_launched_again_with_its_prompt(groups):
    first, second, _ = by_group(issue(groups))
    score(groups, [*first[:2], *second[:2]])
    groups.training.version = 1
    groups.drop_old(1)

    assert not groups.plan(1, 2).take
    again = by_group(issue(groups))
    assert [ticket.row for tickets in again for ticket in tickets] == [0, 0, 0, 1, 1, 1]
    for tickets in again:
        score(groups, tickets[:2], version=1)
    assert claim(groups, 1) == [0, 1]


def test_a_step_whose_training_raises_twice_gets_another_round(groups):
    for tickets in by_group(issue(groups))[:2]:
        score(groups, tickets[:2])
    assert claim(groups, 1) == [0, 1]
    groups.raised(1, 1)
    assert groups.raised(1, 2)

    for tickets in by_group(issue(groups))[:2]:
        score(groups, tickets[:2])
    assert claim(groups, 1) == [3, 4]


def test_a_run_that_began_without_rounds_launches_anew_what_it_had_under_way():
    before = Groups(LIMITS, 0)
    score(before, [ticket for ticket in issue(before) if ticket.group_id.endswith("0")])

    groups = opened(before.record(), before.live.values())

    ends = groups.take_changes().ends
    assert {(end.fate, end.reason) for end in ends} == {("surplus", FORGOTTEN)}
    assert [tickets[0].row for tickets in by_group(issue(groups))] == [0, 1, 2]


def test_rounds_that_were_switched_off_for_a_while_begin_anew():
    groups = by_rounds(replace(LIMITS, steps=8), etas=(1.0, 1.0))
    first = issue(groups)
    off = Groups(replace(LIMITS, steps=8), 0)
    off.restore(groups.record(), groups.live.values(), 0.0)
    trained = []
    for step in (1, 2):
        score(off, first if step == 1 else issue(off), step - 1)
        trained += claim(off, step)
        off.advance(step)
        off.commit(step, 1)

    again = by_rounds(replace(LIMITS, steps=8), off.record(), off.live.values())
    for step in range(3, 9):
        for tickets in by_group(issue(again))[:2]:
            score(again, tickets[:2], step - 1)
        trained += claim(again, step)
        again.advance(step)
        again.commit(step, 1)

    assert sorted(trained) == list(range(16))


def test_a_forgotten_group_whose_name_another_prompt_has_is_superseded(groups):
    ticket = issue(groups)[0]

    other = Ticket(ticket.trajectory_id, ticket.group_id, ticket.attempt, 7, 1, 0, "train", 0, "task")

    assert groups.settled_fate(ticket) is None
    assert groups.settled_fate(other) == "superseded"


def test_tail_batching_can_not_be_switched_off_while_prompts_wait(groups):
    for tickets in by_group(issue(groups))[:2]:
        score(groups, tickets[:2])
    off = Groups(LIMITS, 0)

    with pytest.raises(ConfigError, match=r"and 1 of its prompts wait for a long round: set tail_batching\.enabled=true"):
        off.restore(groups.record(), [], 0.0)
    opened(groups.record())


@pytest.mark.parametrize(
    ("staleness", "samples", "said"),
    [
        (StalenessSection(alpha="auto"), SamplesSection(), "rounds for one bound on age"),
        (StalenessSection(bounded=False), SamplesSection(), "rounds for one bound on age"),
        (StalenessSection(), SamplesSection(extra_rollouts=2), "extra_rollouts=2 has no effect beside tail_batching"),
    ],
)
def test_what_rounds_can_not_go_with_is_refused_in_a_sentence(staleness, samples, said):
    with pytest.raises(ValueError, match=said):
        check_sections(staleness, samples)


@pytest.mark.parametrize("key", ["eta_prompts", "eta_responses"])
def test_eta_below_one_is_refused_in_a_sentence(key):
    tree = {"actors": {"sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"}}, "tail_batching": {key: 0.9}}

    with pytest.raises(ConfigError, match=rf"tail_batching\.{key}.*0\.9.*1"):
        from_mapping(tree)


def test_a_rebuilt_buffer_goes_on_with_the_round_under_way(groups):
    first, *_ = by_group(issue(groups))
    score(groups, first[:2])

    again = opened(groups.record(), groups.live.values())

    assert again.admission().num_groups == 0
    assert [group.id for group in again.ready()] == [first[0].group_id]


def test_all_of_a_group_that_is_put_off_ends_though_some_members_were_scored(groups):
    first, second, third = by_group(issue(groups))
    score(groups, [first[0], *second[:2], *third[:2]])

    fates = {end.trajectory_id: (end.fate, end.outcome.tokens) for end in groups.take_changes().ends}

    assert fates[first[0].trajectory_id] == ("surplus", 5)
    assert groups.take_changes().payloads == {}
    assert all(isinstance(group, Group) and group.state == "ready" for group in groups.live.values())


def test_limits_of_one_group_still_make_rounds():
    groups = by_rounds(replace(LIMITS, batch_groups=1), etas=(1.25, 1.25))

    assert len(by_group(issue(groups))) == 2

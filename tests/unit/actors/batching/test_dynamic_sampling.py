"""Dynamic sampling: groups without reward spread end, others take their place, and the reward of all stands beside."""

import pytest

from rubato.actors.batching.dynamic_sampling import DynamicSampling
from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import Outcome

LIMITS = GroupLimits(group_size=2, batch_groups=1, steps=10, run_seed=1, max_attempts=2, unbounded_batches=8, ticket_ttl_s=10.0)


@pytest.fixture
def groups():
    return Groups(LIMITS, 0, [DynamicSampling])


def play(groups, *rewards):
    """One group with these rewards; None is of a rollout that failed."""
    for ticket, reward in zip(groups.issue(2, "env_manager-1", 1, 0.0), rewards, strict=True):
        if reward is None:
            groups.fail(ticket.trajectory_id, "failed", "why")
        else:
            groups.score(ticket.trajectory_id, Outcome(0, reward))
    return {end.fate for end in groups.take_changes().ends}


def test_a_group_without_spread_ends_as_filtered_and_frees_its_slot(groups):
    assert play(groups, 1.0, 1.0) == {"filtered"}

    assert groups.live == {}
    assert groups.admission().num_groups == 1
    assert "train.dynamic_sampling=false" in groups.training.barren.why


def test_a_group_with_spread_may_train_and_one_too_small_is_no_business_of_the_policy(groups):
    assert play(groups, 1.0, None) == {"failed", "group_too_small"}
    assert play(groups, 1.0, 0.0) == set()

    assert [group.state for group in groups.live.values()] == ["ready"]
    assert groups.training.barren.in_a_row == 0


def test_the_reward_of_all_that_finished_stands_beside_until_a_checkpoint_covers_the_step(groups):
    for _ in range(3):
        play(groups, 1.0, 1.0)
    play(groups, 0.0, 1.0)

    plan = groups.plan(1, 1)
    groups.bind(1, groups.chosen(plan))

    assert groups.figures(1) == {"reward/unconditioned": 7 / 8, "reward/filtered_frac": 0.75}
    groups.commit(1, 1)
    assert groups.plugins[0].state().bound == {}

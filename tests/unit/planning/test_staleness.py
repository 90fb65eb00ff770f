"""Staleness: how many groups start, when a batch is handed over, what is too old."""

import pytest

from rubato.planning.staleness import OLDEST, AdmissionView, SupplyView, admit, hand_over, is_stale, min_version, too_old


def admission(**given):
    view = {"alpha": 1, "batch_groups": 4, "charged": 0, "version": 0, "steps": 100} | given
    return admit(AdmissionView(**view))


def supply(*, waits=True, **given):
    view = {"step": 1, "alpha": 1, "batch_groups": 2, "ready": (), "in_flight": ()} | given
    return hand_over(SupplyView(**view), waits=waits)


@pytest.mark.parametrize(("alpha", "slots"), [(0, 4), (1, 8), (4, 20), (-1, 32)])
def test_slots_are_alpha_plus_one_batches(alpha, slots):
    assert admission(alpha=alpha).num_groups == slots


def test_a_charged_slot_admits_nothing():
    full = admission(charged=8)

    assert full.num_groups == 0
    assert "all 8 slots" in full.why


def test_no_group_starts_that_the_remaining_steps_cannot_train():
    assert admission(version=98, charged=5).num_groups == 3
    assert admission(version=99, charged=4).num_groups == 0
    assert admission(version=100).num_groups == 0


def test_a_batch_is_taken_once_enough_groups_are_ready():
    few = supply(ready=(0,))
    enough = supply(ready=(0, 0))

    assert (few.take, few.why) == (False, "1 of 2 groups")
    assert enough.take


def test_a_group_that_would_be_too_old_next_time_is_waited_for():
    waits = supply(step=2, ready=(1, 1), in_flight=(0,))
    younger = supply(step=2, ready=(1, 1), in_flight=(1,))

    assert not waits.take
    assert younger.take


def test_old_groups_that_would_crowd_a_later_batch_are_waited_for_now():
    crowd = supply(alpha=2, step=2, ready=(1, 1), in_flight=(0, 0, 0))
    room = supply(alpha=2, step=2, ready=(1, 1), in_flight=(0, 0))

    assert not crowd.take
    assert room.take


def test_a_hand_over_that_does_not_wait_takes_the_oldest_that_are_ready():
    plan = supply(waits=False, alpha=2, step=3, ready=(2, 1, 2), in_flight=(0, 0, 0))

    assert plan.take
    assert plan.chosen == (1, 0)


def test_what_no_step_may_train_any_more_is_too_old():
    assert too_old((3, 2, 1, 3), step=4, alpha=1) == (2,)
    assert too_old((0, 1), step=90, alpha=-1) == ()


def test_nothing_is_waited_for_that_could_not_be_in_the_batch():
    assert supply(step=2, ready=(0, 0, 0), in_flight=(0,)).take


def test_groups_that_are_too_old_do_not_count():
    assert not supply(step=3, ready=(0, 1)).take


def test_an_unbounded_job_takes_any_age_and_waits_for_no_age():
    plan = supply(step=90, alpha=-1, ready=(0, 3), in_flight=(0,))

    assert (plan.take, plan.min_version) == (True, OLDEST)


def test_staleness_is_judged_against_the_version_a_step_starts_from():
    assert not is_stale(4, 5, 1)
    assert is_stale(3, 5, 1)
    assert not is_stale(0, 5, -1)
    assert min_version(6, 1) == 4

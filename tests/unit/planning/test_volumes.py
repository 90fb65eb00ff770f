"""Means of what a phase's endpoints send each other, and when they are others than circuits were planned for."""

import pytest

from rubato.planning.volumes import CHANGED, demands, followed, strayed, volumes

AB, AC = ("a", "b"), ("a", "c")


def test_a_change_is_half_known_after_one_round_and_what_was_before_is_all_but_forgotten_after_ten():
    means = followed({AB: 1000.0}, {AB: 2000.0})
    assert means == {AB: 1500.0}

    for _ in range(9):
        means = followed(means, {AB: 2000.0})

    assert means[AB] == pytest.approx(2000, rel=1e-3)


def test_a_way_that_is_new_has_its_bytes_at_once_and_one_that_is_quiet_fades_until_it_is_forgotten():
    means = followed({AB: 800.0}, {AC: 300.0}, least=60.0)
    assert means == {AB: 400.0, AC: 300.0}

    for _ in range(3):
        means = followed(means, {AC: 300.0}, least=60.0)

    assert means == {AC: 300.0}


@pytest.mark.parametrize(
    ("now", "share"), [({AB: 1e9, AC: 1e9}, 0.0), ({AB: 3.0, AC: 1.0}, 0.25), ({AB: 1.0}, 0.5), ({("x", "y"): 1.0}, 1.0), ({}, 1.0)]
)
def test_bytes_stray_by_the_share_that_goes_another_way_and_not_by_their_number(now, share):
    assert strayed({AB: 1.0, AC: 1.0}, now) == pytest.approx(share)


def test_nothing_for_nothing_is_no_change():
    assert strayed({}, {}) == 0.0 < CHANGED


def test_demands_of_one_way_add_up_and_come_back_in_whole_bytes_in_their_order():
    means = volumes((("b", "c", 3), ("a", "b", 1), ("b", "c", 4)))

    assert demands({**means, AC: 0.4}) == (("b", "c", 7), ("a", "b", 1))

"""Circuits of a phase, by example."""

import pytest

from rubato.planning.circuits import Cross, FabricSnapshot, Verdict, materialise, plan
from tests.circuits import links_for

NAMES = ("a", "b", "c", "d")


def snapshot(**changes):
    base = FabricSnapshot(
        ports_per_endpoint=3,
        links=links_for((("a", "b", 100), ("c", "d", 50)), NAMES, 3),
        current=(),
        starts_in_s=1.0,
        lasts_s=1.0,
        reconfiguration_s=0.01,
    )
    return base._replace(**changes)


def test_heavy_pairs_get_the_spare_ports():
    links = links_for((("a", "b", 100), ("b", "a", 100), ("c", "d", 10)), NAMES, 4)

    assert links.count((0, 1)) == 3
    assert links.count((2, 3)) == 3
    assert len(links) == 7


def test_an_idle_endpoint_stays_reachable():
    links = links_for((("a", "b", 100),), NAMES, 2)

    assert {node for link in links for node in link} == {0, 1, 2, 3}


def test_names_beyond_the_fabric_take_the_electrical_path():
    assert links_for((("a", "elsewhere", 100),), ("a", "b"), 2) == ((0, 1),)


def test_one_port_each_can_not_connect_three():
    with pytest.raises(ValueError, match="3 ports, 1 at the poorest endpoint, can't connect 3 endpoints"):
        links_for((), ("a", "b", "c"), 1)


def test_a_link_is_two_circuits_between_the_ports_of_its_endpoints():
    assert materialise([(0, 1)], (), 4) == (Cross(0, 4), Cross(4, 0))


def test_circuits_that_serve_the_new_links_keep_their_ports():
    old = (Cross(2, 7), Cross(7, 2), Cross(3, 8), Cross(8, 3))

    new = materialise([(0, 1), (0, 1)], old, 4)

    assert {Cross(2, 7), Cross(7, 2)} <= set(new)
    assert Cross(3, 8) not in new


def test_more_links_than_ports_are_refused():
    with pytest.raises(ValueError, match="endpoint 0 has more links than its 1 ports"):
        materialise([(0, 1), (0, 2)], (), 1)


def test_a_phase_far_enough_ahead_gets_its_circuits():
    planned = plan(snapshot())

    assert (planned.reconfigure, planned.verdict) == (True, Verdict.AHEAD)


def test_circuits_that_fit_are_left_alone():
    current = plan(snapshot()).circuits

    assert plan(snapshot(current=current)) == (current, Verdict.FITS)


def test_the_old_circuits_stay_when_the_change_would_reach_into_the_phase():
    assert plan(snapshot(starts_in_s=0.005)) == ((), Verdict.KEPT)


def test_a_phase_shorter_than_the_delay_gets_no_circuits_of_its_own():
    assert plan(snapshot(lasts_s=0.009)) == ((), Verdict.KEPT)


def test_a_running_phase_is_changed_only_when_it_lasts():
    assert plan(snapshot(starts_in_s=0.0, lasts_s=0.05)) == ((), Verdict.KEPT)
    assert plan(snapshot(starts_in_s=0.0, lasts_s=0.1)).verdict is Verdict.LATE
    assert plan(snapshot(starts_in_s=0.0, lasts_s=None)).verdict is Verdict.LATE

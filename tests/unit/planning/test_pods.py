"""Circuits between pods join the racks that have bytes for each other, within the ports into the core."""

from collections import Counter

from rubato.planning.pods import plan_pods
from rubato.planning.topology import reserve

PODS = [0, 0, 0, 0, 1, 1, 1, 1]


def test_core_circuits_join_the_racks_that_talk():
    traffic = {(1, 6): 10**9, (2, 4): 10**9}

    plan = plan_pods(traffic, PODS, 8)

    assert set(plan.core) >= {(1, 6), (2, 4)}
    busiest = {pair for pair, _ in Counter(plan.core).most_common(2)}
    assert busiest == {(1, 6), (2, 4)}


def test_no_rack_has_more_core_circuits_than_the_fabric_has_core_ports():
    traffic = {(a, b): 10**9 for a in range(4) for b in range(4, 8)}

    plan = plan_pods(traffic, PODS, 8, most_core=3)

    ends = Counter(rack for pair in plan.core for rack in pair)
    assert max(ends.values()) == 3
    assert all(split.core <= 3 and split.core + split.pod == 8 for split in plan.splits)


def test_endpoints_without_bytes_are_joined_over_those_with_fewest_partners():
    free = [4] * 6

    links = reserve([(0, 1), (0, 2), (1, 2)], free)

    assert links.keys() >= {(0, 1), (0, 2), (3, 4), (3, 5)}
    assert sum(a < 3 <= b for a, b in links) == 1


def test_a_rack_between_two_pods_keeps_ports_for_the_pod_that_has_most_bytes_for_it():
    """The first pair of pods could take all of them."""
    pod_of = [0, 0, 0, 0, 1, 1, 2, 2]
    from_pod_0 = {(rack, 4): 1 for rack in range(4)}

    plan = plan_pods(from_pod_0 | {(4, 6): 4}, pod_of, 9, most_core=8)

    number = Counter(plan.core)
    assert number[4, 6] == 4
    assert all(number[pair] for pair in from_pod_0)

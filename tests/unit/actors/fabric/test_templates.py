"""The linear programs of the planner, solved."""

import pytest

from rubato.planning.demand import per_link
from rubato.planning.multihop import bottleneck, capacity_program, multi_hop
from rubato.planning.topology import direct

pytest.importorskip("scipy", reason="the extra `fabric` brings scipy, which solves the linear programs")

from rubato.actors.fabric.templates import solve


def test_more_partners_than_ports_share_links():
    everybody = {(a, b): 30 for a in range(5) for b in range(5) if a != b}

    least = solve(capacity_program(everybody, [2] * 5))[0]
    links = multi_hop(everybody, [2] * 5, solve)

    assert least == pytest.approx(60), "half a link to each of four partners"
    assert bottleneck(everybody, links, 5) == pytest.approx(90)
    assert bottleneck(everybody, links, 5) <= bottleneck(everybody, direct(per_link(everybody), [2] * 5), 5)


def test_shortest_paths_over_whole_links_are_never_better_than_the_best_split_over_fractional_ones():
    flows = {(a, b): 7 * a + 3 * b + 1 for a in range(6) for b in range(6) if a != b and (a * b) % 3 != 1}
    links = direct(per_link(flows), [3] * 6)

    assert solve(capacity_program(flows, [3] * 6))[0] <= bottleneck(flows, links, 6) + 1e-6


def test_without_traffic_the_links_still_connect():
    assert len(multi_hop({}, [2] * 4, solve)) == 3

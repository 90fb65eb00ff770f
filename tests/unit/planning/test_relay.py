"""The way of a broadcast as the fabric plans it and as hosts pull it is one and the same."""

import pytest

from rubato.planning.multihop import one_hop
from rubato.planning.relay import demands, plan, ring_sources

HOSTS = tuple(f"node-{n}" for n in range(1, 7))


@pytest.mark.parametrize("num", [1, 2, 3, 6])
def test_a_tree_has_a_demand_for_each_host_from_its_parent(num):
    hosts = HOSTS[:num]
    found = demands("node-1", hosts, 1000, by_rings=False)
    assert {target: source for source, target, _ in found} == plan("node-1", hosts)
    assert {size for *_, size in found} <= {1000}


@pytest.mark.parametrize("num", [2, 3, 6])
def test_on_a_ring_each_host_gets_all_bytes_from_the_neighbours_that_it_asks(num):
    hosts = HOSTS[:num]
    found = demands("node-1", hosts, 1000, by_rings=True)
    for host in hosts[1:]:
        given = {source: size for source, target, size in found if target == host}
        ways = ring_sources("node-1", hosts, host)
        assert set(given) == set(ways[: len(given)])
        assert sum(given.values()) == 1000
        assert sorted((*ways, host)) == sorted(hosts)


def test_where_nobody_forwards_a_pair_without_a_link_has_the_trickle():
    assert one_hop({(0, 1): 100, (2, 1): 40}, ((0, 1), (0, 1)), 0.1) == pytest.approx(400)
    assert one_hop({(1, 0): 100}, ((0, 1), (0, 1)), 0.1) == 50

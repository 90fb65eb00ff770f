"""Topologies, routes and port splits: what holds for every traffic matrix."""

from collections import Counter
from itertools import combinations, permutations, product
from math import ceil

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubato.planning.demand import heaviest_first, per_link
from rubato.planning.multihop import bottleneck, carried
from rubato.planning.pods import plan_pods, split
from rubato.planning.topology import direct, reserve
from rubato.sim.rfabric.baselines import assignment, greedy, matching

QUIET = settings(deadline=None)
"""Busy machines are slow; nothing here is about time."""

PLANNERS = [direct, greedy, matching]


def flows_over(num, most=30):
    node = st.integers(0, num - 1)
    pair = st.tuples(node, node).filter(lambda p: p[0] != p[1])
    return st.dictionaries(pair, st.integers(1, 1000), max_size=most if num > 1 else 0)


@st.composite
def fabrics(draw, most=8, most_ports=6):
    num = draw(st.integers(2, most))
    ports = draw(st.lists(st.integers(1, most_ports), min_size=num, max_size=num))
    assume(sum(ports) >= 2 * (num - 1))
    return draw(flows_over(num)), ports


def connected(nodes, links):
    nodes = set(nodes)
    reached, frontier = {min(nodes)}, [min(nodes)]
    while frontier:
        node = frontier.pop()
        for pair in links:
            for other in set(pair) - {node} if node in pair else ():
                if other not in reached:
                    reached.add(other)
                    frontier.append(other)
    return reached == nodes


@QUIET
@given(fabrics())
def test_the_reserved_subgraph_is_a_spanning_tree_within_the_ports(fabric):
    directed, ports = fabric
    free = list(ports)

    links = reserve(heaviest_first(per_link(directed)), free)

    assert links.total() == len(ports) - 1
    assert connected(range(len(ports)), links)
    used = Counter(node for pair in links.elements() for node in pair)
    assert [p - used[i] for i, p in enumerate(ports)] == free
    assert min(free) >= 0


@QUIET
@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_ports_that_can_not_connect_are_refused(ports):
    assume(min(ports) < 1 or sum(ports) < 2 * (len(ports) - 1))

    with pytest.raises(ValueError, match="can't connect"):
        reserve((), ports)


@pytest.mark.parametrize("planner", PLANNERS)
@QUIET
@given(fabric=fabrics())
def test_every_planner_connects_all_endpoints_within_their_ports(planner, fabric):
    directed, ports = fabric

    links = planner(per_link(directed), ports)

    used = Counter(node for link in links for node in link)
    assert all(used[i] <= p for i, p in enumerate(ports))
    assert all(a < b for a, b in links)
    assert connected(range(len(ports)), links)
    assert planner(per_link(directed), ports) == links


@settings(QUIET, max_examples=40)
@given(fabrics(most=4, most_ports=4))
def test_direct_links_have_the_least_bottleneck_over_the_reserved_links(fabric):
    directed, ports = fabric
    demand = per_link(directed)
    assume(demand)
    base = reserve(heaviest_first(demand), list(ports))
    pairs = list(combinations(range(len(ports)), 2))
    best = float("inf")
    for numbers in product(*(range(base[p], min(ports[p[0]], ports[p[1]]) + 1) for p in pairs)):
        links = dict(zip(pairs, numbers, strict=True))
        if all(sum(n for p, n in links.items() if i in p) <= most for i, most in enumerate(ports)):
            best = min(best, max(d / links[p] if links[p] else float("inf") for p, d in demand.items()))
    assume(best < float("inf"))

    links = Counter(direct(demand, ports))

    assert max(d / links[p] for p, d in demand.items()) == pytest.approx(best, rel=1e-6)


@QUIET
@given(fabrics(most_ports=12))
def test_direct_links_have_the_bottleneck_that_a_bisection_finds(fabric):
    directed, ports = fabric
    demand = per_link(directed)
    base, links = reserve(heaviest_first(demand), list(ports)), Counter(direct(demand, ports))
    assume(demand)
    assume(all(links[p] for p in demand))

    def feasible(bottleneck):
        used = Counter()
        for pair in base.keys() | demand.keys():
            number = max(base[pair], ceil(demand.get(pair, 0) / bottleneck))
            used.update({pair[0]: number, pair[1]: number})
        return all(used[i] <= p for i, p in enumerate(ports))

    low, high = 0.0, float(max(demand.values()))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if feasible(middle) else (middle, high)

    assert max(d / links[p] for p, d in demand.items()) == pytest.approx(high, rel=1e-9)


@settings(QUIET, max_examples=50)
@given(fabrics(), st.integers(0, 7))
def test_with_direct_links_for_all_one_more_port_never_slows_the_slowest_pair(fabric, lucky):
    directed, ports = fabric
    demand = per_link(directed)
    more = [p + (i == lucky % len(ports)) for i, p in enumerate(ports)]
    before, after = Counter(direct(demand, ports)), Counter(direct(demand, more))
    assume(demand)
    assume(all(before[p] for p in demand))
    assume(reserve(heaviest_first(demand), list(ports)) == reserve(heaviest_first(demand), list(more)))

    assert max(d / after[p] for p, d in demand.items()) <= max(d / before[p] for p, d in demand.items()) * (1 + 1e-6)


@QUIET
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), min_size=n, max_size=n)))
def test_the_assignment_is_the_heaviest_permutation(weights):
    columns = assignment(weights)

    num = len(weights)
    assert sorted(columns) == list(range(num))
    heaviest = max(sum(weights[i][c] for i, c in enumerate(p)) for p in permutations(range(num)))
    assert sum(weights[i][c] for i, c in enumerate(columns)) == heaviest


@QUIET
@given(fabrics())
def test_routes_conserve_bytes(fabric):
    directed, ports = fabric
    links = direct(per_link(directed), ports)

    over = carried(directed, links, len(ports)).size_bytes

    assert all((min(arc), max(arc)) in links for arc in over)
    for node in range(len(ports)):
        enters = sum(v for (_, b), v in over.items() if b == node)
        leaves = sum(v for (a, _), v in over.items() if a == node)
        sinks = sum(v for (_, b), v in directed.items() if b == node)
        sources = sum(v for (a, _), v in directed.items() if a == node)
        assert enters - leaves == pytest.approx(sinks - sources)
    assert bottleneck(directed, links, len(ports)) >= max(directed.values(), default=0) / max(ports) - 1e-9


@QUIET
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(4, 40), st.integers(0, 2), st.integers(0, 2))
def test_the_port_split_is_the_best_there_is(core, pod, ports, least_core, least_pod):
    def slowest(c):
        sides = ((core, c), (pod, ports - c))
        return max(v / n if n else float("inf") for v, n in sides if v) if core or pod else 0.0

    found = split(core, pod, ports, least_core=least_core, least_pod=least_pod)

    assert found.core + found.pod == ports
    assert found.core >= least_core
    assert found.pod >= least_pod
    assert slowest(found.core) == min(slowest(c) for c in range(least_core, ports - least_pod + 1))


@settings(QUIET, max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_racks_of_all_pods_reach_each_other_within_their_uplinks(sizes, data):
    pod_of = [pod for pod, size in enumerate(sizes) for _ in range(size)]
    directed = data.draw(flows_over(len(pod_of)))

    plan = plan_pods(directed, pod_of, 6)

    used = Counter(rack for link in (*plan.pod, *plan.core) for rack in link)
    assert all(used[rack] <= 6 for rack in range(len(pod_of)))
    for links, side in ((plan.pod, "pod"), (plan.core, "core")):
        ends = Counter(rack for link in links for rack in link)
        assert all(ends[rack] <= getattr(s, side) for rack, s in enumerate(plan.splits))
        assert all((pod_of[a] == pod_of[b]) == (side == "pod") for a, b in links)
    assert connected(range(len(pod_of)), (*plan.pod, *plan.core))

"""Circuits: what holds for every traffic matrix."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.circuits import Cross, FabricSnapshot, Verdict, materialise, plan
from rubato.planning.demand import flows, per_link
from tests.circuits import links_for


@st.composite
def fabrics(draw):
    num, ports = draw(st.integers(0, 8)), draw(st.integers(2, 5))
    names = tuple(f"e{i}" for i in range(num))
    name = st.sampled_from([*names, "stranger"])
    traffic = draw(st.lists(st.tuples(name, name, st.integers(0, 1000)), max_size=30))
    return names, ports, tuple(traffic)


def connected(num, links):
    reached, frontier = {0}, [0]
    while frontier:
        node = frontier.pop()
        for a, b in links:
            for near, far in ((a, b), (b, a)):
                if near == node and far not in reached:
                    reached.add(far)
                    frontier.append(far)
    return num == 0 or len(reached) == num


@given(fabrics())
def test_every_phase_connects_all_endpoints_within_their_ports(fabric):
    names, ports, traffic = fabric

    links = links_for(traffic, names, ports)

    used = Counter(node for link in links for node in link)
    assert all(n <= ports for n in used.values())
    assert connected(len(names), links)


@given(fabrics())
def test_the_heaviest_pair_has_a_direct_circuit(fabric):
    names, ports, traffic = fabric
    demand = per_link(flows(traffic, names))

    links = links_for(traffic, names, ports)

    heaviest = max(demand.values(), default=0)
    assert not heaviest or any(pair in links for pair, size_bytes in demand.items() if size_bytes == heaviest)


@given(fabrics(), st.randoms())
def test_templates_do_not_depend_on_the_order_of_the_traffic(fabric, random):
    names, ports, traffic = fabric
    shuffled = list(traffic)
    random.shuffle(shuffled)

    assert links_for(traffic, names, ports) == links_for(shuffled, names, ports)


@given(fabrics(), fabrics())
def test_no_port_is_used_twice_and_what_can_stay_lit_does(before, after):
    names, ports, traffic = after
    old_names, _, old_traffic = before
    old = materialise(links_for(old_traffic, old_names, ports), (), ports)
    links = links_for(traffic, names, ports)

    circuits = materialise(links, old, ports)

    assert len({c.ingress for c in circuits}) == len({c.egress for c in circuits}) == len(circuits) == 2 * len(links)
    assert Counter(tuple(sorted((c.ingress // ports, c.egress // ports))) for c in circuits) == Counter(
        {pair: 2 * n for pair, n in Counter(links).items()}
    )
    shared = Counter(links) & Counter(links_for(old_traffic, old_names, ports))
    assert len(set(circuits) & set(old)) == 2 * shared.total()


@given(fabrics(), st.floats(-1, 1), st.one_of(st.none(), st.floats(0, 1)), st.floats(0, 0.1))
def test_a_plan_is_repeatable_and_keeping_means_the_current_circuits(fabric, starts_in_s, lasts_s, delay_s):
    names, ports, traffic = fabric
    snapshot = FabricSnapshot(ports, links_for(traffic, names, ports), (Cross(0, 1),), starts_in_s, lasts_s, delay_s)

    planned = plan(snapshot)

    assert plan(snapshot) == planned
    assert planned.reconfigure or planned.circuits == snapshot.current
    assert planned.verdict in Verdict


@given(fabrics())
def test_once_made_the_same_template_asks_for_nothing(fabric):
    names, ports, traffic = fabric
    links = links_for(traffic, names, ports)
    first = plan(FabricSnapshot(ports, links, (), 1.0, None, 0.01))

    again = plan(FabricSnapshot(ports, links, first.circuits, 1.0, None, 0.01))

    assert not again.reconfigure

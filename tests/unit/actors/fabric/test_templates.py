"""What templates are made of as the job goes on, who has ports, and the linear programs of the planner, solved."""

import asyncio
from collections import Counter

import pytest

from rubato.actors.fabric.section import FabricSection
from rubato.actors.fabric.templates import Templates
from rubato.planning.demand import per_link
from rubato.planning.multihop import bottleneck, capacity_program, multi_hop
from rubato.planning.topology import direct
from rubato.runtime.memory import MemoryStore
from rubato.runtime.store.store import Fence


@pytest.fixture
def templates():
    return Templates(FabricSection(ports=16, ports_per_endpoint=4), ())


EVEN = (("p", "e1", 100), ("p", "e2", 100), ("e1", "e2", 100))


def links(templates, phase="rollout"):
    """Links by the names that they join."""
    names = templates.book.endpoints
    return Counter(frozenset((names[a], names[b])) for a, b in templates.links(phase))


def test_volumes_that_change_move_the_links(templates):
    templates.learn("rollout", EVEN)
    assert set(links(templates).values()) == {2}

    anew = [templates.learn("rollout", (*EVEN[:2], ("e1", "e2", 10**9))) for _ in range(3)]

    assert links(templates)[frozenset(("e1", "e2"))] == 3
    assert anew == [True, False, False], "the shares stay, though the bytes still grow"
    assert {(a, b): size for a, b, size in templates.book.phases["rollout"].traffic}["e1", "e2"] > 0.8e9


def test_twice_the_bytes_on_every_way_change_what_a_phase_takes_and_not_its_links(templates):
    large = tuple((a, b, 10**7 * size) for a, b, size in EVEN)
    templates.learn("rollout", large)
    before, took = templates.links("rollout"), templates.busy_s("rollout", "rollout")

    assert not templates.learn("rollout", tuple((a, b, 2 * size) for a, b, size in large))

    assert templates.links("rollout") == before
    assert templates.busy_s("rollout", "rollout") == pytest.approx(2 * took, rel=0.01)


def test_what_is_sent_no_more_is_forgotten(templates):
    templates.observe("rollout", EVEN)
    for _ in range(8):
        templates.observe("rollout", EVEN[:1])

    assert templates.book.phases["rollout"].traffic == EVEN[:1]


def test_what_nobody_tells_of_any_more_fades_and_a_phase_without_bytes_has_no_template(templates):
    templates.learn("rollout", (("kv", "e1", 1000),))
    templates.observe("rollout", ())
    assert templates.book.phases["rollout"].told == (("kv", "e1", 1000),), "it was told of in this round"

    for _ in range(12):
        templates.observe("rollout", ())

    assert templates.links("rollout") is None


def test_control_messages_get_no_ports_and_no_template(templates):
    templates.learn("weight_sync", (("t", "e1", 10**6),))

    assert not templates.observe("rollout", (("m", "b", 9_000), ("t", "b", 500)))
    assert templates.links("rollout") is None
    assert templates.observe("rollout", (("m", "b", 20_000), ("t", "b", 500)))
    assert set(templates.book.endpoints) == {"t", "e1", "m", "b"}


def test_who_has_most_bytes_has_ports_first(templates):
    templates.observe("rollout", (("a", "b", 100), ("c", "d", 300), ("e", "f", 200)))

    assert templates.book.endpoints == ("c", "d", "e", "f")


def test_an_endpoint_that_left_gives_its_ports_to_one_that_had_none_and_the_others_keep_theirs(templates):
    for engine in ("e0", "e1", "e2", "e3"):
        templates.learn("rollout", (("p", engine, 100),))
    assert templates.book.endpoints == ("p", "e0", "e1", "e2")

    assert templates.leave({"e1"})
    assert templates.book.endpoints == ("p", "e0", "e3", "e2")

    assert templates.leave({"e0", "e9"})
    assert templates.book.endpoints == ("p", "", "e3", "e2")
    assert {end for pair in templates.links("rollout") for end in pair} == {0, 2, 3}, "it is in no spanning tree"
    assert not templates.leave({"e9"})


def test_over_many_joins_and_leaves_every_engine_that_is_there_has_circuits(templates):
    for at in range(50):
        assert templates.leave({f"e{at - 3}"}) == (at >= 3)
        templates.learn("rollout", (("p", f"e{at}", 100),))
        assert set(templates.book.endpoints) - {""} == {"p", *(f"e{k}" for k in range(max(0, at - 2), at + 1))}


def test_dead_ports_are_those_of_their_place_also_after_one_before_them_was_given_back(templates):
    templates.learn("rollout", EVEN)
    templates.leave({"p"})

    templates.without(frozenset({8, 9, 10}))

    assert templates.links("rollout") == ((1, 2),)


def test_a_phase_whose_endpoints_all_left_has_no_template(templates):
    templates.learn("rollout", (("p", "e1", 100),))
    templates.learn("weight_sync", (("t", "e2", 100),))

    templates.leave({"p", "e1"})

    assert set(templates.book.phases) == {"weight_sync"}
    assert set(templates.even()) == {(2, 3)}


def test_what_left_stays_away_in_what_a_successor_reads(templates):
    store = MemoryStore()

    async def handed_on():
        templates.learn("rollout", EVEN)
        templates.leave({"e1"})
        await templates.save(store, Fence("fabric_controller-1", 1))
        found = Templates(FabricSection(ports=16, ports_per_endpoint=4), ())
        await found.load(store)
        return found

    assert asyncio.run(handed_on()).book == templates.book


@pytest.fixture
def solve():
    pytest.importorskip("scipy", reason="the extra `fabric` brings scipy, which solves the linear programs")
    from rubato.actors.fabric.templates import solve

    return solve


def test_more_partners_than_ports_share_links(solve):
    everybody = {(a, b): 30 for a in range(5) for b in range(5) if a != b}

    least = solve(capacity_program(everybody, [2] * 5))[0]
    links = multi_hop(everybody, [2] * 5, solve)

    assert least == pytest.approx(60), "half a link to each of four partners"
    assert bottleneck(everybody, links, 5) == pytest.approx(90)
    assert bottleneck(everybody, links, 5) <= bottleneck(everybody, direct(per_link(everybody), [2] * 5), 5)


def test_shortest_paths_over_whole_links_are_never_better_than_the_best_split_over_fractional_ones(solve):
    flows = {(a, b): 7 * a + 3 * b + 1 for a in range(6) for b in range(6) if a != b and (a * b) % 3 != 1}
    links = direct(per_link(flows), [3] * 6)

    assert solve(capacity_program(flows, [3] * 6))[0] <= bottleneck(flows, links, 6) + 1e-6


def test_without_traffic_the_links_still_connect(solve):
    assert len(multi_hop({}, [2] * 4, solve)) == 3

"""Relay trees: every host once, shallow, without cycles, whoever is alive."""

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.relay import FANOUT, ancestors, plan, sources

hosts = st.sets(st.text("abcdefgh0123456789-", min_size=1, max_size=6), max_size=40)


def check(parents, root, members):
    assert set(parents) == members - {root}
    for host in parents:
        above = ancestors(parents, host)
        assert above[-1] == root
        assert len(set(above)) == len(above)
        assert host not in above
        assert len(above) <= ceil(log2(len(members | {root})))


@given(hosts, st.text("xyz", min_size=1, max_size=3))
def test_every_host_is_in_the_tree_once_without_cycles_and_near_the_root(members, root):
    parents = plan(root, members)

    check(parents, root, members)
    served = list(parents.values())
    assert all(served.count(host) <= FANOUT for host in served)


@given(hosts, st.data())
def test_when_relays_die_the_living_are_planned_anew_without_them(members, data):
    dead = set(data.draw(st.lists(st.sampled_from(sorted(members)), unique=True))) if members else set()

    parents = plan("root", members - dead)

    check(parents, "root", members - dead)
    assert not dead & (set(parents) | set(parents.values()))


@given(hosts, st.randoms())
def test_all_hosts_find_the_same_tree_whatever_order_they_know_each_other_in(members, rng):
    shuffled = sorted(members)
    rng.shuffle(shuffled)

    assert plan("root", shuffled) == plan("root", members)


@given(hosts)
def test_a_host_may_look_at_every_other_host_its_parent_first_and_its_own_children_last(members):
    parents = plan("root", members)

    for host in parents:
        found = sources(parents, host)
        assert found[0] == parents[host]
        assert sorted(found) == sorted((set(parents) | {"root"}) - {host})
        below = [host in ancestors(parents, h) for h in found]
        assert below == sorted(below)

"""Relay trees: every host once, shallow, without cycles, whoever is alive."""

from collections import Counter
from itertools import pairwise
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.relay import CHAIN_BYTES, FANOUT, ancestors, demands, plan, pod_of, ring_sources, sources

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


podded = st.dictionaries(st.text("abcdefgh0123456789-", min_size=1, max_size=6), st.sampled_from(["", "a", "b", "c"]), max_size=40)


@given(podded, st.sampled_from(["", "a", "b"]))
def test_a_tree_enters_each_pod_once_and_is_shallow_within(pods, home):
    pods |= {"root": home}

    parents = plan("root", pods, pods)

    assert set(parents) == set(pods) - {"root"}
    entered = Counter(pods[host] for host, parent in parents.items() if pods[parent] != pods[host])
    assert entered == Counter(set(pods.values()) - {home})
    left = Counter(pods[parent] for host, parent in parents.items() if pods[parent] != pods[host])
    assert all(number == 1 for number in left.values()), "a pod's link out of it carries one copy too"
    for host in parents:
        above = ancestors(parents, host)
        within = [other for other in above if pods[other] == pods[host]]
        members = sum(pod == pods[host] for pod in pods.values())
        assert above[-1] == "root"
        assert len(within) <= ceil(log2(members)) if members > 1 else not within
        assert len(above) <= len(set(pods.values())) - 1 + ceil(log2(members or 1))


@given(podded, st.data())
def test_a_pod_whose_first_host_dies_is_entered_by_another(pods, data):
    pods |= {"root": "a"}
    parents = plan("root", pods, pods)
    heads = [host for host, parent in parents.items() if pods[parent] != pods[host]]
    dead = set(data.draw(st.lists(st.sampled_from(heads), unique=True))) if heads else set()

    living = {host: pod for host, pod in pods.items() if host not in dead}
    again = plan("root", living, living)

    assert set(again) == set(living) - {"root"}
    entered = Counter(living[host] for host, parent in again.items() if living[parent] != living[host])
    assert entered == Counter(set(living.values()) - {"a"})


@given(podded)
def test_around_a_ring_a_pod_gets_one_copy_from_others(pods):
    pods |= {"root": "a"}
    if len(set(pods.values())) < 2:
        return

    came = Counter()
    for source, target, size_bytes in demands("root", pods, 100, by_rings=True, pods=pods):
        if pods[source] != pods[target]:
            came[pods[target]] += size_bytes

    back = came.pop("a", 0)
    assert back in (0, 50), "the ring closes in the pod that it began in"
    assert came == Counter(dict.fromkeys(set(pods.values()) - {"a"}, 100))
    for host in set(pods) - {"root"}:
        assert sorted((*ring_sources("root", pods, host, pods), host)) == sorted(pods)


@given(podded)
def test_beside_its_way_up_a_host_looks_in_its_own_pod_first(pods):
    pods |= {"root": ""}
    parents = plan("root", pods, pods)

    for host in parents:
        found = sources(parents, host, pods)
        above = ancestors(parents, host)
        assert found[: len(above)] == above
        assert sorted(found) == sorted(set(pods) - {host})
        rest = [(host in ancestors(parents, other), pods[other] != pods[host]) for other in found[len(above) :]]
        assert rest == sorted(rest)


@given(podded)
def test_what_is_large_leaves_each_host_once_for_its_pod_and_once_for_the_next(pods):
    pods |= {"root": "a"}

    parents = plan("root", pods, pods, size_bytes=CHAIN_BYTES * len(pods))

    assert set(parents) == set(pods) - {"root"}
    left = Counter((parent, pods[parent] == pods[host]) for host, parent in parents.items())
    assert set(left.values()) <= {1}
    entered = Counter(pods[host] for host, parent in parents.items() if pods[parent] != pods[host])
    assert entered == Counter(set(pods.values()) - {"a"})


def test_a_chain_is_for_what_is_large_for_the_number_of_hosts():
    hosts = [f"node-{n}" for n in range(1, 9)]

    large, small = (plan("node-1", hosts, size_bytes=8 * CHAIN_BYTES - less) for less in (0, 1))

    assert large == {host: before for before, host in pairwise(hosts)}
    assert small == plan("node-1", hosts)


def test_names_go_by_their_numbers_and_a_label_names_the_pod():
    assert plan("node-1", ["node-10", "node-2", "node-3"]) == {"node-2": "node-1", "node-3": "node-1", "node-10": "node-2"}
    assert [pod_of(labels) for labels in ((), ("h20", "pod=b"), ("pod=b", "pod=a"))] == ["", "b", "a"]

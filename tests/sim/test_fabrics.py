"""Collectives on every fabric against their closed forms; conservation; and what must not change a result, or must."""

import numpy as np
import pytest

from rubato.sim.net import collectives as forms
from rubato.sim.net.clos import ClosSpec, clos
from rubato.sim.net.direct import DirectSpec, direct_network
from rubato.sim.net.network import complete, flows

NIC, NICS, SIZE = 50e9, 8, 3.2e9
RATE = NIC * NICS


def tree(servers=64, **changes):
    return clos(ClosSpec(servers, 64, NIC)._replace(**changes))


def seconds(network, transfers):
    return complete(network, flows(list(transfers), NICS)).seconds


ring_of_servers = direct_network(DirectSpec(8, 1, NIC), [(i, (i + 1) % 8) if i < 7 else (0, 7) for i in range(8)] * 4)
mesh_of_racks = direct_network(DirectSpec(8, 2, NIC), [(a, b) for a in range(4) for b in range(a + 1, 4)] * 8)
oversubscribed = tree(servers=12, oversubscription=3)
FULL = {"fat-tree": tree(), "rail-optimised": tree(rail_optimised=True), "three tiers": tree(servers=512)}


@pytest.mark.parametrize("name", FULL)
def test_on_a_full_tree_only_the_nics_limit_an_all_to_all(name):
    servers = range(64)

    took = seconds(FULL[name], forms.all_to_all([servers], SIZE / 64))

    assert took == pytest.approx(63 / 64 * SIZE / RATE, rel=1e-9)


ALL = [*FULL.values(), oversubscribed, mesh_of_racks, ring_of_servers]


@pytest.mark.parametrize("network", ALL)
def test_rings_of_neighbours_run_at_full_rate_on_every_fabric(network):
    took = seconds(network, forms.rings([range(8)], forms.ring_hop_bytes(8, SIZE)))

    assert took == pytest.approx(7 / 8 * SIZE / RATE, rel=1e-9)
    assert forms.ring_s(8, SIZE, RATE) == pytest.approx(7 / 8 * SIZE / RATE, rel=1e-12)
    assert forms.ring_all_reduce_s(8, SIZE, RATE) == pytest.approx(2 * 7 / 8 * SIZE / RATE, rel=1e-12)


@pytest.mark.parametrize("network", ALL)
def test_a_broadcast_down_two_chains_runs_at_full_rate_on_every_fabric(network):
    took = seconds(network, forms.chains([range(8)], SIZE))

    assert took == pytest.approx(SIZE / RATE, rel=1e-9)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_an_oversubscribed_leaf_stretches_what_leaves_it(k):
    network = tree(servers=2 * (64 * k // (k + 1) // 8), oversubscription=k)
    per_leaf = 64 * k // (k + 1) // 8
    pair = SIZE / (2 * per_leaf)

    took = seconds(network, forms.all_to_all([range(2 * per_leaf)], pair))

    nic_s = (2 * per_leaf - 1) * pair / RATE
    leaf_s = per_leaf * per_leaf * pair / (per_leaf * RATE / k)
    assert took == pytest.approx(max(nic_s, leaf_s), rel=1e-9)


def test_an_all_to_all_over_a_mesh_of_racks_takes_what_the_fullest_circuits_take():
    pair = SIZE / 8

    took = seconds(mesh_of_racks, forms.all_to_all([range(8)], pair))

    assert took == pytest.approx(max(7 * pair / RATE, 4 * pair / (8 * NIC)), rel=1e-9)


@pytest.mark.parametrize("n", [3, 7, 9])  # odd: every pair has one shortest way
def test_an_all_to_all_round_a_ring_pays_for_its_hops(n):
    network = direct_network(DirectSpec(n, 1, NIC), [(i, (i + 1) % n) for i in range(n)] * 4)

    took = seconds(network, forms.all_to_all([range(n)], SIZE / n))

    hops_per_circuit = (n * n - 1) / 8
    assert took == pytest.approx(hops_per_circuit * SIZE / n / (4 * NIC), rel=1e-9)


def random_transfers(seed, servers=64, number=40):
    rng = np.random.default_rng(seed)
    return [(int(a), int(b), float(v)) for a, b, v in zip(*rng.integers(0, servers, (2, number)), rng.uniform(1, 9e9, number), strict=True)]


NETWORKS = {
    **FULL, "oversubscribed": tree(oversubscription=3), "hashed": tree(ecmp_seed=4),
    "circuits": direct_network(DirectSpec(64, 4, NIC), [(i, j) for i in range(16) for j in (i + 1, i + 3) if j < 16]),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_bytes_are_conserved_and_no_link_carries_more_than_it_can(name):
    network, wanted = NETWORKS[name], flows(random_transfers(7), NICS)

    done = complete(network, wanted)

    paths = network.route(wanted.source, wanted.target)
    expected = np.bincount(paths.links, wanted.size_bytes[paths.flow_of], minlength=len(network.capacity))
    if not network.per_nic:
        np.testing.assert_allclose(done.link_bytes, expected, rtol=1e-9)
    assert done.link_bytes.sum() == pytest.approx(expected.sum(), rel=1e-9)
    assert np.all(done.link_bytes <= network.capacity * done.seconds * (1 + 1e-9))
    assert done.finish_s.max() == done.seconds


def test_no_byte_goes_over_a_dark_circuit_and_what_has_no_path_is_refused():
    lit = direct_network(DirectSpec(6, 1, NIC), [(0, 1), (1, 2), (3, 4), (4, 5)])

    done = complete(lit, flows([(0, 2, SIZE)], NICS))

    carrying = {lit.names[i] for i in np.flatnonzero(done.link_bytes)}
    assert carrying == {"circuit 0>1", "circuit 1>2"}
    with pytest.raises(ValueError, match="no circuits lead from node 0 to node 4"):
        lit.route(np.array([0]), np.array([4]))


def test_oversubscription_of_one_is_the_fat_tree():
    transfers = random_transfers(1)

    assert seconds(tree(oversubscription=1), transfers) == seconds(tree(), transfers)


def test_more_circuits_or_more_planes_are_never_slower():
    transfers = random_transfers(2)
    links = [(i, j) for i in range(16) for j in (i + 1, i + 3) if j < 16]
    few, many = (direct_network(DirectSpec(64, 4, NIC), links * k) for k in (1, 2))

    assert seconds(many, transfers) <= seconds(few, transfers)
    assert seconds(tree(oversubscription=3), transfers) <= seconds(tree(oversubscription=3, lost=0.25), transfers)


def test_bytes_and_rates_scale_together():
    transfers = random_transfers(3)
    doubled = [(a, b, 2 * v) for a, b, v in transfers]

    assert seconds(tree(), doubled) == pytest.approx(2 * seconds(tree(), transfers), rel=1e-9)


def test_hashing_is_never_faster_than_spraying_where_the_leaf_is_the_bottleneck():
    transfers = list(forms.all_to_all([range(12)], SIZE / 12))

    assert seconds(tree(oversubscription=3, ecmp_seed=1), transfers) >= seconds(tree(oversubscription=3), transfers)


@pytest.mark.parametrize(("racks", "kind"), [(10, "oversubscribed"), (9, "ring")])
def test_relabelled_racks_give_the_same_times(racks, kind):
    """On circuits only where every pair has one shortest way: among several the numbers of the nodes choose."""
    order = np.random.default_rng(5).permutation(racks).tolist()
    wanted = random_transfers(6, servers=6 * racks)
    moved = [(order[a // 6] * 6 + a % 6, order[b // 6] * 6 + b % 6, v) for a, b, v in wanted]
    if kind == "ring":
        links = [(i, (i + 1) % racks) for i in range(racks)]
        spec = DirectSpec(6 * racks, 6, NIC)
        here, there = (direct_network(spec, found) for found in (links, [(order[a], order[b]) for a, b in links]))
    else:
        here = there = tree(servers=6 * racks, oversubscription=3)

    before, after = complete(here, flows(wanted, NICS)), complete(there, flows(moved, NICS))

    np.testing.assert_allclose(after.finish_s, before.finish_s, rtol=1e-9)

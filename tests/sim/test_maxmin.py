"""Max-min rates: both implementations against the definition, and against each other."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.sim.net.maxmin import Paths, max_min_rates


def random_flows(seed, num_flows=40, num_links=12):
    rng = np.random.default_rng(seed)
    hops = [rng.choice(num_links, size=rng.integers(1, 5), replace=False) for _ in range(num_flows)]
    start = np.concatenate([[0], np.cumsum([len(h) for h in hops])])
    width = rng.integers(1, 9, num_flows).astype(float)
    return Paths(start, np.concatenate(hops)), width, rng.uniform(1, 10, num_links)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_link_is_overfull_and_every_flow_has_a_full_link_on_which_none_is_served_better(seed):
    paths, width, capacity = random_flows(seed)

    rates = max_min_rates(paths, width, capacity, compiled=False)

    flow_of, share = paths.flow_of, rates / width
    load = np.bincount(paths.links, rates[flow_of], minlength=len(capacity))
    assert np.all(load <= capacity * (1 + 1e-9))
    best = np.zeros(len(capacity))
    np.maximum.at(best, paths.links, share[flow_of])
    bottleneck = (load[paths.links] >= capacity[paths.links] * (1 - 1e-9)) & (share[flow_of] >= best[paths.links] * (1 - 1e-9))
    assert set(flow_of[bottleneck]) == set(range(len(width)))


def test_the_compiled_implementation_agrees_with_the_plain_one():
    for seed in range(40):
        paths, width, capacity = random_flows(seed)
        plain, fast = (max_min_rates(paths, width, capacity, compiled=c) for c in (False, True))
        np.testing.assert_allclose(fast, plain, rtol=1e-9)


def test_a_flow_of_width_eight_gets_eight_shares():
    paths = Paths(np.array([0, 1, 2]), np.array([0, 0]))

    rates = max_min_rates(paths, np.array([1.0, 8.0]), np.array([9.0]))

    assert rates.tolist() == [1.0, 8.0]


def test_relabelled_links_give_the_same_rates():
    paths, width, capacity = random_flows(3)
    order = np.random.default_rng(1).permutation(len(capacity))
    moved = np.empty_like(capacity)
    moved[order] = capacity

    relabelled = max_min_rates(Paths(paths.start, order[paths.links]), width, moved)

    np.testing.assert_allclose(relabelled, max_min_rates(paths, width, capacity), rtol=1e-12)

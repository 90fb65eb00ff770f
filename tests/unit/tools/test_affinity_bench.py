"""The bench of hardware affinity: what it compares, and the figures that it writes."""

from tools.bench import affinity as bench


def test_all_arms_cost_the_same_within_a_few_percent():
    prices = [bench.price(arm.engines) for arm in bench.arms()]

    assert max(prices) <= 1.06 * min(prices)


def test_every_map_of_the_tasks_is_tried():
    maps = [tuple(arm.affinity.values()) for arm in bench.arms() if isinstance(arm.affinity, dict) and arm.affinity]

    assert sorted(maps) == [("h20", "h20"), ("h20", "h800"), ("h800", "h20"), ("h800", "h800")]


def test_the_figures_are_those_of_the_arms():
    arms = bench.arms()
    found = {arm.name: bench.Measured(float(at), 0.0) for at, arm in enumerate(arms, 1)}

    summary = bench.summed_up(found, arms)

    assert (summary["learned"], summary["best"], summary["uniform"]) == (1.0, 5.0, {"h800": 6.0, "h20": 7.0})
    assert summary["paced"]

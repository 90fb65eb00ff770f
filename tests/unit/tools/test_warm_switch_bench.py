"""tools/bench/warm_switch.py: parts of turns and starts, and their ratio."""

import pytest

from tools.bench.warm_switch import cold, figures, warm


def event(name, t, **more):
    return {"event": name, "t": t} | more


def test_a_turn_is_from_the_permit_in_the_store_to_awake_and_the_first_does_not_count():
    asker = [event("permit_held", at, epoch=epoch) for epoch, at in ((3, 10.5), (5, 20.25), (9, 30.5))]
    woken = [event("woke", 11.0, epoch=3, seconds=0.5), event("woke", 21.0, epoch=5, seconds=0.5)]

    assert warm({3: 10.0, 5: 20.0, 9: 30.0}, asker, woken) == [{"told": 0.25, "asked": 0.25, "wake": 0.5}]


def test_a_start_is_from_its_process_to_ready_and_the_first_does_not_count():
    own = [
        *(event("model_loads", 2.0), event("engine_started", 4.0), event("ready", 4.5)),
        *(event("model_loads", 13.0), event("epoch", 17.0), event("ready", 17.5)),
    ]

    assert cold([0.0, 10.0], own) == [{"imports": 3.0, "load": 4.0, "ready": 0.5}]


def test_the_ratio_is_of_the_medians_of_sums_and_a_copy_counts_as_warm():
    turns = [{"told": 0.1, "wake": wake} for wake in (0.1, 0.3, 9.0)]
    starts = [{"imports": imports, "load": 1.0} for imports in (4.0, 5.0, 1.0)]

    found = figures(turns, starts, 0.1)

    assert found["ratio"] == pytest.approx(10.0)
    assert (found["warm_s"], found["cold_s"]) == pytest.approx((0.5, 5.0))
    assert found["warm"] == pytest.approx({"told": 0.1, "wake": 0.3, "copy": 0.1})
    assert (found["turns"], found["starts"]) == (3, 3)

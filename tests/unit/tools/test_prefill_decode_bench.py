"""The bench of prefill apart from decode: what it compares, and the figures that it writes."""

import pytest

from rubato.actors.engines.pace import MOST_OUTLASTED
from rubato.runtime.config.compose import from_mapping
from tools.bench import prefill_decode as bench


def found(**outlasted):
    """What arms gave: the second half as many samples per second as the first, and so on."""
    return {
        name: bench.Measured(12.0 / at, {"reading": 1.0, "writing": 2.0}, outlasted.get(name, 0.0), [f"{name} changed"])
        for at, name in enumerate(("auto", "1P3D", "2P2D", "3P1D"), 1)
    }


def test_every_split_of_the_engines_stands_beside_the_planner():
    assert {name: arm for name, arm in bench.arms().items() if name != "auto"} == {
        "1P3D": (1, "fixed"),
        "2P2D": (2, "fixed"),
        "3P1D": (3, "fixed"),
    }


@pytest.mark.parametrize("name", bench.arms())
def test_the_config_of_each_arm_loads_and_has_all_engines(name):
    num_prefill, balance = bench.arms()[name]

    job = from_mapping(bench.job(num_prefill, balance))

    members = job.members("engine")
    assert (members.count("prefill"), members.count("decode")) == (num_prefill, bench.ENGINES - num_prefill)
    assert job.section("proxy").balance == balance
    assert job.section("engine").pace is not None


def test_the_load_flips_half_way():
    reading, writing = (phase.requests * phase.prompt for phase in bench.PHASES)
    assert reading > 50 * writing

    reading, writing = (phase.requests * phase.sampled for phase in bench.PHASES)
    assert writing > 10 * reading


def test_the_figures_are_those_of_the_arms():
    summary = bench.summed_up(found())

    assert (summary["auto"], summary["fixed"]) == (12.0, {"1P3D": 6.0, "2P2D": 4.0, "3P1D": 3.0})
    assert summary["changes"] == ["auto changed"]
    assert summary["paced"]


@pytest.mark.parametrize(("late", "code"), [({}, 0), ({"2P2D": 2 * MOST_OUTLASTED}, 1), ({"auto": MOST_OUTLASTED}, 0)])
def test_an_arm_that_outlasted_its_pace_fails_the_bench(monkeypatch, late, code):
    monkeypatch.setattr(bench, "run", lambda name, *arm: found(**late)[name])

    assert bench.main([]) == code

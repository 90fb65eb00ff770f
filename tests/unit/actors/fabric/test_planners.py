"""The config names how circuits are chosen; controller and simulator build their templates by it."""

import pytest

from rubato.actors.fabric import templates
from rubato.actors.fabric.section import FabricSection
from rubato.actors.fabric.templates import Templates
from rubato.planning.demand import flows
from rubato.planning.multihop import bottleneck
from rubato.runtime.errors import ConfigError

NAMES = tuple(f"e{i}" for i in range(8))
TRAFFIC = tuple((a, b, 1 + 3 * i * k % 29) for i, a in enumerate(NAMES) for k, b in enumerate(NAMES) if a != b and (i + k) % 3)
"""More partners than ports."""


def links_by(planner):
    found = Templates(FabricSection(ports=32, ports_per_endpoint=4, planner=planner), NAMES)
    found.learn("phase", TRAFFIC)
    return found.links("phase")


def test_every_planner_uses_the_ports_that_there_are_and_its_own_links():
    pytest.importorskip("scipy", reason="the extra `fabric` brings scipy, which solves the linear programs")

    found = {name: links_by(name) for name in ("direct", "multi_hop", "greedy", "matching")}

    assert len(set(found.values())) == 4
    for links in found.values():
        assert all(sum(end in pair for pair in links) <= 4 for end in range(8))


def test_several_hops_by_the_linear_program_are_no_worse_than_direct_links():
    pytest.importorskip("scipy", reason="the extra `fabric` brings scipy, which solves the linear programs")
    directed = flows(TRAFFIC, NAMES)

    assert bottleneck(directed, links_by("multi_hop"), 8) < bottleneck(directed, links_by("direct"), 8)


def test_without_scipy_the_linear_program_is_refused(monkeypatch):
    monkeypatch.setattr(templates, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="needs SciPy"):
        links_by("multi_hop")


@pytest.mark.parametrize(
    "options", [{"ports": 128, "ports_per_endpoint": 4}, {"testbed": "t", "racks": {"a": ("10.0.0.1",), "b": ("10.0.0.2",)}}]
)
def test_the_linear_program_is_for_few_endpoints_that_forward(options):
    with pytest.raises(ValueError, match="at most 16 endpoints"):
        FabricSection(planner="multi_hop", **options)


RACKS = {f"rack-{i}": (f"10.0.0.{i + 1}",) for i in range(4)}
PODS = {"left": ("rack-0", "rack-2"), "right": ("rack-3", "rack-1")}


def links_of_pods(*traffic):
    section = FabricSection(ports=16, ports_per_endpoint=4, planner="pods", racks=RACKS, pods=PODS)
    found = Templates(section, tuple(RACKS))
    found.learn("phase", traffic)
    return found.links("phase")


def test_ports_go_where_a_phase_has_its_bytes_within_the_pod_or_to_the_core():
    inside = links_of_pods(("rack-0", "rack-2", 900), ("rack-1", "rack-3", 900))
    between = links_of_pods(("rack-0", "rack-1", 900), ("rack-2", "rack-3", 900))

    assert inside.count((0, 2)) == inside.count((1, 3)) == 3, "one port stays with the core"
    assert between.count((0, 1)) + between.count((0, 3)) + between.count((1, 2)) + between.count((2, 3)) == 6
    assert between.count((0, 2)) == between.count((1, 3)) == 1


def test_a_dead_port_is_left_out_of_the_pods_too():
    section = FabricSection(ports=16, ports_per_endpoint=4, planner="pods", racks=RACKS, pods=PODS)
    found = Templates(section, tuple(RACKS))
    found.learn("phase", (("rack-0", "rack-2", 900), ("rack-1", "rack-3", 900)))

    found.without(frozenset({5}))

    assert max(sum(end in pair for pair in found.links("phase")) for end in range(4)) == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"planner": "pods"}, "needs racks"),
        ({"planner": "pods", "racks": RACKS, "pods": {"left": ("rack-0",)}}, "every rack in one"),
        ({"planner": "pods", "racks": RACKS, "pods": {**PODS, "third": ("rack-0",)}}, "every rack in one"),
        ({"racks": RACKS, "pods": PODS}, "planner is direct"),
    ],
)
def test_pods_have_every_rack_once_and_the_planner_of_their_name(options, why):
    with pytest.raises(ValueError, match=why):
        FabricSection(**options)

"""Where bytes between actors go on the fabric, and what the links of a test-bed are told."""

import asyncio
from types import SimpleNamespace

import pytest

from rubato.actors.fabric.links import batches, links, rates_mbps
from rubato.actors.fabric.section import FabricSection
from rubato.actors.fabric.traffic import Racks
from rubato.planning.circuits import Cross

HOMES = {"trainer-1": 0, "engine-1": 0, "engine-2": 1, "engine-3": 1, "engine-4": 2, "node-1": 0, "node-2": 1, "node-3": 2}
RACKS = {"a": ("10.0.0.0",), "b": ("10.0.0.1",), "c": ("10.0.0.2",)}
WEIGHTS = tuple(("trainer-1", f"engine-{n}", 100) for n in (1, 2, 3, 4))


def racks(*, by_rings=False, named=RACKS):
    def find(name):
        home = HOMES.get(name)
        return None if home is None else SimpleNamespace(node=f"node-{home + 1}", public=f"tcp://10.0.0.{home}:1", provides=frozenset())

    return Racks(named, find, lambda role: tuple(n for n in HOMES if n.startswith(role)), by_rings=by_rings)


def test_bytes_between_actors_add_up_between_their_racks():
    told = (("engine-2", "engine-4", 5), ("engine-3", "engine-4", 7), ("engine-2", "engine-3", 9), ("engine-2", "gone-1", 1))
    assert racks().traffic("rollout", told) == (("b", "c", 12),)


def test_weights_reach_each_host_once_by_the_tree_or_the_ring_that_it_pulls_along():
    assert racks().traffic("weight_sync", WEIGHTS) == (("a", "b", 100), ("a", "c", 100))
    assert set(racks(by_rings=True).traffic("weight_sync", WEIGHTS)) == {
        ("a", "b", 50), ("b", "c", 50), ("a", "c", 50), ("c", "b", 50),
    }  # fmt: skip


def test_what_engines_of_the_trainers_own_host_map_does_not_count_for_the_others():
    told = (("trainer-1", "engine-1", 50_000), *[("trainer-1", f"engine-{n}", 60) for n in (2, 3, 4)])
    assert racks().traffic("weight_sync", told) == (("a", "b", 60), ("a", "c", 60))


def test_weights_in_parts_go_along_a_tree_from_each_host_that_has_one():
    told = [(source, f"engine-{n}", size) for source, size in (("engine-1", 30), ("engine-2", 10)) for n in (1, 2, 4)]
    assert set(racks().traffic("weight_sync", tuple(told))) == {("a", "b", 30), ("a", "c", 30), ("b", "a", 10), ("b", "c", 10)}


def test_weights_enter_a_pod_of_several_racks_once():
    pods = {"node-1": "x", "node-2": "y", "node-3": "y"}

    def find(name):
        node = f"node-{HOMES[name] + 1}"
        return SimpleNamespace(node=node, public=f"tcp://10.0.0.{HOMES[name]}:1", provides=frozenset({f"pod={pods[node]}", "h20"}))

    found = Racks(RACKS, find, lambda role: tuple(n for n in HOMES if n.startswith(role)), by_rings=False)

    assert found.traffic("weight_sync", WEIGHTS) == (("a", "b", 100), ("b", "c", 100))


def test_without_racks_actors_are_the_endpoints_and_empty_flows_are_none():
    assert racks(named={}).traffic("weight_sync", (*WEIGHTS, ("trainer-1", "engine-9", 0))) == WEIGHTS


def test_a_link_has_its_circuits_bandwidth_or_the_trickle():
    section = FabricSection(racks=RACKS, ports=12, testbed="bed", link_gbps=0.05, trickle_mbps=10)
    rates = rates_mbps((Cross(0, 4), Cross(4, 0), Cross(1, 5)), section)

    assert (rates[0, 1], rates[1, 0], rates[0, 2]) == (100.0, 50.0, 10.0)
    assert batches({(0, 1): 100.0, (1, 2): 10.0}, section)["bed-a"].startswith("class change dev to-1 classid 1:1 htb rate 100000kbit ")


def test_racks_that_the_switch_has_no_ports_for_are_refused():
    with pytest.raises(ValueError, match="more than the switch's 8 ports"):
        FabricSection(racks=RACKS, ports=8)


SWITCH = FabricSection(racks={"a": ("10.0.0.0",), "b": ("10.0.0.1",)}, ports=8, link_gbps=0.1, trickle_mbps=10, testbed="bed")


def tc(folder, monkeypatch, lines):
    """A `tc` that does what `lines` say, and leaves its namespace in `$2`."""
    (folder / "tc").write_text(f"#!/bin/sh\ncd {folder}\n{lines}\n")
    (folder / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


async def test_every_rack_has_one_tc_that_is_told_of_all_changes_and_ends_with_the_switch(tmp_path, monkeypatch):
    tc(tmp_path, monkeypatch, 'cat > "$2.told"; mv "$2.told" "$2.all"')

    async with links(SWITCH) as rates:
        await rates.follow(())
        await rates.follow((Cross(0, 4), Cross(4, 0)))
        await rates.follow((Cross(0, 4), Cross(4, 0)))

    for name in ("bed-a", "bed-b"):
        told = (tmp_path / f"{name}.all").read_text().splitlines()
        assert [line.split(" rate ")[1].split()[0] for line in told] == ["10000kbit", "100000kbit"]


async def test_a_test_bed_that_is_gone_ends_what_follows_the_light(tmp_path, monkeypatch):
    tc(tmp_path, monkeypatch, 'test "$2" = bed-b && echo "no namespace $2" >&2 && exit 1; cat > /dev/null')

    async def follow():
        async with links(SWITCH):
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await follow()

    assert [str(error) for error in raised.value.exceptions] == ["the links of bed-b can't be set: no namespace bed-b"]

"""The simulated test-bed of circuits, held against live runs of the same config, recorded by the commands in their files."""

import json
from pathlib import Path

import pytest

from rubato.actors.fabric.section import FabricSection
from rubato.planning.circuits import Cross
from rubato.sim.live.testbed import MODES, PAYLOAD, WAYS, RackLinks, run
from rubato.sim.outcome import silent
from rubato.sim.scenario import load
from rubato.sim.virtual import run_virtual

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "configs" / "sim" / "quickstart_fabric.yaml"
CASES = [(way, mode) for way in WAYS for mode in MODES]


def live(way, mode):
    recorded = json.loads((Path(__file__).parent / "data" / f"fabric_{way}.json").read_text())
    return recorded["modes"][mode]


@pytest.fixture(scope="module")
def simulated():
    return run(load(SCENARIO).scenario, silent).figures


@pytest.mark.parametrize(("way", "mode"), CASES)
def test_weights_reach_all_racks_as_fast_as_they_did_live_within_15_percent(simulated, way, mode):
    assert simulated[f"{way}_{mode}_sync_s"] == pytest.approx(live(way, mode)["sync_s"], rel=0.15)


@pytest.mark.parametrize(("way", "mode"), CASES)
def test_what_the_scenario_claims_is_what_the_live_runs_recorded(way, mode):
    scenario, recorded = load(SCENARIO).scenario, live(way, mode)
    claimed = {claim.name: claim.bar for claim in scenario.claims}
    size = scenario.job["train"]["scripted"]["weights_mib"] * 2**20

    assert claimed[f"{way}_{mode}_sync_s"] == pytest.approx(recorded["sync_s"], abs=5e-3)
    assert recorded["kv_bytes"] == pytest.approx(scenario.kv_bytes, rel=0.15)
    assert recorded["weights_bytes"] == pytest.approx(size, rel=1e-3)
    if mode == "proactive":
        speedup = live(way, "static")["sync_s"] / recorded["sync_s"]
        assert claimed[f"{way}_speedup"] == pytest.approx(speedup, abs=5e-3)
        assert claimed[f"{way}_proactive_exposed_s"] == pytest.approx(recorded["exposed_s"], abs=5e-4)


def test_rings_are_faster_than_the_tree_and_never_faster_than_the_bound(simulated):
    bound_s = 32 * 2**20 * 8 / (4 * 50e6)
    assert bound_s < simulated["rings_proactive_sync_s"] < 0.8 * simulated["tree_proactive_sync_s"]


def test_transfers_share_a_link_and_feel_every_change_of_its_circuits():
    section = FabricSection(racks={"a": ("10.0.0.1",), "b": ("10.0.0.2",)}, ports=8, testbed="simulated", link_gbps=0.08, trickle_mbps=8)

    async def play():
        import asyncio

        loop, wires, took = asyncio.get_running_loop(), RackLinks(section), {}

        async def carry(name, size_bytes):
            await wires.carry((0, 1), size_bytes * PAYLOAD)
            took[name] = loop.time()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(carry("short", 1e6))
            tasks.create_task(carry("long", 12e6))
            await asyncio.sleep(1)  # 1 MB at the trickle, shared
            wires.set((Cross(0, 4),))  # 10 MB/s
            await asyncio.sleep(1.0)
            wires.set(())
        return took

    took = run_virtual(play)
    assert took["short"] == pytest.approx(1.1)
    assert took["long"] == pytest.approx(2 + (12 - 0.5 - 0.5 - 9) / 1)

"""Live controller and RLSim have one planner: the same volumes get the same circuits from both, also when that planner is another."""

from random import Random

import pytest

from rubato.actors.fabric import templates
from rubato.actors.fabric.section import FabricSection
from rubato.planning import phase_time
from rubato.planning.demand import flows
from rubato.sim.rfabric import fabrics
from rubato.sim.rfabric.fabrics import FabricSpec, case
from rubato.sim.rfabric.iteration import planned
from rubato.sim.rfabric.job import PHASES
from tests.sim.test_iteration import job

PODS = 4
PER_POD = 8
RACKS = tuple(f"rack-{i}" for i in range(PODS * PER_POD))
UPLINKS = 32


@pytest.fixture
def live():
    pods = {f"pod-{p}": RACKS[p * PER_POD : (p + 1) * PER_POD] for p in range(PODS)}
    racks = {name: (f"10.0.0.{i}",) for i, name in enumerate(RACKS)}
    section = FabricSection(ports=UPLINKS * len(RACKS), ports_per_endpoint=UPLINKS, planner="pods", racks=racks, pods=pods)
    return templates.Templates(section, RACKS)


def named(directed):
    return tuple((RACKS[a], RACKS[b], size) for (a, b), size in directed.items())


@pytest.fixture(params=range(3))
def simulated(request):
    """The job that RLSim plans for, and what its planner finds; sizes differ from draw to draw."""
    drawn = Random(request.param)
    one = job(sequence_tokens=drawn.choice((2048, 4096, 8192)), sequences=512, updates=drawn.choice((1, 2)))
    found = case(one, FabricSpec(core_share=1.0))
    return found, fabrics._racks(found)


def test_the_same_volumes_of_a_phase_get_the_same_circuits(live, simulated):
    made, plane = simulated
    for phase in PHASES[1:]:
        (operation,) = planned(made.job, made.sent, [(phase, 1)], plane.servers_per_node)
        live.learn(phase, named(operation.directed), whole=True)

        assert live.links(phase) == fabrics._choose(made, plane, [(phase, 1)])


def turns(made, plane):
    """The execution's operations, as bytes of the whole phase each."""
    found = planned(made.job, made.sent, [("execution", 1)], plane.servers_per_node)
    kept = [each for each in found if not each.beside and each.directed]
    return [named({pair: round(v * each.times) for pair, v in each.directed.items()}) for each in kept]


def choose_sim(made, plane):
    wanted = [phase_time.Operation(flows(each, RACKS)) for each in turns(made, plane)]
    return phase_time.choose_links(wanted, plane.ports, plane.planner, plane.rates, made.spec.shares)


def test_operations_that_take_turns_share_circuits_alike(live, simulated):
    made, plane = simulated

    assert live.for_turns(turns(made, plane), RACKS) == choose_sim(made, plane)


def test_another_way_to_predict_changes_both_alike(live, simulated, monkeypatch):
    made, plane = simulated
    before = live.for_turns(turns(made, plane), RACKS)
    predicted = phase_time.phase_s
    monkeypatch.setattr(phase_time, "phase_s", lambda *given: -predicted(*given))

    after = live.for_turns(turns(made, plane), RACKS)

    assert after != before
    assert after == choose_sim(made, plane)

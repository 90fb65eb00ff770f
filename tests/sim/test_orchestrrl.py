"""OrchestrRL's scenarios: the live planners decide, no token is lost in a move or a switch, and a run is the same twice."""

from pathlib import Path

import pytest
import yaml

import rubato.sim.orchestrrl.generation as generation
from rubato.planning.makespan import Instance, Load
from rubato.planning.moves import Carry
from rubato.planning.parallelism import StepPlan, coming
from rubato.planning.rebalance import RequestMove
from rubato.sim.orchestrrl.drift import Drift, EngineUse, engines_of
from rubato.sim.orchestrrl.generation import Arm, Pace, StepRun, regroup
from rubato.sim.orchestrrl.joint import IterationStages, iterations_s
from rubato.sim.orchestrrl.pool import ElasticPool, Regroup, Response
from rubato.sim.outcome import silent
from rubato.sim.scenario import load
from rubato.sim.timeline import Timeline

SCENARIOS = Path(__file__).parents[2] / "configs" / "sim"
SMALL = {
    "orchestrrl_48_14b": ["drift.prompts=16", "drift.every=16", "gpus=8"],
    "orchestrrl_48_32b": ["drift.prompts=16", "drift.every=16", "gpus=8"],
    "orchestrrl_64_14b": ["drift.prompts=16", "drift.every=16", "gpus=8"],
    "orchestrrl_within": ["drift.prompts=16", "gpus=8"],
}


@pytest.mark.parametrize("name", SMALL)
def test_a_run_is_the_same_twice_and_has_the_figures_of_its_claims(name):
    loaded = load(SCENARIOS / f"{name}.yaml", SMALL[name])

    first, second = loaded.kind.run(loaded.scenario, silent), loaded.kind.run(loaded.scenario, silent)

    assert first.figures == second.figures
    assert first.tables == second.tables
    assert {claim.name for claim in loaded.scenario.claims} <= set(first.figures)


@pytest.mark.parametrize("name", [*SMALL, "orchestrrl_joint"])
def test_at_most_half_of_the_claims_are_expected_to_fail(name):
    claims = load(SCENARIOS / f"{name}.yaml").scenario.claims

    assert claims
    assert 2 * sum(claim.expected == "fails" for claim in claims) <= len(claims)


def test_circuits_that_change_are_no_slower_and_the_network_is_priced():
    training = "{train_share: 0.5, pipeline: 1, expert: 1, sequence_tokens: 2048, sequences: 320, updates: 4, compute_efficiency: 0.5}"
    size = f"{{model: ../models/qwen2.5-14b.yaml, gpus: 48, training: {training}, fabric: {{radix: 16}}, degrees: [2, 8], radices: [64]}}"
    loaded = load(SCENARIOS / "orchestrrl_joint.yaml", [f"sizes={{small: {size}}}", "drift.prompts=64"])

    figures = loaded.kind.run(loaded.scenario, silent).figures

    assert figures["small_joint_gain"] >= figures["small_compute_gain"]
    assert figures["small_joint_beats_compute_only"] == (figures["small_joint_gain"] > figures["small_compute_gain"])
    assert figures["small_sync_changed_s"] < figures["small_sync_kept_s"]
    assert figures["small_pays_over_fat-tree_r64"] == (figures["small_per_cost_over_fat-tree_r64"] > 1)


@pytest.fixture
def scenario():
    return load(SCENARIOS / "orchestrrl_48_14b.yaml").scenario


@pytest.fixture
def engines(scenario):
    return engines_of(scenario.model, scenario.gpu, scenario.degrees, EngineUse())


def pool_of(engines, degrees, responses, at):
    pool = ElasticPool(Timeline(), engines)
    seats = [pool.add(degree, 0) for degree in degrees]
    pool.take(responses, {each.name: seats[place] for each, place in zip(responses, at, strict=True)})
    return pool, seats


def later(pool, when_s, call):
    pool.timeline.at(when_s, call)


def begin(pool, change):
    pool.timeline.start(pool.change([change]))


def decoded(pool):
    return sum(seat.engine.usage.tokens for seat in pool.seats.values())


def test_a_move_carries_tokens_and_cache_and_loses_none(engines):
    pool, seats = pool_of(engines, (2, 2), [Response("a", "p", 500, 1000)], [0])
    order = RequestMove("a", seats[0], seats[1], Carry(True, 0, 0, ""), "")
    later(pool, 2.0, lambda: pool.move([order]))
    pool.run()

    assert list(pool.done) == ["a"]
    assert decoded(pool) == 1000
    assert pool.use.moves == 1
    assert pool.use.moved_bytes > 500 * engines[2].spec.model.kv_bytes_per_token
    assert pool.seats[seats[1]].engine.usage.prefilled == 0


def test_a_merge_drains_waits_for_its_cost_and_goes_on_where_it_was(engines):
    responses = [Response(name, name, 500, 3000) for name in "abcd"]
    pool, seats = pool_of(engines, (2, 2, 2, 2), responses, range(4))
    change = Regroup(tuple(seats), ((8, tuple("abcd")),))
    gone = []
    later(pool, 5.0, lambda: (gone.extend(seat.engine for seat in pool.seats.values()), begin(pool, change)))
    seconds = pool.run()

    assert [seat.degree for seat in pool.seats.values()] == [8]
    assert sum(engine.usage.tokens for engine in gone) + decoded(pool) == 4 * 3000
    assert pool.use.switch_s >= engines[2].reconfigure_s(0, engines[8])
    alone, _ = pool_of(engines, (2, 2, 2, 2), responses, range(4))
    assert seconds < alone.run()


def test_a_change_waits_for_its_circuits(engines):
    def seconds(delay_s):
        pool, seats = pool_of(engines, (2, 2), [Response("a", "p", 500, 2000)], [0])
        pool.delay_s = delay_s
        later(pool, 1.0, lambda: begin(pool, Regroup(tuple(seats), ((4, ("a",)),))))
        return pool.run()

    assert seconds(0.5) == pytest.approx(seconds(0.0) + 0.5)


def test_an_instance_that_has_just_changed_or_expects_a_request_is_not_settled(engines):
    pool, seats = pool_of(engines, (2, 2), [Response("a", "p", 500, 2000), Response("b", "q", 500, 2000)], [0, 0])
    later(pool, 1.0, lambda: pool.move([RequestMove("a", seats[0], seats[1], Carry(True, 0, 0, ""), "")]))
    seen = []
    later(pool, 1.001, lambda: seen.extend(pool.instances({"a": 1.0, "b": 1.0})))
    pool.run()

    assert {each.name: each.settled for each in seen} == {seats[0]: True, seats[1]: False}


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_step_that_keeps_its_degrees_lasts_as_long_as_the_planner_counted(engines, scenario, factor):
    """1,280 responses on one engine of 256 slots: counted longest first it was 4 to 8 % too short."""
    drift = scenario.drift.model_copy(update={"prompts": 256, "first": factor, "last": factor})
    batch = drift.batch(1, 0)
    loads = tuple(Load(each.name, each.shown, each.tokens) for each in batch)
    took_s = StepRun(engines, Arm(name="static"), Pace(), None).run(batch, (8,)).seconds

    counted_s = {drawn: coming(loads, 8, {8: engines[8]}, [Instance("e", 8, loads)], drawn=drawn).predicted_s for drawn in (True, False)}

    assert counted_s == {True: pytest.approx(took_s, rel=0.01), False: pytest.approx(took_s, rel=0.01)}
    assert coming(loads, 8, {8: engines[8]}).predicted_s < 0.97 * took_s


def test_the_live_planners_are_asked(engines, scenario, monkeypatch):
    asked = []
    for name in ("coming", "within", "rebalance"):
        real = getattr(generation, name)
        monkeypatch.setattr(generation, name, lambda *a, _n=name, _r=real, **k: (asked.append(_n), _r(*a, **k))[1])
    drift = scenario.drift.model_copy(update={"prompts": 8})
    arm = Arm(name="whole", across=True, within=True, rebalance=True)
    done = StepRun(engines, arm, Pace(), drift.forecast(1, 8)).run(drift.batch(1, 8), (2,) * 4)

    assert set(asked) == {"coming", "within", "rebalance"}
    assert len(done.ended_s) == 40


def test_lengths_and_their_limit_drift_by_one_factor_a_step():
    lengths = yaml.safe_load((SCENARIOS.parent / "workloads/orchestrrl_math.yaml").read_text())
    drift = Drift(lengths=lengths, first=0.5, last=2.0, steps=17, every=8, prompts=200, samples=2, prompt_tokens=1)
    means = [sum(each.tokens for each in drift.batch(1, step)) for step in drift.simulated]

    assert list(drift.simulated) == [0, 8, 16]
    assert [drift.limit(step) for step in drift.simulated] == [8192, 16384, 32768]
    assert means[0] * 2 == pytest.approx(means[1], rel=0.15)
    assert all(each.tokens <= drift.limit(0) for each in drift.batch(1, 0))


def test_an_iteration_lasts_as_long_as_its_longer_stage_and_the_weights():
    assert iterations_s((10.0, 30.0), IterationStages(20.0, 1.0)) == 52.0


def test_a_step_s_plan_leaves_an_instance_alone_that_has_a_planned_degree(engines):
    responses = [Response(name, name, 500, 3000) for name in "abc"]
    pool, seats = pool_of(engines, (2, 2, 4), responses, range(3))
    later(pool, 1.0, lambda: begin(pool, regroup(pool.instances(dict.fromkeys("abc", 1.0)), plan)))
    plan = StepPlan((4, 4), (("a", "b"), ("c",)), 0.0, True, "")
    pool.run()

    assert [seat.degree for seat in pool.seats.values()] == [4, 4]
    assert seats[2] in pool.seats
    assert sorted(pool.done) == ["a", "b", "c"]
    assert pool.use.switches == 1

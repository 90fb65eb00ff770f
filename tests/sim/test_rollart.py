"""RollArt's scenarios: a run is the same twice."""

from pathlib import Path

import pytest

from rubato.runtime.errors import ConfigError
from rubato.sim.outcome import silent
from rubato.sim.rollart.affinity import crossing
from rubato.sim.rollart.serverless import Functions
from rubato.sim.scenario import load
from rubato.sim.timeline import Timeline
from rubato.sim.workload import episode

SCENARIOS = Path(__file__).parents[2] / "configs" / "sim"
SMALL = {
    "rollart_affinity": ["trajectories=4", "warmup=4", "counted=4", "concurrency=2", "batch=4", "crossover.prompts=[128,4096]"],
    "rollart_end_to_end": ["batch_groups=2", "warmup_steps=1", "counted_steps=1"],
    "rollart_failures": ["trajectories=4", "group_size=2", "batches=1", "redundancy_batches=2"],
    "rollart_prefill_decode": ["counted=8", "concurrency=4", "prefill_nodes=[1,2]", "flip.rollouts=16", "flip.concurrency=4"],
    "rollart_serverless": ["trajectories=8", "concurrency=8"],
    "rollart_sigma": ["trajectories=4", "sigmas_s=[1,10]"],
    "rollart_staleness": ["alphas=[0,1]", "warmup_steps=1", "counted_steps=1", "job.batch_groups=2", "job.environments=8"],
}


@pytest.mark.parametrize("name", SMALL)
def test_a_run_is_the_same_twice_and_has_the_figures_of_its_claims(name):
    loaded = load(SCENARIOS / f"{name}.yaml", SMALL[name])

    first, second = loaded.kind.run(loaded.scenario, silent), loaded.kind.run(loaded.scenario, silent)

    assert first.figures == second.figures
    assert first.tables == second.tables
    known = {claim.name for claim in loaded.scenario.claims} - {"frozen_lake_sigma_5"}
    assert known <= set(first.figures)


def test_the_choice_turns_where_the_ratio_passes_1():
    assert crossing((100, 200, 400), (1.5, 1.1, 0.9)) == pytest.approx(300)
    assert crossing((100, 200), (0.9, 0.8)) == 0
    assert crossing((100, 200), (1.4, 1.2)) == float("inf")


def test_functions_start_with_their_calls_serve_them_all_and_end_when_idle():
    scenario = load(SCENARIOS / "rollart_serverless.yaml", SMALL["rollart_serverless"]).scenario
    timeline = Timeline()
    functions = Functions(scenario, timeline)
    one = episode(scenario.task, scenario.seed, "t0")

    calls = [timeline.start(functions.score(f"t{number}", one)) for number in range(5)]
    timeline.run()

    assert all(call.ended.happened for call in calls)
    assert (functions.instances.most, functions.instances.cold_starts) == (5, 5)
    assert functions.instances._num == 0
    again = timeline.start(functions.score("t5", one))
    timeline.run()
    assert again.ended.happened
    assert functions.instances.cold_starts == 6


def test_functions_take_no_less_time_than_their_start():
    scenario = load(SCENARIOS / "rollart_serverless.yaml", SMALL["rollart_serverless"]).scenario
    timeline = Timeline()
    functions = Functions(scenario, timeline)
    one = episode(scenario.task, scenario.seed, "t0")

    first = timeline.start(functions.score("t0", one))
    timeline.run(until=first.ended)
    cold_s = timeline.now
    second = timeline.start(functions.score("t0", one))
    timeline.run(until=second.ended)

    assert cold_s - (timeline.now - cold_s) == pytest.approx(0.8997, rel=1e-3)  # 15.2 GB at 16.9 GB/s


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("rollart_prefill_decode", "prefill_nodes=[4]", "each of prefill_nodes must be fewer than nodes"),
        ("rollart_end_to_end", "training.count=32", "baseline.count must be above training.count"),
        ("rollart_failures", "group_size=3", "trajectories=128 are no whole groups of group_size=3"),
        ("rollart_failures", "redundancy_task.turns.value=2", "redundancy_task must have one turn, and action_tokens of the law quantiles"),
        ("rollart_staleness", "stragglers=[skip]", "stragglers"),
        ("rollart_staleness", "job.steps=30", "job.steps must be at least"),
        ("rollart_serverless", "reward_gpus=8", "reward_gpus must be fewer than gpus"),
        ("rollart_serverless", "engine.memory_use=0.1", "does not fit 1 x H800; give it more tp or pp"),
        ("rollart_sigma", "sigmas_s=[-1]", "^command line: sigmas_s.0 is -1; it must be at least 0.$"),
        ("rollart_sigma", "sigmas_s=[]", r"^command line: sigmas_s is \[\]; it must have at least 1 item.$"),
        ("rollart_sigma", "pools=[]", r"^command line: pools is \[\]; it must have at least 1 item.$"),
        ("rollart_staleness", "alphas=[-1]", "^command line: alphas.0 is -1; it must be at least 0.$"),
        ("rollart_affinity", "mapped.gem_math=h100", "mapped must have a pool of h20, h800 for each of frozen_lake, gem_game"),
        ("rollart_affinity", "crossover.prompts=[128]", r"prompts is \[128\]; it must have at least 2 items.$"),
        ("rollart_failures", "pools=[]", r"^command line: pools is \[\]; it must have at least 1 item.$"),
    ],
)
def test_an_impossible_scenario_is_refused_in_a_sentence(name, override, said):
    with pytest.raises(ConfigError, match=said):
        load(SCENARIOS / f"{name}.yaml", [override])


def test_only_engines_that_stand_still_for_weights_pay_for_a_slow_transfer():
    small = [*SMALL["rollart_end_to_end"], "training.count=8"]
    quick, slow = (
        loaded.kind.run(loaded.scenario, silent).figures
        for loaded in (load(SCENARIOS / "rollart_end_to_end.yaml", [*small, f"direct.seconds={seconds}"]) for seconds in (9, 3000))
    )

    assert slow["step_rollart_32b"] == quick["step_rollart_32b"]
    assert all(slow[f"step_{name}_32b"] > quick[f"step_{name}_32b"] + 2000 for name in ("sync", "one_off", "areal"))

"""Generation lasts as long modelled as on the real orchestrator, proxy and engines: same requests, lengths, degrees and planners."""

from functools import partial
from pathlib import Path

import pytest

from rubato.actors import catalog
from rubato.sim.live.generation import LiveFleet, LiveSteps
from rubato.sim.orchestrrl.drift import engines_of, planned
from rubato.sim.orchestrrl.generation import Arm, Pace, StepRun
from rubato.sim.scenario import load

pytestmark = pytest.mark.slow

SCENARIO = Path(__file__).parents[2] / "configs" / "sim" / "orchestrrl_48_14b.yaml"
ONE_SERVER = ("gpus=8", "drift.prompts=64")
A_QUARTER = "drift.prompts=256"
OFF = Arm(name="off")
REBALANCE = Arm(name="rebalance", rebalance=True)
FORECAST = Arm(name="rebalance and switch", within=True, rebalance=True)
WHOLE = Arm(name="whole", across=True, within=True, rebalance=True)
KNOWN = Arm(name="rebalance and switch, lengths known", within=True, rebalance=True, knows=True)


class BothModes:
    """The scenario's first step, or what `cut` leaves of it, on engines of `degree` GPUs."""

    def __init__(self, seed, *cut, degree=2):
        self.seed, self.s, self.degree = seed, load(SCENARIO, cut).scenario, degree
        self.batch = self.s.drift.batch(seed, 0)
        self.degrees = tuple(each for each in self.s.degrees if each >= degree)
        assert (catalog.hardware("h800"), catalog.model("qwen2.5-14b")) == (self.s.gpu, self.s.model)

    def unevenly(self):
        """The longest responses on the first engine, the shortest on the last."""
        ordered = sorted(self.batch, key=lambda each: -each.tokens)
        num = self.s.gpus // self.degree
        self.batch = [each for place in range(len(ordered) // num) for each in ordered[place :: len(ordered) // num]]
        return self

    def modelled(self, arm):
        s = self.s
        engines, alike = engines_of(s.model, s.gpu, self.degrees, s.engine), (self.degree,) * (s.gpus // self.degree)
        return StepRun(engines, arm, s.pace, s.drift.forecast(self.seed, 0)).run(self.batch, alike)

    def real(self, arm):
        s = self.s
        fleet = LiveFleet("h800", "qwen2.5-14b", s.gpus, self.degree, self.degrees, s.engine.num_slots)
        [facts] = LiveSteps(fleet, arm, s.pace, self._batch, s.drift.limit).run([0], self.degree)
        return facts

    def _batch(self, step):
        return self.s.drift.batch(self.seed, step) if step else self.batch

    def both(self, arm):
        modelled, real = self.modelled(arm), self.real(arm)
        print(
            f"{arm.name}, seed {self.seed}: modelled {modelled.seconds:.2f} s, {modelled.use.moves} moves, {modelled.use.switches} switches; "
            f"real actors {real.seconds:.2f} s, {real.moves}, {real.switches}: {real.seconds / modelled.seconds - 1:+.1%}"
        )
        return modelled, real


SEEDS = pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])


@SEEDS
def test_both_modes_agree_on_a_step_without_planners(seed):
    modelled, real = BothModes(seed, *ONE_SERVER).both(OFF)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.005)


@SEEDS
def test_both_modes_agree_within_3_percent_on_rebalancing(seed):
    modelled, real = BothModes(seed, *ONE_SERVER).both(REBALANCE)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)


@SEEDS
def test_both_modes_agree_within_3_percent_where_rebalancing_gains_much(seed):
    """Caches bound it, and the longest requests are on one engine."""
    step = BothModes(seed, "gpus=8", "drift.prompts=16", "drift.prompt_tokens=16000").unevenly()
    modelled, real = step.both(REBALANCE)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)
    assert real.seconds < 0.95 * step.modelled(OFF).seconds


@SEEDS
@pytest.mark.parametrize("arm", [FORECAST, KNOWN], ids=["forecast", "known"])
def test_both_modes_agree_within_3_percent_on_switches(seed, arm):
    step = BothModes(seed, *ONE_SERVER)
    modelled, real = step.both(arm)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)
    assert real.switches == modelled.use.switches == 1
    assert real.seconds < 0.6 * step.modelled(OFF).seconds


def test_the_real_actors_do_the_same_twice():
    step = BothModes(1, "gpus=8", "drift.prompts=16")

    assert step.real(KNOWN) == step.real(KNOWN)


def across(seed, begin, *cut):
    """Both modes' steps of the whole, on engines that begin with `begin` GPUs."""
    s = load(SCENARIO, cut).scenario
    degrees = tuple(each for each in s.degrees if each >= 2)
    engines, alike = engines_of(s.model, s.gpu, degrees, s.engine), (begin,) * (s.gpus // begin)
    modelled = planned(engines, alike, WHOLE, s.drift, seed, s.pace, partial(s.drift.forecast, seed)).steps
    fleet = LiveFleet("h800", "qwen2.5-14b", s.gpus, 2, degrees, s.engine.num_slots)
    steps = LiveSteps(fleet, WHOLE, s.pace, lambda step: s.drift.batch(seed, step), s.drift.limit)
    real = steps.run(s.drift.simulated, begin)
    total_s = [sum(step.seconds for step in mode) for mode in (modelled, real)]
    print(f"seed {seed}, from TP{begin}: modelled {total_s[0]:.1f} s, real actors {total_s[1]:.1f} s")
    return modelled, real, total_s


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_both_modes_agree_within_3_percent_on_steps_whose_degrees_are_planned_across(seed):
    """One job of the real actors plays three steps, each twice as long as the one before, and learns their lengths itself."""
    modelled, real, (modelled_s, real_s) = across(seed, 2, *ONE_SERVER, "drift.steps=3", "drift.every=1")

    assert real_s == pytest.approx(modelled_s, rel=0.03)
    assert [step.degrees for step in real] == [step.degrees for step in modelled]
    assert [step.switches for step in real] == [step.use.switches for step in modelled] == [1, 0, 0]


def test_a_plan_across_steps_without_switches_within_is_refused_in_the_second_mode():
    with pytest.raises(ValueError, match="plans degrees across steps and not within"):
        LiveSteps(LiveFleet("h800", "qwen2.5-14b", 8, 2, (2,)), Arm(name="across", across=True), Pace(), list, int)


@pytest.mark.nightly
def test_both_modes_agree_within_3_percent_on_48_gpus_across_steps():
    """Of which 32 generate: a quarter of the scenario's first two steps, 1,280 responses each."""
    modelled, real, (modelled_s, real_s) = across(1, 2, A_QUARTER, "drift.steps=17", "drift.every=16", "drift.last=0.6")

    assert real_s == pytest.approx(modelled_s, rel=0.03)
    assert [step.degrees for step in real] == [step.degrees for step in modelled]


@pytest.mark.parametrize(
    ("arm", "degree"),
    [(REBALANCE, 2), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((OFF, 2), (OFF, 8), (REBALANCE, 8)))],
    ids=lambda each: getattr(each, "name", each),
)
def test_both_modes_agree_within_3_percent_on_48_gpus(arm, degree):
    """Of which 32 generate, a quarter of all responses: 1,280."""
    modelled, real = BothModes(1, A_QUARTER, degree=degree).both(arm)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)
    assert real.switches == modelled.use.switches


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_both_modes_agree_within_3_percent_on_48_gpus_and_all_responses():
    """All 5,120 responses, with switches and rebalancing by forecast."""
    modelled, real = BothModes(1, degree=2).both(FORECAST)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)
    assert real.switches == modelled.use.switches

"""A step of generation lasts as long modelled as on the real orchestrator, proxy and engines: same requests, lengths, degrees and planners."""

from pathlib import Path

import pytest

from actors import catalog
from sim.live.generation import LiveFleet, LiveStep
from sim.orchestrrl.drift import PAST, engines_of
from sim.orchestrrl.generation import Arm, Pace, StepRun
from sim.scenario import load

SCENARIO = Path(__file__).parents[2] / "configs" / "sim" / "orchestrrl_48_14b.yaml"
ONE_SERVER = ("gpus=8", "drift.prompts=64")
OFF = Arm(name="off")
REBALANCE = Arm(name="rebalance", rebalance=True)
FORECAST = Arm(name="rebalance and switch", within=True, rebalance=True)
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
        return StepRun(engines, arm, s.pace, s.drift.forecast(self.seed, 0)).run(self.batch, alike, alike)

    def real(self, arm):
        s = self.s
        fleet = LiveFleet("h800", "qwen2.5-14b", s.gpus, self.degree, self.degrees, s.engine.num_slots)
        history = [s.drift.batch(self.seed, step) for step in range(-PAST, 0)]
        return LiveStep(fleet, arm, s.pace, s.drift.limit(0), history).run(self.batch)

    def both(self, arm):
        modelled, real = self.modelled(arm), self.real(arm)
        print(
            f"{arm.name}, seed {self.seed}: modelled {modelled.seconds:.2f} s, {modelled.use.moves} moves, {modelled.use.switches} switches; "
            f"real actors {real.seconds:.2f} s, {real.moves}, {real.switches}: {real.seconds / modelled.seconds - 1:+.1%}"
        )
        return modelled, real


SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


@SEEDS
def test_both_modes_agree_on_a_step_without_planners(seed):
    modelled, real = BothModes(seed, *ONE_SERVER).both(OFF)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.005)


@SEEDS
def test_both_modes_agree_within_3_percent_on_rebalancing(seed):
    modelled, real = BothModes(seed, *ONE_SERVER).both(REBALANCE)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)


def test_both_modes_agree_within_3_percent_on_average_where_rebalancing_gains_much():
    """Caches bound it, and the longest requests are on one engine. Which request goes first is a matter of milliseconds, so one seed may be 5 % off."""
    off = []
    for seed in (1, 2, 3):
        step = BothModes(seed, "gpus=8", "drift.prompts=16", "drift.prompt_tokens=16000").unevenly()
        modelled, real = step.both(REBALANCE)
        off.append(abs(real.seconds / modelled.seconds - 1))
        assert real.seconds < 0.95 * step.modelled(OFF).seconds

    assert max(off) < 0.05
    assert sum(off) / len(off) < 0.03


@SEEDS
@pytest.mark.parametrize("arm", [FORECAST, KNOWN], ids=["forecast", "known"])
def test_both_modes_agree_within_3_percent_on_switches(seed, arm):
    step = BothModes(seed, *ONE_SERVER)
    modelled, real = step.both(arm)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)
    assert real.switches == modelled.use.switches == 1
    assert real.seconds < 0.5 * step.modelled(OFF).seconds


def test_the_real_actors_do_the_same_twice():
    step = BothModes(1, "gpus=8", "drift.prompts=16")

    assert step.real(KNOWN) == step.real(KNOWN)


def test_degrees_across_steps_are_refused_in_the_second_mode():
    with pytest.raises(ValueError, match="plans degrees across steps"):
        LiveStep(LiveFleet("h800", "qwen2.5-14b", 8, 2, (2,)), Arm(name="whole", across=True), Pace(), 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "degree"),
    [(OFF, 2), (OFF, 8), (REBALANCE, 2), (REBALANCE, 8), (FORECAST, 2)],
    ids=lambda each: getattr(each, "name", each),
)
def test_both_modes_agree_within_3_percent_on_48_gpus(arm, degree):
    """Of which 32 generate, all 5,120 responses."""
    modelled, real = BothModes(1, degree=degree).both(arm)

    assert real.seconds == pytest.approx(modelled.seconds, rel=0.03)
    assert real.switches == modelled.use.switches

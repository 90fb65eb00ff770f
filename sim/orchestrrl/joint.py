"""Compute and fabric planned together, against each alone, on the drifting workload; and performance per network dollar.

The fabric is RFabric's hardware in all four arms: where the fabric is not planned, one topology stays for the whole job. Where compute is not
planned, every instance has the degree that is best over the run.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.planning.roofline import Roofline
from rubato.runtime.config import Section
from rubato.sim.claims import Value
from rubato.sim.hardware import Prices
from rubato.sim.orchestrrl.drift import Drift, EngineUse, engines_of
from rubato.sim.orchestrrl.generation import Arm, Pace, StepRun
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rfabric import counts, fabrics
from rubato.sim.rfabric.fabrics import FabricSpec, Iteration, case
from rubato.sim.rfabric.job import TrainingSpec, place
from rubato.sim.scenario import Scenario, ScenarioKind

ARMS = ("neither", "compute", "fabric", "joint")

TREES = ("fat-tree", "rail-optimised", "oversubscribed")
"""What RFabric is priced against."""


class JointSize(Section):
    """A cluster and its job."""

    model: ModelSpec
    gpus: int = Field(ge=16)
    training: TrainingSpec
    """The GPUs that it leaves generate."""
    fabric: FabricSpec = FabricSpec()
    degrees: tuple[int, ...] = Field(min_length=1)
    pools: int = Field(default=1, ge=1)
    """Equal parts of the generating GPUs, each with its share of the prompts and its own planner; one of them is simulated."""
    radices: tuple[Annotated[int, Field(ge=16, multiple_of=16)], ...] = ()
    """Of the packet switches, for which the network's cost is counted."""

    @property
    def generating(self) -> int:
        """GPUs of one pool."""
        trains = int(self.gpus * self.training.train_share)
        replica = self.training.pipeline * self.training.expert * self.training.context * 8
        return (self.gpus - trains // replica * replica) // self.pools


class JointScenario(Scenario):
    """Every size with neither, either and both of the planners."""

    gpu: GpuSpec
    engine: EngineUse = EngineUse()
    drift: Drift
    pace: Pace = Pace()
    sizes: dict[str, JointSize] = Field(min_length=1)
    prices: Prices


class IterationStages(NamedTuple):
    """What one RL iteration takes on one fabric."""

    train_s: float
    """All updates, exposed changes of circuits included."""
    sync_s: float
    """Weights to every engine, when neither stage runs."""


class JointDone(NamedTuple):
    """One size: generation of each step without and with its planners, and the stages by fabric."""

    degree: int
    still_s: tuple[float, ...]
    planned_s: tuple[float, ...]
    kept: IterationStages
    changed: IterationStages

    def seconds(self, arm: str) -> float:
        """Of all simulated steps: the stages of a one-step-asynchronous job overlap, its weight sync does not."""
        generation = self.planned_s if arm in ("compute", "joint") else self.still_s
        return iterations_s(generation, self.changed if arm in ("fabric", "joint") else self.kept)


def iterations_s(generation: tuple[float, ...], stages: IterationStages) -> float:
    return sum(max(seconds, stages.train_s) + stages.sync_s for seconds in generation)


def run(scenario: JointScenario, progress: RunProgress) -> RunResult:
    found: dict[str, JointDone] = {}
    for number, (name, size) in enumerate(scenario.sizes.items()):
        progress(number, len(scenario.sizes), name)
        found[name] = _size(scenario, size)
    priced = [row for name, size in scenario.sizes.items() for row in _priced(scenario, name, size, found[name])]
    figures: dict[str, Value] = {}
    for name, done in found.items():
        figures |= {f"{name}_{what}": value for what, value in _figures(done).items()}
    for name, radix, fabric, _, _, ratio in priced:
        figures[f"{name}_per_cost_over_{fabric}_r{radix}"] = ratio
        figures[f"{name}_pays_over_{fabric}_r{radix}"] = ratio > 1
    return RunResult(
        figures=figures,
        tables={
            "phases": Table(("size", "arm", "seconds", "gain"), list(_rows(found))),
            "cost": Table(("size", "radix", "fabric", "usd", "seconds", "rfabric_performance_per_usd_over_it"), priced),
        },
        plots={"generation": Plot("Gain over neither planner", lambda figure: _draw(figure, found))},
        notes=tuple(_notes(found)),
    )


def _size(s: JointScenario, size: JointSize) -> JointDone:
    engines = engines_of(size.model, s.gpu, size.degrees, s.engine)
    delay = size.fabric.delay
    delay_s = delay.drain_s + delay.control_s + delay.ocs_s + delay.relink_s
    still = {degree: _generation(s, size, engines, degree, None) for degree in size.degrees}
    best = min(still, key=lambda degree: (sum(still[degree]), degree))
    planned = _generation(s, size, engines, best, delay_s)
    fabric = case(place(size.training, size.model, s.gpu, size.gpus), size.fabric, s.seed)
    updates = size.training.updates
    return JointDone(best, still[best], planned, stages(fabrics.one_shot(fabric), updates), stages(fabrics.rfabric(fabric), updates))


def _generation(
    s: JointScenario, size: JointSize, engines: Mapping[int, Roofline], degree: int, delay_s: float | None
) -> tuple[float, ...]:
    """Seconds of each simulated step; with all planners where a `delay_s` is given that switches wait for circuits."""
    degrees = (degree,) * (size.generating // degree)
    done, current, share = list[float](), degrees, 1 / size.pools
    for step in s.drift.simulated:
        batch = s.drift.batch(s.seed, step, share)
        if delay_s is None:
            done.append(StepRun(engines, Arm(name="static"), s.pace, None).run(batch, degrees).seconds)
            continue
        arm = Arm(name="whole", across=True, within=True, rebalance=True)
        forecast = s.drift.forecast(s.seed, step, share)
        one = StepRun(engines, arm, s.pace, forecast, delay_s).run(batch, current)
        current = one.degrees
        done.append(one.seconds)
    return tuple(done)


def stages(iteration: Iteration, updates: int) -> IterationStages:
    """The exposed changes count with training."""
    phase = {name: time.seconds for name, time in iteration.phases.items()}
    train_s = updates * (phase["execution"] + phase["gradients"]) + iteration.exposed_s
    return IterationStages(train_s, phase["weights_send"] + phase["weights_local"])


def _figures(done: JointDone) -> dict[str, Value]:
    base = done.seconds("neither")
    gains = {arm: base / done.seconds(arm) for arm in ARMS[1:]}
    return {f"{arm}_gain": gain for arm, gain in gains.items()} | {
        "joint_beats_compute_only": gains["joint"] > gains["compute"],
        "joint_beats_fabric_only": gains["joint"] > gains["fabric"],
        "generation_over_training": sum(done.still_s) / len(done.still_s) / done.kept.train_s,
        "sync_kept_s": done.kept.sync_s,
        "sync_changed_s": done.changed.sync_s,
        "train_kept_s": done.kept.train_s,
        "train_changed_s": done.changed.train_s,
    }


def _priced(s: JointScenario, name: str, size: JointSize, done: JointDone) -> Iterator[tuple[str, int, str, float, float, float]]:
    """Generation is planned on every fabric alike, so that only the network differs."""
    job = place(size.training, size.model, s.gpu, size.gpus)
    for radix in size.radices:
        built = case(job, size.fabric.model_copy(update={"radix": radix}), s.seed)
        parts = counts.FabricSize(size.gpus, radix, size.fabric.oversubscription, size.fabric.core_share)
        found: dict[str, tuple[float, float]] = {}
        for fabric in ("rfabric", *TREES):
            stage = stages(fabrics.FABRICS[fabric](built), size.training.updates)
            found[fabric] = counts.FABRICS[fabric](parts).usd(s.prices), iterations_s(done.planned_s, stage)
        usd, seconds = found["rfabric"]
        for fabric in TREES:
            theirs_usd, theirs_s = found[fabric]
            yield name, radix, fabric, theirs_usd, theirs_s, theirs_s / seconds * theirs_usd / usd


def _rows(found: Mapping[str, JointDone]) -> Iterator[tuple[Cell, ...]]:
    for name, done in found.items():
        for arm in ARMS:
            yield name, arm, done.seconds(arm), done.seconds("neither") / done.seconds(arm)


def _notes(found: Mapping[str, JointDone]) -> Iterator[str]:
    yield "performance per network cost: the published 1.53 to 2.06 is unverified (a note at second hand); no text with it was available"
    for name, done in found.items():
        generation = sum(done.still_s) / len(done.still_s)
        yield (
            f"{name}: TP{done.degree}; generation {generation:.0f} s a step, training {done.kept.train_s:.0f} s, "
            f"weight sync {done.kept.sync_s:.2f} s on circuits that stay, {done.changed.sync_s:.2f} s on planned ones"
        )


def _draw(figure: Any, found: Mapping[str, JointDone]) -> None:
    axes = figure.subplots()
    for place_, arm in enumerate(ARMS[1:]):
        gains = [done.seconds("neither") / done.seconds(arm) for done in found.values()]
        axes.bar([x + place_ * 0.25 for x in range(len(found))], gains, 0.25, label=arm)
    axes.set_xticks([x + 0.25 for x in range(len(found))], list(found), fontsize=7)
    axes.set_ylabel("gain")
    axes.legend(fontsize=7)


KIND = ScenarioKind(JointScenario, run)

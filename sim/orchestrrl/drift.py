"""OrchestrRL's throughput: generation with planners over the best configuration that never changes, on lengths that drift over the steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic import Field

from rubato.planning.forecast import Forecast, Seen, fit, past
from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.planning.roofline import Deployment, Roofline
from rubato.runtime.config import Section
from rubato.sim.claims import Value
from rubato.sim.orchestrrl.generation import Arm, Pace, StepDone, StepRun
from rubato.sim.orchestrrl.pool import PoolUse, Response
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollpacker.rollout import LengthModel
from rubato.sim.scenario import Scenario, ScenarioKind

PAST = 8
"""Steps before a simulated one whose lengths the forecast has: all that it remembers."""

PROMPTS_APART = 1_000_000
"""Between the prompts of one step and those of the next."""


class Drift(Section):
    """Lengths and their limit grow by the same factor every step."""

    lengths: LengthModel
    first: float = Field(gt=0)
    """Factor of the first step."""
    last: float = Field(gt=0)
    steps: int = Field(ge=2)
    every: int = Field(ge=1)
    """Of these steps each so-manieth is simulated, the first and the last among them."""
    prompts: int = Field(ge=1)
    samples: int = Field(ge=1)
    """Per prompt."""
    prompt_tokens: int = Field(ge=1)

    def factor(self, step: int) -> float:
        return self.first * (self.last / self.first) ** (step / (self.steps - 1))

    def limit(self, step: int) -> int:
        """Of a response, in tokens."""
        return round(self.lengths.most * self.factor(step))

    @property
    def simulated(self) -> range:
        return range(0, self.steps, self.every)

    def batch(self, seed: int, step: int, share: float = 1.0) -> list[Response]:
        """The responses of a step, or of the first `share` of its prompts; the same for the same arguments."""
        factor, found = self.factor(step), list[Response]()
        for prompt in range(max(1, round(self.prompts * share))):
            place = step * PROMPTS_APART + prompt
            for number in range(self.samples):
                tokens = max(1, round(self.lengths.tokens(seed, place, number) * factor))
                found.append(Response(f"{step}/{prompt}/{number}", f"{step}/{prompt}", self.prompt_tokens, tokens))
        return found

    def forecast(self, seed: int, step: int, share: float = 1.0) -> Forecast:
        """From the steps before, by the live planner."""
        before = range(step - PAST, step)
        seen = [[Seen("", each.prompt, each.tokens) for each in self.batch(seed, at, share)] for at in before]
        return fit(past(seen), limit=self.limit(step))


class EngineUse(Section):
    """What all engines have, whatever their degree."""

    num_slots: int = Field(default=256, ge=1)
    launch_s: float = Field(default=0.0, ge=0)


class DriftScenario(Scenario):
    """A pool and its work; every arm, and every degree as a static configuration."""

    model: ModelSpec
    gpu: GpuSpec
    engine: EngineUse = EngineUse()
    gpus: int = Field(ge=1)
    """That generate."""
    degrees: tuple[int, ...] = Field(min_length=1)
    drift: Drift
    pace: Pace = Pace()
    arms: tuple[Arm, ...] = Field(min_length=1)
    """The first is the whole, whose gain is the headline's; the others its parts and the oracle. All begin with the best static degree."""
    begins: tuple[int, ...] = ()
    """Degrees with which the whole and the oracle begin as well."""
    over_training: float = Field(default=1.0, gt=0)
    """Seconds of a baseline's generation for each of its training: what the whole job gains over that baseline is counted with it."""


class Baseline(NamedTuple):
    """A configuration that never changes; in `chunks`, each instance gets whole prompts that follow one another, as verl deals them."""

    degree: int
    chunks: bool

    @property
    def name(self) -> str:
        """In figures."""
        return f"tp{self.degree}" + "_chunks" * self.chunks

    @property
    def said(self) -> str:
        return f"TP{self.degree}" + ", prompts in chunks" * self.chunks


class DriftDone(NamedTuple):
    """An arm's simulated steps."""

    steps: tuple[StepDone, ...]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def use(self) -> PoolUse:
        return PoolUse(*(sum(values) for values in zip(*(step.use for step in self.steps), strict=True)))


def engines_of(model: ModelSpec, gpu: GpuSpec, degrees: Sequence[int], use: EngineUse) -> dict[int, Roofline]:
    """One engine per degree. Raises ValueError where the model does not fit one."""
    return {
        degree: Roofline(Deployment(gpu=gpu, model=model, tp=degree, num_slots=use.num_slots, launch_s=use.launch_s)) for degree in degrees
    }


def static(engines: Mapping[int, Roofline], gpus: int, baseline: Baseline, drift: Drift, seed: int, pace: Pace) -> DriftDone:
    """Every step on instances of one degree, each of which gets as many requests."""
    arm, degrees = Arm(name=baseline.name), (baseline.degree,) * (gpus // baseline.degree)
    steps = (StepRun(engines, arm, pace, None).run(drift.batch(seed, step), degrees, baseline.chunks) for step in drift.simulated)
    return DriftDone(tuple(steps))


def job_s(generation: DriftDone, training_s: Sequence[float]) -> float:
    """Of a job whose training overlaps the next generation: one step of staleness, as OrchestrRL's."""
    return sum(max(step.seconds, trained_s) for step, trained_s in zip(generation.steps, training_s, strict=True))


def planned(
    engines: Mapping[int, Roofline],
    degrees: Sequence[int],
    arm: Arm,
    drift: Drift,
    seed: int,
    pace: Pace,
    forecast: Callable[[int], Forecast],
) -> DriftDone:
    """Every step with the arm's planners. It begins with `degrees`, and with them again where none are planned across steps.

    `forecast` gives that of a step, which is the same for all arms.
    """
    done, current = list[StepDone](), tuple(degrees)
    for step in drift.simulated:
        known = None if arm.knows else forecast(step)
        done.append(StepRun(engines, arm, pace, known).run(drift.batch(seed, step), current))
        current = done[-1].degrees if arm.across else current
    return DriftDone(tuple(done))


def run(scenario: DriftScenario, progress: RunProgress) -> RunResult:
    s = scenario
    baselines = [Baseline(degree, chunks) for chunks in (False, True) for degree in s.degrees]
    again = [arm for arm in s.arms if arm is s.arms[0] or arm.knows]
    total = len(baselines) + len(s.arms) + len(s.begins) * len(again)
    engines = engines_of(s.model, s.gpu, s.degrees, s.engine)
    fixed: dict[Baseline, DriftDone] = {}
    for each in baselines:
        progress(len(fixed), total, f"static {each.said}")
        fixed[each] = static(engines, s.gpus, each, s.drift, s.seed, s.pace)
    best = min(fixed, key=lambda each: (fixed[each].seconds, each))
    arms = [(arm.name, best.degree, arm) for arm in s.arms]
    arms += [(f"{arm.name}_from_tp{degree}", degree, arm) for degree in s.begins for arm in again]
    found: dict[str, DriftDone] = {}
    forecast = cache(partial(s.drift.forecast, s.seed))
    for name, degree, arm in arms:
        progress(len(fixed) + len(found), total, name)
        found[name] = planned(engines, (degree,) * (s.gpus // degree), arm, s.drift, s.seed, s.pace, forecast)
    figures = dict(_figures(s, fixed, best, found))
    return RunResult(
        figures=figures,
        tables={
            "phases": Table(("arm", "step", "factor", "seconds", "ended_90_s", "degrees_at_end"), list(_rows(s, fixed, found))),
            "plans": Table(("arm", "step", "why"), list(_plans(s, found))),
        },
        plots={"generation": Plot("Generation per step", lambda figure: _draw(figure, s, fixed, found))},
        notes=(
            f"generation, best static configuration: {best.said}; "
            + ", ".join(f"{each.said} {done.seconds:.0f} s" for each, done in fixed.items()),
            *_notes(s, fixed, found, figures),
            f"a job gains where generation bounds it: training is not simulated, a step's takes a baseline's generation / {s.over_training:g}, "
            "by the tokens of the step",
        ),
    )


def _figures(
    s: DriftScenario, fixed: Mapping[Baseline, DriftDone], best: Baseline, found: Mapping[str, DriftDone]
) -> Iterator[tuple[str, Value]]:
    yield "best_static_degree", float(best.degree)
    for each, done in fixed.items():
        yield f"static_{each.name}_s", done.seconds
    tokens = [sum(each.shown + each.tokens for each in s.drift.batch(s.seed, step)) for step in s.drift.simulated]
    for name, done in found.items():
        yield f"{name}_s", done.seconds
        yield f"{name}_switches", float(done.use.switches)
        yield f"{name}_moves", float(done.use.moves)
        for each, base in fixed.items():
            yield f"{name}_over_{each.name}", base.seconds / done.seconds
            trained = base.seconds / s.over_training / sum(tokens)
            training_s = [trained * num for num in tokens]
            job_gain = job_s(base, training_s) / job_s(done, training_s)
            yield f"{name}_job_over_{each.name}", job_gain
            if each is best:
                yield f"{name}_gain", base.seconds / done.seconds
                yield f"{name}_job_gain", job_gain
    whole, *parts = (found[arm.name] for arm in s.arms if not arm.knows)
    yield "whole_beats_each_part", all(whole.seconds <= part.seconds for part in parts)
    steps = list(zip(fixed[best].steps, whole.steps, strict=True))
    yield "whole_beats_every_static", whole.seconds < fixed[best].seconds
    yield "no_step_slower", all(ours.seconds <= 1.03 * theirs.seconds for theirs, ours in steps)


def _notes(
    s: DriftScenario, fixed: Mapping[Baseline, DriftDone], found: Mapping[str, DriftDone], figures: Mapping[str, Value]
) -> Iterator[str]:
    """What each arm that is the whole, or knows the lengths, gains over each baseline."""
    wholes = [name for name in found if name.split("_")[0] in {s.arms[0].name, *(arm.name for arm in s.arms if arm.knows)}]
    for each in fixed:
        gains = (
            f"{name.replace('_', ' ')} {float(figures[f'{name}_over_{each.name}']):.2f} (job {float(figures[f'{name}_job_over_{each.name}']):.2f})"
            for name in wholes
        )
        yield f"generation over {each.said}: {', '.join(gains)}"


def _rows(s: DriftScenario, fixed: Mapping[Baseline, DriftDone], found: Mapping[str, DriftDone]) -> Iterator[tuple[Cell, ...]]:
    arms = {f"static {each.said}": done for each, done in fixed.items()} | dict(found)
    for name, done in arms.items():
        for step, one in zip(s.drift.simulated, done.steps, strict=True):
            most = one.ended_s[int(0.9 * len(one.ended_s))]
            yield name, step, s.drift.factor(step), one.seconds, most, " ".join(map(str, one.degrees))


def _plans(s: DriftScenario, found: Mapping[str, DriftDone]) -> Iterator[tuple[Cell, ...]]:
    for name, done in found.items():
        for step, one in zip(s.drift.simulated, done.steps, strict=True):
            yield from ((name, step, why) for why in one.why)


def _draw(figure: Any, s: DriftScenario, fixed: Mapping[Baseline, DriftDone], found: Mapping[str, DriftDone]) -> None:
    axes = figure.subplots()
    factors = [s.drift.factor(step) for step in s.drift.simulated]
    for each, done in fixed.items():
        axes.plot(factors, [step.seconds for step in done.steps], "--", label=f"static {each.said}")
    for name, done in found.items():
        axes.plot(factors, [step.seconds for step in done.steps], marker="o", label=name)
    axes.set(xlabel="lengths over those of Figure 2a", ylabel="s", xscale="log", yscale="log")
    axes.legend(fontsize=7)


KIND = ScenarioKind(DriftScenario, run)

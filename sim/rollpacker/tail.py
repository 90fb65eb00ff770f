"""RollPacker, Figures 9 and 11: what speculation on prompts, on responses and on both does to a step."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from rubato.planning.roofline import Deployment
from rubato.planning.tail import TailRules
from rubato.runtime.config import Section
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rollpacker.rollout import LengthModel, RoundDone, periods_of
from rubato.sim.scenario import Scenario, ScenarioKind


class Size(Section):
    """A model, its engines and the lengths of its responses."""

    engine: Deployment
    engines: int = Field(ge=1)
    lengths: LengthModel


class Shares(Section):
    """Of a step without tail batching, one phase after another."""

    rollout: float = Field(gt=0)
    reward: float = Field(ge=0)
    train: float = Field(ge=0)


class Speculation(Section):
    """1 is none."""

    name: str
    prompts: float = Field(ge=1, lt=math.inf)
    responses: float = Field(ge=1, lt=math.inf)


class Assumed(Section):
    """Other values of figures about lengths that are not published."""

    correlation: float = Field(ge=0, lt=1)
    at_limit: float = Field(ge=0, lt=1)


class TailBatching(Scenario):
    """Every size with every kind of speculation; the first is the base of the ratios, the last the one that steps are computed with."""

    sizes: dict[str, Size] = Field(min_length=1)
    prompts: int = Field(ge=1)
    responses: int = Field(ge=1)
    updates: int = Field(ge=1)
    """At least so many are averaged over, in whole periods of short and long rounds."""
    arms: tuple[Speculation, ...] = Field(min_length=2)
    shares: Shares
    sensitivity: tuple[Assumed, ...] = ()
    """What the gains are computed with besides."""


def run(scenario: TailBatching, progress: RunProgress) -> RunResult:
    figures: dict[str, float | bool] = {}
    rows: list[tuple[Cell, ...]] = []
    swept: list[tuple[Cell, ...]] = []
    total = len(scenario.sizes) * len(scenario.arms)
    for name, size in scenario.sizes.items():
        rollouts: dict[str, float] = {}
        for arm in scenario.arms:
            done = _rounds(scenario, size, arm)
            rollouts[arm.name] = fmean(each.seconds for each in done)
            rows.append((name, arm.name, rollouts[arm.name], _mean(done, "short"), _mean(done, "long")))
            progress(len(rows), total, f"{name} {arm.name}")
        figures |= {f"{name}_{what}": value for what, value in _figures(scenario, rollouts).items()}
        swept += [(name, *row) for assumed in scenario.sensitivity for row in _swept(scenario, size, assumed)]
    return RunResult(
        figures=figures,
        tables={
            "phases": Table(("size", "speculation", "rollout_s", "short_s", "long_s"), rows),
            "sensitivity": Table(("size", "correlation", "at_limit", "speculation", "rollout_gain"), swept),
        },
        plots={"tail": Plot("Rollout time under speculation", lambda figure: _bars(figure, scenario, rows))},
        notes=(
            "step: rewards of finished responses are hidden behind the rest of the rollout; training takes what its share says; "
            "neither the choice of TP nor the stream trainer is in it",
        ),
    )


def _figures(scenario: TailBatching, rollouts: Mapping[str, float]) -> dict[str, float | bool]:
    """Gains of the rollout by arm; of the step with the last one, rewards in line and hidden."""
    names = [arm.name for arm in scenario.arms]
    base, best = rollouts[names[0]], rollouts[names[-1]]
    figures: dict[str, float | bool] = {f"{name}_gain": base / rollouts[name] for name in names[1:]}
    figures["base"] = base
    figures["last_is_best"] = best <= min(rollouts.values())
    shares = scenario.shares
    step_s = base / shares.rollout
    rest_s = step_s * shares.train
    figures["tail_step_gain"] = step_s * (shares.rollout + shares.reward + shares.train) / (best + rest_s + step_s * shares.reward)
    figures["step_gain"] = step_s * (shares.rollout + shares.reward + shares.train) / (best + rest_s)
    responses = [arm for arm in scenario.arms if arm.prompts == 1 and arm.responses > 1]
    if len(responses) > 1:
        *early, most = sorted(responses, key=lambda arm: arm.responses)
        saved = max(base - rollouts[arm.name] for arm in early)
        figures["responses_useless_until_most"] = saved < (base - rollouts[most.name]) / 2
    return figures


def _rounds(scenario: TailBatching, size: Size, arm: Speculation) -> Sequence[RoundDone]:
    rules = TailRules(scenario.prompts, scenario.responses, arm.prompts, arm.responses)
    return periods_of(rules, scenario.updates, size.engine, size.engines, size.lengths, scenario.seed)


def _swept(scenario: TailBatching, size: Size, assumed: Assumed) -> list[tuple[Cell, ...]]:
    """The gain of each speculation over the first."""
    changed = size.model_copy(update={"lengths": size.lengths.model_copy(update=assumed.model_dump())})
    base, *others = (fmean(done.seconds for done in _rounds(scenario, changed, arm)) for arm in scenario.arms)
    names = (arm.name for arm in scenario.arms[1:])
    return [(assumed.correlation, assumed.at_limit, name, base / each) for name, each in zip(names, others, strict=True)]


def _mean(done: Sequence[RoundDone], kind: str) -> float:
    """Seconds; 0 where there was none of the kind."""
    return fmean([each.seconds for each in done if each.kind == kind] or [0.0])


def _bars(figure: Any, scenario: TailBatching, rows: Sequence[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    names = [arm.name for arm in scenario.arms]
    for place, size in enumerate(scenario.sizes):
        seconds = {str(row[1]): float(row[2]) for row in rows if row[0] == size}
        ratios = [seconds[name] / seconds[names[0]] for name in names]
        axes.bar([x + place * 0.25 for x in range(len(names))], ratios, 0.25, label=size)
    axes.set_xticks([x + 0.25 for x in range(len(names))], names, fontsize=7)
    axes.set_ylabel(f"rollout time / {names[0]}")
    axes.legend()


KIND = ScenarioKind(TailBatching, run)

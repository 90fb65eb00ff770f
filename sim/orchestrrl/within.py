"""The degree that suits a step early and late, and what a switch within the step saves: OrchestrRL's characterisation, Frontier's makespan."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.planning.roofline import Roofline
from rubato.sim.claims import Value
from rubato.sim.orchestrrl.drift import Drift, EngineUse, engines_of
from rubato.sim.orchestrrl.generation import Arm, Pace, StepDone, StepRun
from rubato.sim.orchestrrl.pool import Response
from rubato.sim.outcome import Plot, RunProgress, RunResult, Table
from rubato.sim.scenario import Scenario, ScenarioKind

WITHIN, KNOWING = Arm(name="within", within=True), Arm(name="oracle", within=True, knows=True)


class WithinScenario(Scenario):
    """One step on every degree, then with switches."""

    model: ModelSpec
    gpu: GpuSpec
    engine: EngineUse = EngineUse()
    gpus: int = Field(ge=1)
    degrees: tuple[int, ...] = Field(min_length=2)
    drift: Drift
    """Of it the step `step`."""
    step: int = Field(ge=0)
    pace: Pace = Pace()
    begin: int = Field(ge=1)
    """The degree that the switches begin with."""
    early: float = Field(gt=0, lt=1)
    """Share of the responses that the early phase ends with; what is left then runs alone in the late phase."""


def run(scenario: WithinScenario, progress: RunProgress) -> RunResult:
    s, total = scenario, 2 * len(scenario.degrees) + 2
    engines = engines_of(s.model, s.gpu, s.degrees, s.engine)
    batch = s.drift.batch(s.seed, s.step)
    whole: dict[int, StepDone] = {}
    for degree in s.degrees:
        progress(len(whole), total, f"TP{degree}")
        whole[degree] = _on(s, engines, degree, batch)
    early = {degree: done.ended_s[int(s.early * len(batch)) - 1] for degree, done in whole.items()}
    rest = _late(batch, s.early)
    late = {degree: _on(s, engines, degree, rest).seconds for degree in s.degrees}
    forecast = s.drift.forecast(s.seed, s.step)
    degrees = (s.begin,) * (s.gpus // s.begin)
    switched = StepRun(engines, WITHIN, s.pace, forecast).run(batch, degrees)
    progress(total - 1, total, "within, knowing the lengths")
    oracle = StepRun(engines, KNOWING, s.pace, None).run(batch, degrees)
    figures = _figures(s.begin, early, late, whole, switched, oracle)
    rows = [(f"TP{degree}", early[degree], late[degree], whole[degree].seconds) for degree in s.degrees]
    return RunResult(
        figures=figures,
        tables={
            "phases": Table(("degree", "early_s", "late_s", "whole_s"), rows),
            "plans": Table(("why",), [(why,) for why in switched.why]),
        },
        plots={"generation": Plot("Responses that ended", lambda figure: _draw(figure, whole, switched))},
        notes=(
            f"early: until {s.early:.0%} of the responses ended; late: the others, each with what it had sampled by then, alone on the GPUs",
        ),
    )


def _on(s: WithinScenario, engines: Mapping[int, Roofline], degree: int, batch: list[Response]) -> StepDone:
    return StepRun(engines, Arm(name="static"), s.pace, None).run(batch, (degree,) * (s.gpus // degree))


def _late(batch: list[Response], early: float) -> list[Response]:
    """The longest responses, from where the longest of the others ended: what is left when all have sampled as far."""
    ordered = sorted(batch, key=lambda each: (each.tokens, each.name))
    num = int(early * len(ordered))
    sampled = ordered[num - 1].tokens
    return [each._replace(shown=each.shown + sampled, tokens=each.tokens - sampled) for each in ordered[num:] if each.tokens > sampled]


def _figures(
    begin: int, early: Mapping[int, float], late: Mapping[int, float], whole: Mapping[int, StepDone], switched: StepDone, oracle: StepDone
) -> dict[str, Value]:
    figures: dict[str, Value] = {f"early_tp{degree}_s": seconds for degree, seconds in early.items()}
    figures |= {f"late_tp{degree}_s": seconds for degree, seconds in late.items()}
    figures |= {f"makespan_tp{degree}_s": done.seconds for degree, done in whole.items()}
    first, last = (min(phase, key=lambda degree: (phase[degree], degree)) for phase in (early, late))
    best_s = min(done.seconds for done in whole.values())
    figures |= {
        "early_best_degree": float(first),
        "late_best_degree": float(last),
        "best_degree_rises": first < last,
        "late_best_over_begin": late[last] / late[begin],
        "small_is_better_early": early[begin] < early[max(early)],
        "large_is_better_late": late[max(late)] < late[begin],
        "makespan_s": switched.seconds,
        "makespan_over_begin": switched.seconds / whole[begin].seconds,
        "makespan_over_best_static": switched.seconds / best_s,
        "oracle_over_begin": oracle.seconds / whole[begin].seconds,
        "switch_s": switched.use.switch_s / max(1, switched.use.switches),
        "switches": float(switched.use.switches),
        "switch_is_worth_it": switched.seconds < whole[begin].seconds,
    }
    figures["switch_within_2_to_5_s"] = 2 <= float(figures["switch_s"]) <= 5
    return figures


def _draw(figure: Any, whole: Mapping[int, StepDone], switched: StepDone) -> None:
    axes = figure.subplots()
    for name, done in [*((f"TP{degree}", done) for degree, done in whole.items()), ("switching", switched)]:
        num = len(done.ended_s)
        axes.plot(done.ended_s, [(place + 1) / num for place in range(num)], label=name)
    axes.set(xlabel="s", ylabel="share of responses that ended")
    axes.legend(fontsize=7)


KIND = ScenarioKind(WithinScenario, run)

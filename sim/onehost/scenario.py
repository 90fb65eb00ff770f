"""A live job on one host and its simulation, side by side: calibrated on one run, held against others."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rubato.actors.config import RolloutSection, SamplesSection, StalenessSection, TrainSection
from rubato.actors.engines.section import EngineSection
from rubato.actors.envs.section import EnvSection
from rubato.actors.training.trainer import CheckpointSection
from rubato.runtime.config import RunSection
from rubato.sim.job import JobStep
from rubato.sim.onehost.calibrated import Calibration
from rubato.sim.onehost.observed import ROLES, Observed, observe
from rubato.sim.onehost.processes import HostJobSpec, host_job
from rubato.sim.outcome import Cell, LaneSpan, Plot, RunProgress, RunResult, Table
from rubato.sim.scenario import LiveJob, Scenario, ScenarioKind


class OneHost(Scenario):
    """Simulates `job` once per entry of `live`, with as many engines and environment managers as that run had."""

    job: LiveJob
    """The live job's own config file."""
    calibrated: Calibration
    """A file that tools/calibrate.py wrote."""
    live: tuple[Observed, ...] = Field(min_length=1)
    """What live runs were seen to do: files that tools/calibrate.py wrote."""
    workload: Literal["own", "calibrated"] = "own"
    """Whose rollouts each simulation plays: those of the run that it is held against, where its file has them, or the calibration's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = [(run.engines, run.env_managers) for run in self.live]
        if len(set(counts)) < len(counts):
            raise ValueError("live must hold runs with different numbers of engines or env_managers")
        if any(not set(run.idle) <= set(ROLES) for run in self.live):
            raise ValueError(f"live.idle may name {', '.join(ROLES)}")
        if any(not 2 <= run.window[0] <= run.window[1] <= run.steps for run in self.live):
            raise ValueError("live has a window that is not between step 2 and its last step")
        return self

    def calibration_for(self, live: Observed) -> Calibration:
        """What things cost, as calibrated; what there is to do, by `workload`."""
        if self.workload == "calibrated" or live.rollouts is None:
            return self.calibrated
        return self.calibrated.model_copy(update={"rollouts": live.rollouts})


def run(scenario: OneHost, progress: RunProgress) -> RunResult:
    figures: dict[str, float | bool] = {}
    agreement: list[tuple[Cell, ...]] = []
    phases: list[tuple[Cell, ...]] = []
    spans: list[LaneSpan] = []
    notes: list[str] = []
    for number, live in enumerate(scenario.live):
        name = _name(live)
        progress(number, len(scenario.live), name)
        job = host_job(spec_of(scenario.job, live), scenario.calibration_for(live), scenario.seed)
        rows = job.run()
        ours = observe(rows, live.window, live.engines, live.env_managers)
        figures |= _figures(name, live, ours)
        agreement += _agreement(name, live, ours)
        phases += [_phase(name, row) for row in rows]
        spans += [span for row in rows for span in _spans(name, row)]
        notes.append(_note(scenario.calibrated, live, ours))
    progress(len(scenario.live), len(scenario.live), "done")
    columns = ("run", "step", "began_s", "asked_s", "claimed_s", "trained_s", "published_s", "ended_s", "tokens")
    return RunResult(
        figures=figures,
        tables={"agreement": Table(("run", "figure", "live", "simulated"), agreement), "phases": Table(columns, phases)},
        plots={"agreement": Plot("Live runs and their simulation", lambda figure: _draw(figure, agreement))},
        spans=spans,
        notes=notes,
    )


def spec_of(job: dict[str, Any], live: Observed) -> HostJobSpec:
    """The job's config with the live run's numbers of processes and steps."""

    def section(kind: type[Any], name: str, **changes: Any) -> Any:
        return kind(**{**(job.get(name) or {}), **changes})

    return HostJobSpec(
        run=section(RunSection, "run", steps=live.steps), train=section(TrainSection, "train"),
        staleness=section(StalenessSection, "staleness"), samples=section(SamplesSection, "samples"),
        env=section(EnvSection, "env"), rollout=section(RolloutSection, "rollout"),
        engine=section(EngineSection, "engine"), checkpoint=section(CheckpointSection, "checkpoint"),
        num_engines=live.engines, num_managers=live.env_managers,
    )  # fmt: skip


def _name(live: Observed) -> str:
    """Such as 3_engines, 1_engine_2_managers."""
    managers = f"_{live.env_managers}_managers" if live.env_managers > 1 else ""
    return f"{live.engines}_engine{'s' if live.engines > 1 else ''}{managers}"


def _figures(name: str, live: Observed, ours: Observed) -> dict[str, float]:
    """What is simulated; throughput also relative to the live run's."""
    idle = {f"{role}_idle_{name}": ours.idle[role] for role in ROLES if role in live.idle}
    return {f"steps_s_{name}": ours.steps_s, f"steps_s_ratio_{name}": ours.steps_s / live.steps_s} | idle


def _agreement(name: str, live: Observed, ours: Observed) -> list[tuple[Cell, ...]]:
    idle = [(name, f"{role} idle", live.idle[role], ours.idle[role]) for role in ROLES if role in live.idle]
    return [(name, "steps/s", live.steps_s, ours.steps_s), *idle]


def _note(calibrated: Calibration, live: Observed, ours: Observed) -> str:
    recorded = calibrated.recorded
    own = (recorded.engines, recorded.env_managers) == (live.engines, live.env_managers)
    source = "the calibration's own run" if own else "not calibrated on"
    role = max((role for role in ROLES if role in live.idle), key=lambda role: abs(ours.idle[role] - live.idle[role]))
    return (
        f"{_name(live).replace('_', ' ')} ({source}): live {live.steps_s:.3f} steps/s, simulated {ours.steps_s:.3f} "
        f"({ours.steps_s / live.steps_s - 1:+.1%}); idle shares differ most for {role}, by {ours.idle[role] - live.idle[role]:+.2f}"
    )


def _phase(name: str, row: JobStep) -> tuple[Cell, ...]:
    return (
        name, row.step, row.began_s, row.asked_s, row.claimed_s, row.trained_s, row.published_s, row.ended_s, row.tokens
    )  # fmt: skip


def _spans(name: str, row: JobStep) -> list[LaneSpan]:
    times = (row.began_s, row.asked_s, row.claimed_s, row.trained_s, row.published_s, row.ended_s)
    parts = zip(("checkpoint", "wait", "train", "publish", "rest"), times, times[1:], strict=False)
    return [LaneSpan(name, "trainer", f"{what} {row.step}", begin, end - begin) for what, begin, end in parts]


def _draw(figure: Any, agreement: list[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    labels = [f"{row[0]} {row[1]}" for row in agreement]
    places = range(len(labels))
    axes.barh([place + 0.2 for place in places], [float(row[2]) for row in agreement], 0.4, label="live")
    axes.barh([place - 0.2 for place in places], [float(row[3]) for row in agreement], 0.4, label="simulated")
    axes.set_yticks(list(places), labels, fontsize=6)
    axes.invert_yaxis()
    axes.legend()


KIND = ScenarioKind(OneHost, run)

"""RollArt, Table 4: pushing weights to a store, pulling them, and for how much of it engines stand still.

Two readings of what is hidden. `loading`: engines pull in the background, as ours do, and stand still only while they load from
their host. `share`: a fixed share of the pull is exposed, which one row of the table gives; the other rows are predicted.
"""

from typing import Self

from pydantic import Field, model_validator

from rubato.planning.language_model import ModelSpec
from rubato.runtime.config import Section
from rubato.sim.outcome import Cell, RunProgress, RunResult, Table
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.weight_sync import Measured, StoreSync


class ServedModel(Section):
    """A model and the GPUs of one engine that serves it."""

    model: ModelSpec
    tp: int = Field(ge=1)


class PullRow(Section):
    """The row of the table that gives the exposed share."""

    row: str
    pull_s: float = Field(gt=0)
    exposed_s: float = Field(gt=0)


class WeightPull(Scenario):
    """Rates are transfers that were timed elsewhere, but for the push, which only this table has."""

    served: dict[str, ServedModel]
    push: Measured
    pull: Measured
    load: Measured
    """Host to one GPU."""
    slack_s: float = Field(gt=0)
    """From the end of a training step to the next swap."""
    calibrated_on: PullRow

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.calibrated_on.row not in self.served:
            raise ValueError(f"calibrated_on.row must be one of {', '.join(self.served)}")
        return self


def run(scenario: WeightPull, progress: RunProgress) -> RunResult:
    sync = StoreSync(push_bytes_s=scenario.push.bytes_s, pull_bytes_s=scenario.pull.bytes_s, load_bytes_s=scenario.load.bytes_s)
    row = scenario.calibrated_on
    share = row.exposed_s / row.pull_s
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {"exposed_share": share}
    for name, served in scenario.served.items():
        size = served.model.weight_bytes
        push_s, pull_s = sync.push_s(size), sync.pull_s(size)
        loading_s = sync.exposed_s(size, served.tp, scenario.slack_s)
        figures |= {f"push_{name}": push_s, f"pull_{name}": pull_s, f"naive_{name}": push_s + pull_s}
        figures |= {f"exposed_loading_{name}": loading_s, f"staged_{name}": sync.staged_s(size)}
        if name != row.row:
            figures[f"exposed_share_{name}"] = share * pull_s
        rows.append((name, size, push_s, pull_s, sync.staged_s(size), loading_s, share * pull_s))
        progress(len(rows), len(scenario.served), name)
    columns = ("model", "bytes", "push_s", "pull_s", "staged_s", "exposed_loading_s", "exposed_share_s")
    return RunResult(
        figures=figures,
        tables={"phases": Table(columns, rows)},
        notes=(
            f"The exposed share, {share:.0%}, is the {row.row} row's; that row is no claim.",
            f"A swap comes {scenario.slack_s:g} s after the push began; all buckets are staged by then.",
        ),
    )


KIND = ScenarioKind(WeightPull, run)

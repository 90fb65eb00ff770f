"""RollMux, Figure 12: model sync between two clusters by all-gather (veRL) and along the relay trees of the live system, from rates measured elsewhere."""

from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.weight_sync import CrossLink, Measured


class ModelSync(Scenario):
    """Its bars: every model at every scale, by both systems."""

    receiver: GpuSpec
    """GPU of the rollout cluster."""
    models: dict[str, ModelSpec] = Field(min_length=1)
    """By the short name that figures carry."""
    gpus: tuple[PositiveInt, ...] = Field(min_length=1)
    """Of the training and of the rollout cluster each."""
    line_bytes_s: float = Field(gt=0)
    """Of one stream between the clusters."""
    tcp: Measured
    """One TCP transfer of weights between clusters; a stream carries that, but never more than its line."""
    rdma: Measured
    """One RDMA transfer of weights inside a cluster."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(num % self.receiver.gpus_per_server for num in self.gpus):
            raise ValueError(f"gpus must be whole servers of {self.receiver.gpus_per_server}")
        return self


def run(scenario: ModelSync, progress: RunProgress) -> RunResult:
    link = CrossLink(
        stream_bytes_s=min(scenario.line_bytes_s, scenario.tcp.bytes_s),
        node_bytes_s=scenario.receiver.nvlink_busbw_bytes_s,
        relay_bytes_s=scenario.rdma.bytes_s,
        gpus_per_node=scenario.receiver.gpus_per_server,
    )
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {}
    for gpus in scenario.gpus:
        ratios: list[float] = []
        for name, model in scenario.models.items():
            size = model.weight_bytes
            verl, ours = link.all_gather_s(size, gpus, gpus), link.relayed_s(size, gpus)
            figures[f"verl_{name}_{gpus}"], figures[f"rollmux_{name}_{gpus}"] = verl, ours
            ratios.append(verl / ours)
            rows += [(name, gpus, "verl", size, verl), (name, gpus, "rollmux", size, ours)]
        figures[f"speedup_{gpus}"] = sum(ratios) / len(ratios)
        progress(len(rows), 2 * len(scenario.models) * len(scenario.gpus), f"{gpus} GPUs")
    rates = f"{link.stream_bytes_s / 1e9:.2f} GB/s per stream, {link.relay_bytes_s / 1e9:.2f} GB/s between nodes"
    return RunResult(
        figures=figures,
        tables={"phases": Table(("model", "gpus", "system", "bytes", "seconds"), rows)},
        plots={"modelsync": Plot("Model sync (simulated)", lambda figure: _bars(figure, rows))},
        notes=(f"{rates}; one stream per pair of GPUs is read from the bars themselves, and alone makes them possible",),
    )


def _bars(figure: Any, rows: list[tuple[Cell, ...]]) -> None:
    axes = figure.subplots()
    axes.bar(range(len(rows)), [row[4] for row in rows], color=["0.6" if row[2] == "verl" else "C0" for row in rows])
    axes.set_xticks(range(len(rows)), [f"{row[2]}\n{row[0]} x{row[1]}" for row in rows], fontsize=7)
    axes.set_ylabel("seconds")
    axes.set_yscale("log")


KIND = ScenarioKind(ModelSync, run)

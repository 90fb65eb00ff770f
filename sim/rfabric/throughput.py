"""Throughput of an RL iteration on each fabric, relative to the non-blocking fat-tree: Figure 6 of the RFabric paper."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError, field_validator

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.runtime.config import Section
from rubato.runtime.errors import ConfigError
from rubato.sim.claims import Value
from rubato.sim.outcome import Cell, LaneSpan, Plot, RunProgress, RunResult, Table
from rubato.sim.rfabric.fabrics import FABRICS, FabricSpec, Iteration, case, window_times
from rubato.sim.rfabric.job import Gpus, TrainingSpec, place
from rubato.sim.scenario import Scenario, ScenarioKind

Found = Mapping[tuple[int, str], Iteration]
"""By GPUs and fabric."""

UPPER, LOWER = ("fat-tree", "rail-optimised", "rfabric"), ("oversubscribed", "sip")
"""The paper's two groups."""


class Variation(Section):
    """A row of the sensitivity table: keys, dotted from the scenario's root, and what each becomes."""

    name: str
    set: dict[str, Any]


class ThroughputScenario(Scenario):
    """A job, the clusters and fabrics to run it on, and what to vary."""

    model: ModelSpec
    gpu: GpuSpec
    job: TrainingSpec
    fabric: FabricSpec = FabricSpec()
    gpus: Gpus
    fabrics: tuple[str, ...] = tuple(FABRICS)
    sensitivity: tuple[Variation, ...] = ()
    """Run at the first size; each beside the scenario as it stands."""

    @field_validator("fabrics")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in FABRICS]:
            raise ValueError(f"{unknown[0]} is no fabric; there are {', '.join(FABRICS)}")
        if "fat-tree" not in names:
            raise ValueError("fat-tree must be among them, since the others are measured against it")
        return names


def varied(scenario: ThroughputScenario, variation: Variation) -> ThroughputScenario:
    """`scenario` with the keys changed; ConfigError where that leaves no scenario."""
    tree = scenario.model_dump(mode="json")
    for key, value in variation.set.items():
        inner = tree
        *outer, last = key.split(".")
        for name in outer:
            inner = inner.get(name)
            if not isinstance(inner, dict):
                raise ConfigError(f"The variation {variation.name!r} sets {key}, which is not a key.")
        inner[last] = value
    try:
        return type(scenario).model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"The variation {variation.name!r} is refused: {where}: {first['msg']}.") from error


def simulate(scenario: ThroughputScenario, gpus: int, name: str) -> Iteration:
    """One iteration on one fabric."""
    job = place(scenario.job, scenario.model, scenario.gpu, gpus)
    return FABRICS[name](case(job, scenario.fabric, scenario.seed))


def run(scenario: ThroughputScenario, progress: RunProgress) -> RunResult:
    """Every fabric at every size, then the variations."""
    total = len(scenario.gpus) * len(scenario.fabrics) + len(scenario.sensitivity)
    found: dict[tuple[int, str], Iteration] = {}
    for gpus in scenario.gpus:
        for name in scenario.fabrics:
            progress(len(found), total, f"{name}, {gpus} GPUs")
            found[gpus, name] = simulate(scenario, gpus, name)
    rows = [_sensitivity_row("as stated", scenario, found)]
    for i, variation in enumerate(scenario.sensitivity):
        progress(len(found) + i, total, variation.name)
        altered = varied(scenario, variation)
        first = {(altered.gpus[0], name): simulate(altered, altered.gpus[0], name) for name in altered.fabrics}
        rows.append(_sensitivity_row(variation.name, altered, first))
    outcome_tables = {
        "phases": _phases(found), "links": _links(found, scenario.gpus[0]), "circuits": _circuits(found),
        "sensitivity": Table(("variation", "fat_tree_s", *scenario.fabrics), rows),
    }  # fmt: skip
    if "rfabric-layered" in scenario.fabrics:
        outcome_tables["windows"] = _windows(scenario)
    plots = {"throughput": Plot("Throughput relative to the fat-tree", lambda f: _draw(f, scenario, found))}
    return RunResult(dict(_figures(scenario, found)), outcome_tables, plots, list(_spans(found)), _notes(scenario, found))


def _phases(found: Found) -> Table:
    """Every operation of every phase: how often it runs in the phase, and its time."""
    rows: list[tuple[Cell, ...]] = [
        (
            gpus, name, phase, iteration.topology[phase].name if phase in iteration.topology else "static",
            time.seconds, time.network_s, operation, times, done.seconds, float(done.link_bytes.sum()),
        )
        for (gpus, name), iteration in found.items()
        for phase, time in iteration.phases.items()
        for operation, times, done in time.runs
    ]  # fmt: skip
    columns = "gpus fabric phase topology phase_s network_s operation runs run_s link_bytes"
    return Table(tuple(columns.split()), rows)


def _links(found: Found, gpus: int) -> Table:
    """Every link that carries bytes in one run of a phase, at one size."""
    rows: list[tuple[Cell, ...]] = []
    for (size, name), iteration in found.items():
        for phase, network in iteration.networks.items() if size == gpus else ():
            time = iteration.phases[phase]
            carried = sum((times * done.link_bytes for _, times, done in time.runs), np.zeros(len(network.capacity)))
            for i in np.flatnonzero(carried).tolist():
                busy = float(carried[i] / network.capacity[i] / time.seconds)
                rows.append((name, phase, str(network.names[i]), float(network.capacity[i]), float(carried[i]), busy))
    return Table(("fabric", "phase", "link", "bytes_s", "bytes", "busy"), rows)


def _circuits(found: Found) -> Table:
    """The circuits that each phase has, per pair of nodes."""
    rows: list[tuple[Cell, ...]] = [
        (gpus, name, phase, topology.name, a, b, number)
        for (gpus, name), iteration in found.items()
        for phase, topology in iteration.topology.items()
        for (a, b), number in sorted(Counter(topology.links).items())
    ]
    return Table(("gpus", "fabric", "phase", "topology", "node", "other", "circuits"), rows)


def _windows(scenario: ThroughputScenario) -> Table:
    """How long the windows of an execution last, against a change of circuits."""
    delay_s = scenario.fabric.delay.total_s
    rows: list[tuple[Cell, ...]] = []
    for gpus in scenario.gpus:
        built = case(place(scenario.job, scenario.model, scenario.gpu, gpus), scenario.fabric, scenario.seed)
        rows += [(gpus, name, number, seconds, delay_s, seconds > delay_s) for name, number, seconds in window_times(built)]
    return Table(("gpus", "window", "per_micro_batch", "window_s", "change_s", "outlasts"), rows)


def _normalised(found: Found, gpus: int, names: tuple[str, ...]) -> list[float]:
    return [found[gpus, "fat-tree"].seconds / found[gpus, name].seconds for name in names]


def _sensitivity_row(name: str, scenario: ThroughputScenario, found: Found) -> tuple[Cell, ...]:
    gpus = scenario.gpus[0]
    return name, found[gpus, "fat-tree"].seconds, *_normalised(found, gpus, scenario.fabrics)


def _figures(scenario: ThroughputScenario, found: Found) -> Iterator[tuple[str, Value]]:
    for gpus in scenario.gpus:
        relative = dict(zip(scenario.fabrics, _normalised(found, gpus, scenario.fabrics), strict=True))
        for name, value in relative.items():
            yield f"{name}_{gpus}", value
            yield f"iteration_s_{name}_{gpus}", found[gpus, name].seconds
        if {*UPPER, *LOWER} <= relative.keys():
            yield f"two_groups_{gpus}", min(relative[n] for n in UPPER) > max(relative[n] for n in LOWER)
        if {"rfabric", "rfabric-layered"} <= relative.keys():
            yield f"layered_pays_{gpus}", found[gpus, "rfabric-layered"].seconds < found[gpus, "rfabric"].seconds
        if "rfabric" in relative:
            yield f"exposed_delay_share_{gpus}", found[gpus, "rfabric"].exposed_s / found[gpus, "rfabric"].seconds


def _notes(scenario: ThroughputScenario, found: Found) -> tuple[str, ...]:
    said: list[str] = []
    for gpus in scenario.gpus:
        job = place(scenario.job, scenario.model, scenario.gpu, gpus)
        trains = job.train_servers * job.gpu.gpus_per_server
        said.append(f"{gpus} GPUs: {trains} train ({job.data} replicas, {job.micro_batches} micro-batches), the rest generates.")
    if any(name == "rfabric" for _, name in found):
        first = found[scenario.gpus[0], "rfabric"]
        ports = max((circuits.core_ports for circuits in first.topology.values()), default=0)
        said.append(f"RFabric, core share {scenario.fabric.core_share}: {first.num_switches} changes an iteration, {first.exposed_s:.3f} s exposed; at most {ports} uplinks of a rack into the core.")  # fmt: skip
    return tuple(said)


def _spans(found: Found) -> Iterator[LaneSpan]:
    """The first update and the weight sync of every fabric at every size."""
    for (gpus, name), iteration in found.items():
        now = 0.0
        for phase, time in iteration.phases.items():
            if iteration.num_switches:
                change = iteration.exposed_s / iteration.num_switches
                yield LaneSpan(f"{gpus} GPUs", name, "circuits change", now, change)
                now += change
            topology = iteration.topology[phase].name if phase in iteration.topology else "static"
            yield LaneSpan(f"{gpus} GPUs", name, phase, now, time.seconds, {"topology": topology, "network_s": time.network_s})
            now += time.seconds


def _draw(figure: Any, scenario: ThroughputScenario, found: Found) -> None:
    axes = figure.subplots(1, len(scenario.gpus), sharey=True, squeeze=False)[0]
    stated = {claim.name: claim.paper for claim in scenario.claims if claim.paper is not None}
    for ax, gpus in zip(axes, scenario.gpus, strict=True):
        ax.bar(list(scenario.fabrics), _normalised(found, gpus, scenario.fabrics), color="0.6", label="simulated")
        named = [name for name in scenario.fabrics if f"{name}_{gpus}" in stated]
        ax.plot(named, [stated[f"{name}_{gpus}"] for name in named], "kx", label="paper")
        ax.set_title(f"{gpus} GPUs")
        ax.tick_params(axis="x", labelrotation=35, labelsize=7)
    axes[0].legend(fontsize=7)


KIND = ScenarioKind(ThroughputScenario, run)

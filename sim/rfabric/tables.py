"""The CSV files of simulated iterations: phases, links, circuits."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from sim.outcome import Cell, Table
from sim.rfabric.fabrics import Iteration

Found = Mapping[tuple[int, str], Iteration]


def phases(found: Found) -> Table:
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
    columns = (
        "gpus",
        "fabric",
        "phase",
        "topology",
        "phase_s",
        "network_s",
        "operation",
        "runs",
        "run_s",
        "link_bytes",
    )
    return Table(columns, rows)


def links(found: Found, gpus: int) -> Table:
    """Every link that carries bytes in one run of a phase, at one size."""
    rows: list[tuple[Cell, ...]] = []
    for (size, name), iteration in found.items():
        for phase, time in iteration.phases.items() if size == gpus else ():
            network = iteration.networks[phase]
            carried = sum((times * done.link_bytes for _, times, done in time.runs), np.zeros(len(network.capacity)))
            for i in np.flatnonzero(carried).tolist():
                busy = float(carried[i] / network.capacity[i] / time.seconds)
                rows.append((name, phase, str(network.names[i]), float(network.capacity[i]), float(carried[i]), busy))
    return Table(("fabric", "phase", "link", "bytes_s", "bytes", "busy"), rows)


def circuits(found: Found) -> Table:
    """The circuits that each phase has, per pair of nodes."""
    rows: list[tuple[Cell, ...]] = [
        (gpus, name, phase, topology.name, a, b, number)
        for (gpus, name), iteration in found.items()
        for phase, topology in iteration.topology.items()
        for (a, b), number in sorted(Counter(topology.links).items())
    ]
    return Table(("gpus", "fabric", "phase", "topology", "node", "other", "circuits"), rows)

"""Chooses, once the rhythm of the phases is known, whose template each phase gets: not every phase is worth a change of circuits."""

from actors.fabric.rhythm import Rhythm
from actors.fabric.templates import Templates
from planning.switching import PhaseCost, Schedule, schedule


def choose(rhythm: Rhythm, templates: Templates, *, link_bytes_s: float, delay_s: float) -> dict[str, str]:
    """Phase → the phase whose template it should have, for the shortest period; empty before the first iteration is over.

    A phase is taken to wait for its traffic, and to go on for the rest of its usual time when that is through.
    """
    cycle = rhythm.cycle()
    names = sorted(phase for phase in cycle if phase in templates.book.phases)
    if not names:
        return {}
    costs: list[PhaseCost] = []
    for phase in cycle:
        busy_s = tuple(templates.bytes_per_link(phase, name) / link_bytes_s for name in names)
        costs.append(PhaseCost(0.0, busy_s, max(0.0, (rhythm.lasts(phase) or 0.0) - min(busy_s))))
    found: Schedule = schedule(costs, delay_s)
    return {phase: names[k] for phase, k in zip(cycle, found.choices, strict=True)}

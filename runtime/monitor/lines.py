"""Lines of plain text about a snapshot's pools, engines, network, lengths and advice; empty where the snapshot has nothing of it."""

from collections.abc import Sequence
from typing import NamedTuple

from rubato.runtime.monitor.snapshot import total
from rubato.runtime.monitor.views import Snapshot


class Shown(NamedTuple):
    """One figure: what it is called on the screen, the metric it is read from, and how it is written (a format spec)."""

    label: str
    metric: str
    spec: str = ".2f"


NETWORK = (
    Shown("circuits", "fabric/circuits", ",.0f"),
    Shown("change", "fabric/change", ",.0f"),
    Shown("hidden s", "fabric/hidden_s", ".3f"),
    Shown("exposed s", "fabric/exposed_s", ".3f"),
)
"""A line of its own, where any of them is known."""

DEGREE, ASLEEP = "engine/degree", "engine/asleep"
"""Gauges of each engine: devices that compute one model together, and 1 while it sleeps."""

CHANGES = (
    Shown("switches", "orchestrator/switches", ",.0f"),
    Shown("moves", "orchestrator/moves", ",.0f"),
    Shown("circuits lit", "orchestrator/circuits", ",.0f"),
    Shown("agreed number", "orchestrator/agreed", ".0f"),
    Shown("electrical", "orchestrator/electrical", ",.0f"),
    Shown("left s", "orchestrator/remaining_s", ",.1f"),
)
"""Beside the engines, where any of them is known."""

FORECAST, FACT = "orchestrator/forecast_s", "orchestrator/took_s"
"""Seconds: what was expected of the last load, and what it was."""

MAX_NAMES = 4
"""Engines of one degree that are named."""

LENGTH, TRAINED_FRAC, ENDED = "length/", "/trained_frac", "/ended"
"""How the metrics of one length of samples begin and end."""

PHASE = "fabric/phase/"
"""Gauges whose names begin so, one of them 1: the phase of the network, at the name's end."""


def pools(shown: Snapshot) -> str:
    """How many of each pool's actors are ready, and the class of its hardware; empty where no role has pools."""
    states: dict[str, list[str]] = {}
    for actor in shown["actors"]:
        if actor["pool"]:
            states.setdefault(f"{actor['pool']} {actor['hardware']}".rstrip(), []).append(actor["state"])
    return ", ".join(f"{name} {found.count('ready')}/{len(found)}" for name, found in sorted(states.items()))


def engines(shown: Snapshot) -> str:
    """Which have which degree or sleep, what was changed, and forecast against fact; empty where all are awake, of degree 1, and left so."""
    shapes: dict[str, list[str]] = {}
    for actor in shown["actors"]:
        if DEGREE in actor["metrics"]:
            asleep = actor["metrics"].get(ASLEEP, 0.0)
            shapes.setdefault("asleep" if asleep else f"degree {actor['metrics'][DEGREE]:.0f}", []).append(actor["name"])
    told = [f"{shape}: {_some(names)}" for shape, names in sorted(shapes.items(), reverse=True)]
    changes = ", ".join(totals(shown, CHANGES))
    if not changes and not shapes.keys() - {"degree 1"}:
        return ""
    forecast_s, took_s = total(shown, FORECAST), total(shown, FACT)
    if forecast_s is not None and took_s is not None:
        told.append(f"{changes}, the last load {took_s:.1f} s of {forecast_s:.1f} s forecast".removeprefix(", "))
    elif changes:
        told.append(changes)
    return "; ".join(told)


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def network(shown: Snapshot) -> str:
    """The phase of the network and its figures; empty for a run without one."""
    told = ", ".join(totals(shown, NETWORK))
    everywhere = {name for actor in shown["actors"] for name in actor["metrics"]} | set(shown["metrics"])
    phases = sorted(name for name in everywhere if name.startswith(PHASE) and total(shown, name))
    phase = f"{phases[0].removeprefix(PHASE)}: " if phases else ""
    down = " (electrical path only)" if total(shown, "fabric/electrical") else ""
    return f"{phase}{told}{down}" if told else ""


def advice(shown: Snapshot) -> str:
    """`generation-bound: engine 1 more +18%, alpha 1 more +9%`; empty where no change is worth a word."""
    found = [(*name.split("/", 2)[1:], gain) for name, gain in shown["advice"].items()]
    told = ", ".join(f"{change.replace('_', ' ')} +{gain:.0%}" for _, change, gain in found)
    return f"{found[0][0]}: {told}" if found else ""


def lengths(shown: Snapshot) -> str:
    """The share of the samples of each length that was trained: where these differ, long ones are missing, or short ones."""
    known = {name for at in (shown["metrics"], *(actor["metrics"] for actor in shown["actors"])) for name in at}
    found = sorted(int(name.split("/")[1]) for name in known if name.startswith(LENGTH) and name.endswith(TRAINED_FRAC))
    told = [(n, total(shown, f"{LENGTH}{n}{TRAINED_FRAC}") or 0.0, total(shown, f"{LENGTH}{n}{ENDED}") or 0.0) for n in found]
    return ", ".join(f"{share:.1%} of {num:,.0f} ≤ {n}" for n, share, num in told) + (" tokens" if told else "")


def totals(shown: Snapshot, figures: Sequence[Shown]) -> list[str]:
    """Each that is known, over the live actors."""
    known = [(figure, total(shown, figure.metric)) for figure in figures]
    return [labelled(figure, value) for figure, value in known if value is not None]


def labelled(figure: Shown, value: float) -> str:
    """`circuits 10`."""
    return f"{figure.label} {value:{figure.spec}}"

"""Who held which pool when, in a live run and in its simulation: drawn side by side, and how far the phases' durations differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rubato.actors.cluster.board import HeldTime

Held = Mapping[str, Sequence[HeldTime]]
"""By pool."""

SHOWN = 3
"""Steps of the first job that are drawn, from its second on."""


def durations(held: Held) -> dict[tuple[str, str], float]:
    """Mean seconds of each (pool, job), without the first time, in which engines start, and the last, which the end of the run cuts."""
    found: dict[tuple[str, str], list[float]] = {}
    for pool, times in held.items():
        for job, began_s, ended_s in sorted(times, key=lambda each: each.began_s):
            found.setdefault((pool, job), []).append(ended_s - began_s)
    return {key: fmean(own[1:-1]) for key, own in found.items() if len(own) > 2}


def worst_deviation(live: Held, simulated: Held) -> float:
    """The largest |live ÷ simulated - 1| of a phase's mean duration."""
    ours = durations(simulated)
    return max(abs(seconds / ours[key] - 1) for key, seconds in durations(live).items())


def draw(cases: Mapping[str, tuple[Held, Held]], target: Path) -> None:
    """A PNG with a row for each case: live, simulated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.2 * len(cases)), layout="constrained")
    grid = figure.subplots(len(cases), 2, squeeze=False)
    for row, (name, sides) in zip(grid, cases.items(), strict=True):
        for axes, held, side in zip(row, sides, ("live, paced", "RLSim, real permits in virtual time"), strict=True):
            jobs = sorted({each.job for times in held.values() for each in times})
            first = sorted(each.began_s for times in held.values() for each in times if each.job == jobs[0])
            start, end = first[2], first[min(2 + 2 * SHOWN, len(first) - 1)]
            for lane, times in enumerate(held.values()):
                for job, began_s, ended_s in times:
                    axes.barh(lane, ended_s - began_s, left=began_s - start, color=f"C{jobs.index(job)}", edgecolor="white")
            axes.set_xlim(0, end - start)
            axes.set_yticks(range(len(held)), list(held))
            axes.set_title(f"{name} · {side}", fontsize=9)
            axes.set_xlabel("s", fontsize=8)
    figure.savefig(target, format="png", dpi=110)

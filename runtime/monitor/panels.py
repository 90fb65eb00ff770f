"""The texts of the live view that are longer than one line: flow, waits, all metrics, help."""

from runtime.monitor.names import DEFAULT, Names
from runtime.monitor.snapshot import Snapshot
from runtime.monitor.table import flow, versions, wait_lines

HELP = """\
q quit          a actors (back to the overview; Esc too)
f flow          where the work is, queues, weight versions
w waits         what waits for what, and why
m metrics       newest value of everything, of the run and of the selected actor
l log           newest lines of the selected actor's log
d drain         take the selected actor out without losing what it holds
k kill          SIGKILL to the selected actor; its supervisor restarts it
+ add           one more actor of the selected actor's role
up/down         select an actor

d, k and + work only when the monitor was started with --allow-actions, and ask first.
Columns: inc = incarnation (counts restarts of all actors), mail = messages waiting,
rate/s = messages handled per second, idle = share of the last 10 s."""


def flow_panel(shown: Snapshot, names: Names = DEFAULT) -> str:
    """One place per line, then the weight versions: narrow enough for half a screen."""
    places = flow(shown, names=names).split(" ▸ ")
    lines = [f"{'  ' if index else ''}{'▸ ' if index else ''}{place}" for index, place in enumerate(places)]
    return "\n".join([*lines, f"weights {versions(shown, names=names)}"])


def flow_page(shown: Snapshot, names: Names = DEFAULT) -> str:
    """The whole page: flow, queues, weight versions."""
    queues = [f"  {name:<16}{depth:>10,.0f}" for name, depth in shown["queues"].items()] or ["  none yet"]
    return "\n".join([flow(shown, names=names), "", "queues", *queues, "", f"weights {versions(shown, names=names)}"])


def waits_panel(shown: Snapshot) -> str:
    return "\n".join(wait_lines(shown))


def metrics_page(shown: Snapshot, selected: str) -> str:
    """Newest value of every metric of the run, then of the selected actor."""
    lines = ["run", *_figures(shown["metrics"])]
    for actor in shown["actors"]:
        if actor["name"] == selected:
            lines += ["", selected, *_figures(actor["metrics"])]
    return "\n".join(lines)


def _figures(metrics: dict[str, float]) -> list[str]:
    return [f"  {name:<36}{value:>16,.6g}" for name, value in sorted(metrics.items())] or ["  none yet"]

"""The texts of the live view that are longer than one line: flow, waits, all metrics, help."""

from collections.abc import Sequence

from runtime.monitor.blocked import seconds
from runtime.monitor.names import DEFAULT, Names
from runtime.monitor.table import flow, network, versions, wait_lines
from runtime.monitor.views import Snapshot

HELP = """\
q quit          a actors (back to the overview; Esc too)
f flow          where the work is, queues, weight versions
w waits         what waits for what, and why
m metrics       newest value of everything, of the run and of the selected actor
l log           newest lines of the selected actor's log
i in flight     what the selected actor has in hand: its stages, then its requests, oldest first
d drain         take the selected actor out without losing what it holds
r restart       drain the selected actor and start it again
k kill          SIGKILL to the selected actor; its supervisor restarts it
+ add           one more actor of the selected actor's role
up/down         select an actor

d, r, k and + work only when the monitor was started with --allow-actions, and ask first.
Columns: inc = incarnation (counts restarts of all actors), mail = messages waiting,
rate/s = messages handled per second, idle = share of the last 10 s."""


def flow_panel(shown: Snapshot, failed: Sequence[str] = (), names: Names = DEFAULT) -> str:
    """One place per line, then the weight versions and what fails: narrow enough for half a screen."""
    places = flow(shown, names=names).split(" ▸ ")
    lines = [f"{'  ' if index else ''}{'▸ ' if index else ''}{place}" for index, place in enumerate(places)]
    return "\n".join([*lines, f"weights {versions(shown, names=names)}", *_network(shown, names), *failed])


def flow_page(shown: Snapshot, failed: Sequence[str] = (), names: Names = DEFAULT) -> str:
    """The whole page: flow, queues, weight versions, what fails and how often."""
    queues = [f"  {name:<16}{depth:>10,.0f}" for name, depth in shown["queues"].items()] or ["  none yet"]
    lines = [flow(shown, names=names), "", "queues", *queues, "", f"weights {versions(shown, names=names)}"]
    lines += _network(shown, names)
    return "\n".join([*lines, "", "failures", *(f"  {line}" for line in failed or ["none"])])


def _network(shown: Snapshot, names: Names) -> list[str]:
    line = network(shown, names=names)
    return [f"fabric {line}"] if line else []


def in_flight_page(shown: Snapshot, selected: str) -> str:
    """What the actor has in hand: how much is in each stage, then each request."""
    stages = [row for actor in shown["actors"] if actor["name"] == selected for row in actor["stages"] if row["num"]]
    waits = [wait for wait in shown["waits"] if wait["actor"] == selected]
    lines = [f"{selected}: {'stage':<14}{'holder':<18}{'now':>5}{'mean':>7}{'longest':>10}"]
    lines += [
        f"  {row['stage']:<24}{row['holder'] or '-':<18}{row['num']:>5}{row['load']:>7.1f}{max(0.0, row['longest_s']):>8.2f} s"
        for row in sorted(stages, key=lambda row: -row["num"])
    ]
    lines += ["", "oldest first"]
    lines += [
        f"  {seconds(wait['age_s']):>10}  {wait['stage']} {wait['what']}"
        + (f" at {wait['holder']}" if wait["holder"] else "")
        + (f": {wait['detail']}" if wait["detail"] else "")
        for wait in waits
    ]
    return "\n".join(lines) if waits else f"{selected} has nothing in hand"


def waits_panel(shown: Snapshot) -> str:
    """Blocked stages; where there are none, the oldest wait of each actor."""
    trouble = [shown["trouble"]] if shown["trouble"] else []
    blocked = trouble + [f"{row['holder']} {row['kind']}: {row['what']}" for row in shown["blocked"]]
    return "\n".join(dict.fromkeys(blocked)) or "\n".join(wait_lines(shown))


def metrics_page(shown: Snapshot, selected: str) -> str:
    """Newest value of every metric of the run, then of the selected actor."""
    lines = ["run", *_figures(shown["metrics"])]
    for actor in shown["actors"]:
        if actor["name"] == selected:
            lines += ["", selected, *_figures(actor["metrics"])]
    return "\n".join(lines)


def _figures(metrics: dict[str, float]) -> list[str]:
    return [f"  {name:<36}{value:>16,.6g}" for name, value in sorted(metrics.items())] or ["  none yet"]

"""Writes a snapshot as plain text: the lines of `--once`, and the panels and pages of the live view."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise

from runtime.monitor.blocked import seconds
from runtime.monitor.snapshot import DEFAULT, Names, Row, Shown, total
from runtime.monitor.views import ActorView, Snapshot

BLOCKS = "▁▂▃▄▅▆▇█"

COLUMNS = ("name", "state", "inc", "mail", "rate/s", "idle")
WIDTHS = (19, 8, 4, 4, 6, 4)
"""50 columns with the spaces between: a second panel fits into 80."""

MAX_WAITS = 8
BAR_WIDTH = 9


def once(shown: Snapshot, rows: Sequence[Row], *, names: Names = DEFAULT, width: int = 80) -> str:
    """The whole picture as lines of at most `width` columns."""
    parts = [head(shown, rows, names=names), trend(shown, rows, width, names=names), ""]
    if shown["actors"]:
        parts += [" ".join(cells(COLUMNS)), *(" ".join(cells(actor_row(a, names))) for a in shown["actors"]), ""]
    parts += [*_hung("flow", flow(shown, names=names), width), *_hung("weights", versions(shown, names=names), width)]
    parts += _hung("fabric", network(shown, names=names), width)
    for index, line in enumerate(failure_lines(shown, names=names)):
        parts += _hung("" if index else "failed", line, width)
    for index, line in enumerate(wait_lines(shown)):
        parts += _hung("" if index else "waits", line, width)
    return "\n".join(clip(line, width) for line in parts)


def head(shown: Snapshot, rows: Sequence[Row], *, names: Names = DEFAULT) -> str:
    """Run, step, time, age against its bound, how much was dropped, and whether it still runs."""
    steps = f"/{shown['steps']}" if shown["steps"] is not None else ""
    parts = [shown["run"], f"step {shown['step']}{steps}", clock(shown["elapsed_s"])]
    if shown["alpha"] is not None:
        age = shown["metrics"].get(names.age, 0.0)
        parts.append(f"age {age:.0f} ≤ α {shown['alpha']:g}" if shown["alpha"] >= 0 else f"age {age:.0f}, unbounded")
    parts.append(f"{sum(row.get(names.dropped, 0.0) for row in rows):,.0f} dropped")
    told = {"running": "", "ended": "run ended", "unreachable": "can't be reached"}[shown["state"]]
    return " ── ".join([*parts, told] if told else parts)


def trend(shown: Snapshot, rows: Sequence[Row], width: int, *, names: Names = DEFAULT) -> str:
    """The sparkline and as many newest figures as fit."""
    values = [row[names.trend.metric] for row in rows if names.trend.metric in row]
    line = f"{names.trend.label} {sparkline(values, 16)} {values[-1]:{names.trend.spec}}" if values else "no step yet"
    for figure in names.headline:
        if figure.metric in shown["metrics"]:
            told = f"   {figure.label} {shown['metrics'][figure.metric]:{figure.spec}}"
            line += told if len(line) + len(told) <= width else ""
    return line


def actor_row(actor: ActorView, names: Names = DEFAULT) -> tuple[str, ...]:
    """The figures of one actor under COLUMNS; a ready one that has a weight version shows that as its state."""
    version = actor["metrics"].get(names.version)
    state = f"v{version:.0f}" if version is not None and actor["state"] == "ready" else actor["state"]
    if actor["state"] == "ready" and actor["metrics"].get(names.pulled, 1.0) < 1.0:
        state = "pulling"
    idle = f"{actor['idle']:.0%}"
    return actor["name"], state, str(actor["incarnation"]), str(actor["mailbox"]), short(actor["rate_s"]), idle


def cells(texts: Sequence[str]) -> list[str]:
    """Words to the left, figures to the right, each cut to its column."""
    aligned: list[str] = []
    for index, (text, width) in enumerate(zip(texts, WIDTHS, strict=True)):
        cut = clip(text, width)
        aligned.append(cut.ljust(width) if index < 2 else cut.rjust(width))
    return aligned


def flow(shown: Snapshot, *, names: Names = DEFAULT) -> str:
    """How much work is at each place, in the order it passes through."""
    known = [(figure, total(shown, figure.metric)) for figure in names.flow]
    told = [_told(figure, value) for figure, value in known if value is not None]
    return " ▸ ".join(told) or "nothing yet"


def network(shown: Snapshot, *, names: Names = DEFAULT) -> str:
    """The phase of the network and its figures; empty for a run without one."""
    known = [(figure, total(shown, figure.metric)) for figure in names.network]
    told = ", ".join(_told(figure, value) for figure, value in known if value is not None)
    everywhere = {name for actor in shown["actors"] for name in actor["metrics"]} | set(shown["metrics"])
    phases = sorted(name for name in everywhere if name.startswith(names.network_phase) and total(shown, name))
    phase = f"{phases[0].removeprefix(names.network_phase)}: " if phases else ""
    down = " (electrical path only)" if total(shown, names.network_down) else ""
    return f"{phase}{told}{down}" if told else ""


def versions(shown: Snapshot, *, names: Names = DEFAULT) -> str:
    """The newest version and which actor has which."""
    if shown["version"] is None:
        return "none yet"
    held = [_version(actor, names) for actor in shown["actors"] if names.version in actor["metrics"]]
    return f"v{shown['version']}{': ' if held else ''}{', '.join(held)}"


def _version(actor: ActorView, names: Names) -> str:
    told, pulled = f"{actor['name']} v{actor['metrics'][names.version]:.0f}", actor["metrics"].get(names.pulled, 1.0)
    return told if pulled >= 1.0 else f"{told} {bar(pulled)} {pulled:.0%}"


def failures(shown: Snapshot, names: Names = DEFAULT) -> dict[str, float]:
    """Totals over the live actors of every counter that tells of something going wrong, by name."""
    found: dict[str, float] = {}
    for actor in shown["actors"]:
        for name, value in actor["metrics"].items():
            if name.startswith(names.failures):
                found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items()))


def failure_lines(
    shown: Snapshot, before: Mapping[str, float] | None = None, over_s: float = 0.0, names: Names = DEFAULT
) -> list[str]:
    """`reward/failed/timeout 12 (0.4/s)`: rates where totals from `over_s` seconds ago are given."""
    lines: list[str] = []
    for name, now in failures(shown, names).items():
        rate = f" ({(now - before.get(name, 0.0)) / over_s:.1f}/s)" if before is not None and over_s > 0 else ""
        lines.append(f"{name} {now:,.0f}{rate}")
    return lines


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """`▒▒▒▒░░░░░`."""
    full = int(max(0.0, min(1.0, share)) * width)
    return "▒" * full + "░" * (width - full)


def wait_lines(shown: Snapshot) -> list[str]:
    """The oldest wait of each actor, oldest first; of a run that can't be reached, why."""
    if shown["trouble"]:
        return [shown["trouble"]]
    oldest: dict[str, str] = {}
    for wait in shown["waits"]:
        detail = f": {wait['detail']}" if wait["detail"] else ""
        oldest.setdefault(wait["actor"], f"{wait['actor']} {seconds(wait['age_s'])} for {wait['what']}{detail}")
    return list(oldest.values())[:MAX_WAITS] or ["nothing waits"]


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks, each the mean of its share of `values`, between their lowest and highest."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[int((mean - low) / span * (len(BLOCKS) - 1) + 0.5) if span else 0] for mean in means)


def short(value: float) -> str:
    """`410`, `5.9k`, `1.2M`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def clock(value_s: float) -> str:
    """`0:52`, `1:04:09`."""
    minutes, rest = divmod(int(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clip(text: str, width: int) -> str:
    """`text` in at most `width` columns; an ellipsis marks what was cut."""
    return text if len(text) <= width else text[: width - 1] + "…"


def _hung(label: str, text: str, width: int) -> list[str]:
    """`text` under a label column, its further lines below its start."""
    return textwrap.wrap(text, width, initial_indent=f"{label:<9}", subsequent_indent=" " * 11, break_long_words=False)


def _told(figure: Shown, value: float) -> str:
    return f"{figure.label} {value:{figure.spec}}"


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

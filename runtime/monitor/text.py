"""Writes a snapshot as plain text: the lines of `--once`, the panels and pages of the live view, and what waits for what (`--why`).

The last is one line per blocked stage, then each wait followed to the actor that holds it up, as an indented tree.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rubato.runtime.monitor.blocked import Processes, distance, seconds
from rubato.runtime.monitor.crews import ALIKE, COLUMNS, PULLED, actor_lines, cells, clip, crowd
from rubato.runtime.monitor.lines import Shown, advice, engines, labelled, lengths, network, pools, totals
from rubato.runtime.monitor.snapshot import VERSION, Row, total
from rubato.runtime.monitor.views import ActorView, BlockedRow, Snapshot, WaitRow
from rubato.runtime.observe.figures import CLUSTER_STORE, OTHER_JOB, STORE
from rubato.runtime.registry import role_of

TREND = Shown("reward", "reward/mean")
"""Drawn as a sparkline."""

HEADLINE = (
    Shown("eval", "eval/reward"),
    Shown("entropy", "policy/entropy"),
    Shown("kl", "policy/kl", ".3f"),
    Shown("clip", "policy/clip_frac", ".1%"),
    Shown("grad", "optim/grad_norm"),
    Shown("tok/s", "perf/gen_tokens_s", ",.0f"),
)
"""Newest value each, in order of interest: the last ones fall off a narrow screen."""

FLOW = (
    Shown("in flight", "rollout/in_flight", ",.0f"),
    Shown("generating", "proxy/in_flight", ",.0f"),
    Shown("held", "queue/held/depth", ",.0f"),
    Shown("ready", "queue/ready/depth", ",.0f"),
    Shown("bound", "queue/bound/depth", ",.0f"),
    Shown("trained", "samples/trained", ",.0f"),
)
"""Summed over live actors, in the order in which work passes through."""

FAILURES = ("reward/failed/", "rollout/error/", "bus/refused/")
"""Counters whose names begin so tell what goes wrong, the reason at the end; shown as totals and rates."""

BLOCKS = "▁▂▃▄▅▆▇█"

MAX_WAITS = 8
BAR_WIDTH = 9


def once(shown: Snapshot, rows: Sequence[Row], *, width: int = 80) -> str:
    """The whole picture as lines of at most `width` columns."""
    parts = [head(shown, rows), trend(shown, rows, width), ""]
    if shown["actors"]:
        head_of_pool = "  pool" if any(actor["pool"] for actor in shown["actors"]) else ""
        parts += [" ".join(cells(COLUMNS)) + head_of_pool]
        parts += [*actor_lines(shown["actors"]), ""]
    parts += [*_hung("pools", pools(shown), width), *_hung("engines", engines(shown), width)]
    parts += [*_hung("flow", flow(shown), width), *_hung("weights", versions(shown), width)]
    parts += _hung("trained", lengths(shown), width)
    parts += _hung("fabric", network(shown), width)
    parts += _hung("advice", advice(shown), width)
    for index, line in enumerate(failure_lines(shown)):
        parts += _hung("" if index else "failed", line, width)
    for index, line in enumerate(wait_lines(shown)):
        parts += _hung("" if index else "waits", line, width)
    for index, line in enumerate(shown["notices"]):
        parts += _hung("" if index else "told", line, width)
    return "\n".join(clip(line, width) for line in parts)


def head(shown: Snapshot, rows: Sequence[Row]) -> str:
    """Run, step, time, age against its bound, how much was dropped, whether times are paced, and whether it still runs."""
    steps = f"/{shown['steps']}" if shown["steps"] is not None else ""
    parts = [shown["run"], f"step {shown['step']}{steps}", clock(shown["elapsed_s"])]
    if shown["alpha"] is not None:
        age = shown["metrics"].get("staleness/max", 0.0)
        parts.append(f"age {age:.0f} ≤ α {shown['alpha']:g}" if shown["alpha"] >= 0 else f"age {age:.0f}, unbounded")
    parts.append(f"{sum(row.get('staleness/dropped', 0.0) for row in rows):,.0f} dropped")
    if total(shown, "paced/engines"):
        parts.append("paced")
    told = {"running": "", "ended": "run ended", "unreachable": "can't be reached"}[shown["state"]]
    return " ── ".join([*parts, told] if told else parts)


def trend(shown: Snapshot, rows: Sequence[Row], width: int) -> str:
    """The sparkline and as many newest figures as fit."""
    values = [row[TREND.metric] for row in rows if TREND.metric in row]
    line = f"{TREND.label} {sparkline(values, 16)} {values[-1]:{TREND.spec}}" if values else "no step yet"
    for figure in HEADLINE:
        if figure.metric in shown["metrics"]:
            told = f"   {labelled(figure, shown['metrics'][figure.metric])}"
            line += told if len(line) + len(told) <= width else ""
    return line


def flow(shown: Snapshot) -> str:
    """How much work is at each place, in the order it passes through."""
    return " ▸ ".join(totals(shown, FLOW)) or "nothing yet"


def versions(shown: Snapshot) -> str:
    """The newest version and which actor has which."""
    if shown["version"] is None:
        return "none yet"
    held: dict[str, list[str]] = {}
    for actor in shown["actors"]:
        if VERSION in actor["metrics"]:
            pulled = actor["metrics"].get(PULLED, 1.0)
            under_way = f" {bar(pulled)} {pulled:.0%}" if pulled < 1.0 else ""
            held.setdefault(f"v{actor['metrics'][VERSION]:.0f}{under_way}", []).append(actor["name"])
    told = [f"{who} {version}" for version, names in held.items() for who in crowd(names)]
    return f"v{shown['version']}{': ' if told else ''}{', '.join(told)}"


def failures(shown: Snapshot) -> dict[str, float]:
    """Totals over the live actors of every counter that tells of something going wrong, by name."""
    found: dict[str, float] = {}
    for actor in shown["actors"]:
        for name, value in actor["metrics"].items():
            if name.startswith(FAILURES):
                found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items()))


def failure_lines(shown: Snapshot, before: Mapping[str, float] | None = None, over_s: float = 0.0) -> list[str]:
    """`reward/failed/timeout 12 (0.4/s)`: rates where totals from `over_s` seconds ago are given."""
    lines: list[str] = []
    for name, now in failures(shown).items():
        rate = f" ({(now - before.get(name, 0.0)) / over_s:.1f}/s)" if before is not None and over_s > 0 else ""
        lines.append(f"{name} {now:,.0f}{rate}")
    return lines


def bar(share: float) -> str:
    """`▒▒▒▒░░░░░`."""
    full = int(max(0.0, min(1.0, share)) * BAR_WIDTH)
    return "▒" * full + "░" * (BAR_WIDTH - full)


def wait_lines(shown: Snapshot) -> list[str]:
    """The oldest wait of each actor, oldest first; of a run that can't be reached, why."""
    if shown["trouble"]:
        return [shown["trouble"]]
    oldest: dict[str, str] = {}
    for wait in shown["waits"]:
        detail = f": {wait.detail}" if wait.detail else ""
        oldest.setdefault(wait.actor, f"{wait.actor} {seconds(wait.age_s)} for {wait.what}{detail}")
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


def clock(value_s: float) -> str:
    """`0:52`, `1:04:09`."""
    minutes, rest = divmod(int(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _hung(label: str, text: str, width: int) -> list[str]:
    """`text` under a label column, its further lines below its start."""
    return textwrap.wrap(text, width, initial_indent=f"{label:<9}", subsequent_indent=" " * 11, break_long_words=False)


HELP = """\
q quit          a actors (back to the overview; Esc too)
s samples       what the model wrote, turn by turn, and what became of it
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


def flow_panel(shown: Snapshot, failed: Sequence[str] = ()) -> str:
    """One place per line, then the weight versions and what fails: narrow enough for half a screen."""
    lines = [flow(shown).replace(" ▸ ", "\n  ▸ "), f"weights {versions(shown)}"]
    named = {"pools": pools(shown), "engines": engines(shown), "fabric": network(shown), "advice": advice(shown)}
    return "\n".join([*lines, *(f"{label} {line}" for label, line in named.items() if line), *failed])


def flow_page(shown: Snapshot, failed: Sequence[str] = ()) -> str:
    """The whole page: flow, weight versions, queues, what fails and how often."""
    queues = [f"  {name:<16}{depth:>10,.0f}" for name, depth in shown["queues"].items()] or ["  none yet"]
    lines = [flow_panel(shown), "", "queues", *queues, "", "trained", f"  {lengths(shown) or 'nothing yet'}", "", "failures"]
    return "\n".join([*lines, *(f"  {line}" for line in failed or ["none"])])


def in_flight_page(shown: Snapshot, selected: str) -> str:
    """What the actor has in hand: how much is in each stage, then each request."""
    stages = [row for actor in shown["actors"] if actor["name"] == selected for row in actor["stages"] if row.num]
    waits = [wait for wait in shown["waits"] if wait.actor == selected]
    lines = [f"{selected}: {'stage':<14}{'holder':<18}{'now':>5}{'mean':>7}{'longest':>10}"]
    lines += [
        f"  {row.stage:<24}{row.holder or '-':<18}{row.num:>5}{row.load:>7.1f}{max(0.0, row.longest_s):>8.2f} s"
        for row in sorted(stages, key=lambda row: -row.num)
    ]
    lines += ["", "oldest first"]
    lines += [
        f"  {seconds(wait.age_s):>10}  {wait.stage} {wait.what}"
        + (f" at {wait.holder}" if wait.holder else "")
        + (f": {wait.detail}" if wait.detail else "")
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


# -- what waits for what -------------------------------------------------------------------------------------

MAX_HOLDERS = 4
"""Instances shown of a role that holds something up: enough to see a pattern, few enough for one screen."""


class Cause(NamedTuple):
    """One line of the tree: `depth` 0 is an actor that waits, deeper ones say why; `limit` ends the wait, where one is set."""

    depth: int
    text: str
    limit: str = ""


def explain(shown: Snapshot) -> list[Cause]:
    """Each waiting actor with its oldest wait, below it the holder's own wait, and so on; each actor is followed once."""
    tree, roots = _Tree(shown), Counter[str]()
    for actor in tree.roots():
        if actor not in tree.seen:
            role = role_of(actor)
            roots[role] += 1
            if roots[role] <= ALIKE:
                tree.follow(actor, None, ())
    tree.lines += (Cause(0, f"and {num - ALIKE} more {role} wait") for role, num in roots.items() if num > ALIKE)
    return tree.lines


def render(shown: Snapshot, width: int = 80) -> str:
    """Blocked stages, then the tree, as text of at most `width` columns; the last line names who does not wait at all."""
    if shown["state"] == "ended":
        return f"{shown['run']} has ended: nothing runs, so nothing waits"
    trouble = f"{shown['run']}: {shown['trouble']}" if shown["trouble"] else ""
    said = textwrap.wrap(trouble, width, break_long_words=False, break_on_hyphens=False)
    if shown["state"] == "unreachable":
        return "\n".join(said)
    if not shown["actors"]:
        return "\n".join(said) or f"{shown['run']} has no live actors yet: nothing waits"
    lines = [*said, ""] if said else []
    lines += [line for row in shown["blocked"] for line in _wrapped(Cause(0, blocked_line(row), row["limit"]), width)]
    lines += [""] if shown["blocked"] else []
    for cause in explain(shown):
        lines += _wrapped(cause, width)
    waiting = {wait.actor for wait in shown["waits"]}
    calm = [actor["name"] for actor in shown["actors"] if actor["name"] not in waiting]
    if calm:
        lines += textwrap.wrap(f"{', '.join(crowd(calm))}: nothing waits", width, break_long_words=False)
    return "\n".join(lines)


def blocked_line(row: BlockedRow) -> str:
    """`trainer-1 waits 41.0 s for batch 41: 7 of 32 groups; env_manager-2 is stalled: no progress in env.step …`, without the limit."""
    if row["stage"] == "process":
        since = f" for {seconds(row['age_s'])}" if row["age_s"] else ""
        return f"{row['holder']} is {row['kind']}{since}: {row['reason']}"
    stage = "" if row["stage"] in row["what"] else row["stage"]
    told = ", ".join(text for text in (stage, row["detail"]) if text)
    waits = f"{row['actor']} waits {seconds(row['age_s'])} for {row['what']}{': ' if told else ''}{told}"
    return f"{waits}; {row['holder']} is {row['kind']}: {row['reason']}"


NO_ACTORS = {STORE: "the run's Store", CLUSTER_STORE: "it does not answer", OTHER_JOB: ""}
"""Holders that are no actors, and what is said of them."""


class _Tree:
    """The walk over one snapshot."""

    def __init__(self, shown: Snapshot) -> None:
        self.lines: list[Cause] = []
        self.seen: set[str] = set()
        self._actors = {actor["name"]: actor for actor in shown["actors"]}
        self._processes = Processes(shown["actors"], shown["waits"])
        self._waits: dict[str, list[WaitRow]] = {}
        for wait in shown["waits"]:
            self._waits.setdefault(wait.actor, []).append(wait)

    def roots(self) -> list[str]:
        """Waiting actors, oldest wait first; those that hold up no other come before those that do."""
        held_up_by = {name for waits in self._waits.values() for wait in waits for name in self._instances(wait.holder)}
        oldest = {name: max(wait.age_s for wait in waits) for name, waits in self._waits.items()}
        return sorted(self._waits, key=lambda name: (name in held_up_by, -oldest[name], name))

    def follow(self, name: str, parent: WaitRow | None, path: tuple[WaitRow, ...]) -> None:
        """Write the line of `name`, then those of the actors that hold up the wait it shows."""
        depth = len(path)
        waits = [wait for wait in self._waits.get(name, []) if wait not in path]
        if above := [wait for wait in path if wait.actor == name]:
            itself = above[-1] is parent
            waits = [wait for wait in waits if parent is not None and distance(wait, parent) < 2] or [
                wait for wait in waits if itself and wait.stage != above[-1].stage and not self._asks_for_work(wait)
            ]
            if not waits:
                # Who asks for more work is not held up by what it has in hand, nor is who waits for another stage of its own.
                asks = itself or any(self._asks_for_work(wait) for wait in above)
                self.lines.append(Cause(depth, f"{name}, which waits above: {'it has work in hand' if asks else 'a circle'}"))
                return
        if not waits:
            self.lines.append(Cause(depth, _at_work(self._actors[name])))
            return
        wait = min(waits, key=lambda found: self._rank(found, parent, (*(w.actor for w in path), name)))
        more = f" (and {len(waits) - 1} more)" if len(waits) > 1 else ""
        again = name in self.seen
        self.seen.add(name)
        self.lines.append(Cause(depth, f"{name} {self._described(wait)}{more}", wait.limit))
        if again or not wait.holder:
            return
        holders = self._instances(wait.holder)
        for holder in holders[:MAX_HOLDERS]:
            self.follow(holder, wait, (*path, wait))
        if not holders:
            self.lines += (Cause(depth + 1, text) for text in self._missing(wait.holder))
        if len(holders) > MAX_HOLDERS:
            self.lines.append(Cause(depth + 1, f"and {len(holders) - MAX_HOLDERS} more"))

    def _missing(self, holder: str) -> list[str]:
        """Of a holder that is not registered: what is known of it."""
        if holder in NO_ACTORS:
            return [NO_ACTORS[holder]] if NO_ACTORS[holder] else []
        found = {name: self._processes.unfit(name) for name in self._processes.instances(holder)}
        known = [f"{name} is {health.kind}: {health.reason}" for name, health in found.items() if health is not None]
        return known or [f"{holder}: no such actor is up"]

    def _asks_for_work(self, wait: WaitRow) -> bool:
        """Whether the stage of `wait` is one in which its actor asks for more work."""
        stages = self._actors[wait.actor]["stages"]
        return any(s.idle for s in stages if (s.stage, s.holder) == (wait.stage, wait.holder))

    def _instances(self, holder: str) -> list[str]:
        """The actor of that name, or all of that role: the ones that wait longest first."""
        if holder in self._actors:
            return [holder]
        found = [name for name, actor in self._actors.items() if actor["role"] == holder]
        return sorted(found, key=lambda name: (-max((w.age_s for w in self._waits.get(name, [])), default=-1.0), name))

    def _rank(self, wait: WaitRow, parent: WaitRow | None, path: Sequence[str]) -> tuple[bool, int, bool, float]:
        """Lowest first: a holder that is known, then the same thing that is waited for above, then what the line above names, then what
        leads on, then age. An actor that left is unknown at once, and named for up to a beat longer by records that stand from before."""
        holder = wait.holder
        unknown = bool(holder) and holder not in NO_ACTORS and not self._processes.instances(holder)
        back = any(name in path for name in self._instances(holder))
        return unknown, distance(wait, parent), back, -wait.age_s

    def _described(self, wait: WaitRow) -> str:
        stage, detail = wait.stage, wait.detail
        usual = self._actors[wait.actor]["metrics"].get(f"{stage.replace('.', '/')}_s_p99")
        usual_text = f" (p99 {seconds(usual)})" if usual is not None else ""
        told = ", ".join(text for text in ("" if stage in wait.what else stage, detail) if text)
        return f"waits {seconds(wait.age_s)} for {wait.what}{': ' if told else ''}{told}{usual_text}"


def _at_work(actor: ActorView) -> str:
    figures = f"mailbox {actor['mailbox']}, {actor['rate_s']:.0f} messages/s, idle {actor['idle']:.0%}"
    return f"{actor['name']} waits for nothing: {actor['state']}, {figures}"


def _wrapped(cause: Cause, width: int) -> list[str]:
    """The line with its limit at the right edge where both fit, else below; long text hangs under its own start."""
    first = "  " * (cause.depth - 1) + "  └ " if cause.depth else ""
    lines = textwrap.wrap(cause.text, width, initial_indent=first, subsequent_indent=" " * (len(first) + 2), break_long_words=False)
    if cause.limit:
        limit = f"limit {cause.limit.replace('=', ' = ')}"
        if len(lines[-1]) + 2 + len(limit) <= width:
            lines[-1] += limit.rjust(width - len(lines[-1]))
        else:
            lines.append(limit.rjust(width))
    return lines

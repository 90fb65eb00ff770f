"""Writes what waits for what: one line per blocked stage, then each wait followed to whoever holds it up, as an indented tree."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from runtime.monitor.blocked import distance, seconds
from runtime.monitor.views import ActorView, BlockedRow, Snapshot, WaitRow

MAX_HOLDERS = 4
"""Instances shown of a role that holds something up: enough to see a pattern, few enough for one screen."""


class Cause(NamedTuple):
    """One line of the tree: `depth` 0 is an actor that waits, deeper ones say why; `limit` ends the wait, where one is set."""

    depth: int
    text: str
    limit: str = ""


def explain(shown: Snapshot) -> list[Cause]:
    """Each waiting actor with its oldest wait, below it the holder's own wait, and so on; each actor is followed once."""
    tree = _Tree(shown)
    for actor in tree.roots():
        if actor not in tree.seen:
            tree.follow(actor, None, ())
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
        lines += textwrap.wrap(f"{', '.join(calm)}: nothing waits", width, break_long_words=False)
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


class _Tree:
    """The walk over one snapshot."""

    def __init__(self, shown: Snapshot) -> None:
        self.lines: list[Cause] = []
        self.seen: set[str] = set()
        self._actors = {actor["name"]: actor for actor in shown["actors"]}
        self._waits: dict[str, list[WaitRow]] = {}
        for wait in shown["waits"]:
            self._waits.setdefault(wait.actor, []).append(wait)

    def roots(self) -> list[str]:
        """Waiting actors, oldest wait first; those that hold nobody else up come before those that do."""
        held_up_by = {name for waits in self._waits.values() for wait in waits for name in self._instances(wait.holder)}
        oldest = {name: max(wait.age_s for wait in waits) for name, waits in self._waits.items()}
        return sorted(self._waits, key=lambda name: (name in held_up_by, -oldest[name], name))

    def follow(self, name: str, parent: WaitRow | None, path: tuple[str, ...]) -> None:
        """Write the line of `name`, then those of whoever holds up the wait it shows."""
        depth = len(path)
        if name in path:
            self.lines.append(Cause(depth, f"{name}, which waits above: a circle"))
            return
        waits = self._waits.get(name, [])
        if not waits:
            self.lines.append(Cause(depth, _at_work(self._actors[name])))
            return
        wait = min(waits, key=lambda found: self._rank(found, parent, (*path, name)))
        more = f" (and {len(waits) - 1} more)" if len(waits) > 1 else ""
        again = name in self.seen
        self.seen.add(name)
        self.lines.append(Cause(depth, f"{name} {self._told(wait)}{more}", wait.limit))
        if again or not wait.holder:
            return
        holders = self._instances(wait.holder)
        for holder in holders[:MAX_HOLDERS]:
            self.follow(holder, wait, (*path, name))
        if not holders:
            self.lines.append(Cause(depth + 1, f"{wait.holder}: no such actor is up"))
        if len(holders) > MAX_HOLDERS:
            self.lines.append(Cause(depth + 1, f"and {len(holders) - MAX_HOLDERS} more"))

    def _instances(self, holder: str) -> list[str]:
        """The actor of that name, or all of that role: the ones that wait longest first."""
        if holder in self._actors:
            return [holder]
        found = [name for name, actor in self._actors.items() if actor["role"] == holder]
        return sorted(found, key=lambda name: (-max((w.age_s for w in self._waits.get(name, [])), default=-1.0), name))

    def _rank(self, wait: WaitRow, parent: WaitRow | None, path: Sequence[str]) -> tuple[int, bool, float]:
        """Lowest first: the same thing that is waited for above, then what the line above names, then what leads on, then age."""
        back = any(name in path for name in self._instances(wait.holder))
        return distance(wait, parent), back, -wait.age_s

    def _told(self, wait: WaitRow) -> str:
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
    lines = textwrap.wrap(
        cause.text, width, initial_indent=first, subsequent_indent=" " * (len(first) + 2), break_long_words=False
    )
    if cause.limit:
        limit = f"limit {cause.limit.replace('=', ' = ')}"
        if len(lines[-1]) + 2 + len(limit) <= width:
            lines[-1] += limit.rjust(width - len(lines[-1]))
        else:
            lines.append(limit.rjust(width))
    return lines

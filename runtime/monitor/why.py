"""Follows each wait to whoever holds it up, and writes what it finds as an indented tree."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runtime.monitor.snapshot import ActorView, Snapshot, WaitRow

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
    """The tree as text of at most `width` columns; the last line names who does not wait at all."""
    if shown["state"] == "ended":
        return f"{shown['run']} has ended: nothing runs, so nothing waits"
    if not shown["actors"]:
        return f"{shown['run']} has no live actors yet: nothing waits"
    lines: list[str] = []
    for cause in explain(shown):
        lines += _wrapped(cause, width)
    waiting = {wait["actor"] for wait in shown["waits"]}
    calm = [actor["name"] for actor in shown["actors"] if actor["name"] not in waiting]
    if calm:
        lines += textwrap.wrap(f"{', '.join(calm)}: nothing waits", width, break_long_words=False)
    return "\n".join(lines)


class _Tree:
    """The walk over one snapshot."""

    def __init__(self, shown: Snapshot) -> None:
        self.lines: list[Cause] = []
        self.seen: set[str] = set()
        self._actors = {actor["name"]: actor for actor in shown["actors"]}
        self._waits: dict[str, list[WaitRow]] = {}
        for wait in shown["waits"]:
            self._waits.setdefault(wait["actor"], []).append(wait)

    def roots(self) -> list[str]:
        """Waiting actors, oldest wait first; those that hold nobody else up come before those that do."""
        held_up_by = {
            name for waits in self._waits.values() for wait in waits for name in self._instances(wait["holder"])
        }
        oldest = {name: max(wait["age_s"] for wait in waits) for name, waits in self._waits.items()}
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
        self.lines.append(Cause(depth, f"{name} {self._told(wait)}{more}", wait["limit"]))
        if again or not wait["holder"]:
            return
        holders = self._instances(wait["holder"])
        for holder in holders[:MAX_HOLDERS]:
            self.follow(holder, wait, (*path, name))
        if not holders:
            self.lines.append(Cause(depth + 1, f"{wait['holder']}: no such actor is up"))
        if len(holders) > MAX_HOLDERS:
            self.lines.append(Cause(depth + 1, f"and {len(holders) - MAX_HOLDERS} more"))

    def _instances(self, holder: str) -> list[str]:
        """The actor of that name, or all of that role: the ones that wait longest first."""
        if holder in self._actors:
            return [holder]
        found = [name for name, actor in self._actors.items() if actor["role"] == holder]
        return sorted(
            found, key=lambda name: (-max((w["age_s"] for w in self._waits.get(name, [])), default=-1.0), name)
        )

    def _rank(self, wait: WaitRow, parent: WaitRow | None, path: Sequence[str]) -> tuple[int, bool, float]:
        """Lowest first: the same thing that is waited for above, then what the line above names, then what leads on, then age."""
        back = any(name in path for name in self._instances(wait["holder"]))
        return _distance(wait, parent), back, -wait["age_s"]

    def _told(self, wait: WaitRow) -> str:
        detail = wait["detail"]
        usual = self._actors[wait["actor"]]["metrics"].get(f"{detail.replace('.', '/')}_s_p99") if detail else None
        usual_text = f" (p99 {seconds(usual)})" if usual is not None else ""
        return f"waits {seconds(wait['age_s'])} for {wait['what']}{': ' if detail else ''}{detail}{usual_text}"


def seconds(value: float) -> str:
    """A duration for a person: `0.4 s`, `12.4 s`, `3 min 20 s`."""
    if value < 100.0:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest} s"


def _distance(wait: WaitRow, parent: WaitRow | None) -> int:
    if parent is None:
        return 0
    if wait["what"] == parent["what"]:
        return 0
    return 1 if any(_belongs(wait["what"], word) for word in _identifiers(parent)) else 2


def _belongs(what: str, word: str) -> bool:
    """Whether `what` is `word` or a part of it, as in t10460 of `t10460.2`."""
    return what == word or (what.startswith(word) and not what[len(word)].isalnum())


def _identifiers(wait: WaitRow) -> Iterable[str]:
    """Words that name one thing: with a letter and a digit."""
    for word in f"{wait['what']} {wait['detail']}".replace(";", " ").replace(",", " ").split():
        if any(c.isdigit() for c in word) and any(c.isalpha() for c in word):
            yield word


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

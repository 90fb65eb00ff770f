"""Switches and moves of an orchestrator whose job was under chaos, by its log: which were under way when a process was hit."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

BEGINS = {"switching": "switch", "rebalancing": "move"}
ENDS = {"switched": "switch", "switch_failed": "switch", "rebalanced": "move"}


class Spell(NamedTuple):
    """A change from its begin until it was over, or until an orchestrator began that followed the one which died in it; seconds since 1970."""

    what: str
    since: float
    until: float
    failed: bool


def under_way(folder: Path) -> bool:
    """Whether a switch has begun that is not over."""
    return any(spell.what == "switch" and spell.until == math.inf for spell in _all(folder))


def changes(folder: Path, hits: Sequence[float]) -> dict[str, int]:
    """Of the run in `folder`: changes that were begun, those that came to nothing, and how many of `hits` fell into one."""
    found = list(_all(folder))
    within = {what: sum(any(s.what == what and s.since <= t <= s.until for s in found) for t in hits) for what in ("switch", "move")}
    return {
        "switches": sum(spell.what == "switch" for spell in found),
        "moves": sum(spell.what == "move" for spell in found),
        "failed": sum(spell.failed for spell in found),
        "in_switch": within["switch"],
        "in_move": within["move"],
    }


def _all(folder: Path) -> Iterator[Spell]:
    for log in sorted((folder / "logs").glob("orchestrator-*.jsonl")):
        yield from spells(log)


def spells(log: Path) -> Iterator[Spell]:
    """Of one orchestrator's log, all its lives."""
    open_: dict[tuple[str, str], float] = {}
    life = None
    for line in log.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):  # it is being written, or its writer died
            continue
        row: dict[str, Any] = json.loads(line)
        at = datetime.fromisoformat(row["t"]).timestamp()
        if row.get("incarnation", life) != life:
            life = row["incarnation"]
            yield from (Spell(what, since, at, True) for (what, _), since in open_.items())
            open_.clear()
        if what := BEGINS.get(row["event"]):
            open_[what, row.get("switch", "")] = at
        elif (what := ENDS.get(row["event"])) and (since := open_.pop((what, row.get("switch", "")), None)) is not None:
            yield Spell(what, since, at, row["event"] == "switch_failed")
    yield from (Spell(what, since, math.inf, True) for (what, _), since in open_.items())

"""Checks what a finished run wrote against what is promised of it: every sample one fate, every step whole, no age over the bound."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from actors.samples.sample import group_id, split_id, trajectory_id

SHOWN = 3
"""Ids named per problem."""


class Expected(NamedTuple):
    """The numbers of the config that a run is held against; `alpha` -1 is unbounded."""

    steps: int
    batch_groups: int
    group_size: int
    alpha: int


class Audit(NamedTuple):
    """`samples` is how many have a fate, `fates` how many have which; `problems` is empty where every promise was kept."""

    steps: int
    samples: int
    fates: dict[str, int]
    problems: list[str]


def audit(folder: Path, expected: Expected) -> Audit:
    """Read `metrics.jsonl` and `samples.jsonl` of the finished run in `folder`."""
    rows = [row["step"] for row in _lines(folder / "metrics.jsonl")]
    ledger = _lines(folder / "samples.jsonl")
    problems = _steps(rows, expected) + _samples(ledger, expected) + _trained(ledger, expected)
    return Audit(len(rows), len(ledger), dict(Counter(line["fate"] for line in ledger)), problems)


def _steps(rows: list[int], expected: Expected) -> list[str]:
    if rows == list(range(1, expected.steps + 1)):
        return []
    breaks = [step for before, step in zip([0, *rows], rows, strict=False) if step != before + 1]
    return [f"metrics.jsonl has {len(rows)} rows for {expected.steps} steps{_some('breaks at', breaks)}"]


def _samples(ledger: list[dict[str, Any]], expected: Expected) -> list[str]:
    """Every member of every group that was ever opened ends exactly once: none is missing, so none that was acknowledged is."""
    seen = Counter(line["trajectory_id"] for line in ledger)
    opened = 1 + max((int(split_id(name)[0][1:]) for name in seen), default=-1)
    wanted = [trajectory_id(group_id(g), m) for g in range(opened) for m in range(expected.group_size)]
    missing = [name for name in wanted if name not in seen]
    twice = [name for name, times in seen.items() if times > 1]
    unknown = sorted(set(seen) - set(wanted))
    return [
        f"{len(found)} samples {what}{_some('', found)}"
        for what, found in (("have no fate", missing), ("have two fates", twice), ("were never issued", unknown))
        if found
    ]


def _trained(ledger: list[dict[str, Any]], expected: Expected) -> list[str]:
    problems: list[str] = []
    trained = [line for line in ledger if line["step"] is not None]
    steps_of: dict[str, set[int]] = {}
    for line in trained:
        steps_of.setdefault(line["group_id"], set()).add(line["step"])
    if split := [group for group, steps in steps_of.items() if len(steps) > 1]:
        problems.append(f"{len(split)} groups are spread over several steps{_some('', split)}")
    sizes = Counter(step for steps in steps_of.values() for step in steps)
    wrong = [step for step in range(1, expected.steps + 1) if sizes[step] != expected.batch_groups]
    if wrong or set(sizes) - set(range(1, expected.steps + 1)):
        problems.append(f"{len(wrong)} steps did not train {expected.batch_groups} groups{_some('', wrong)}")
    if expected.alpha >= 0 and (old := [x["trajectory_id"] for x in trained if x["age"] > expected.alpha]):
        problems.append(f"{len(old)} samples were trained beyond the bound of {expected.alpha}{_some('', old)}")
    return problems


def _some(what: str, found: list[Any]) -> str:
    if not found:
        return ""
    named = ", ".join(map(str, found[:SHOWN])) + (" …" if len(found) > SHOWN else "")
    return f" ({what} {named})" if what else f" ({named})"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

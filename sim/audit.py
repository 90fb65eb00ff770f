"""Checks what a finished run wrote against what is promised of it: every sample one fate, every step whole, no age over the bound, and
every sampled token accounted for.

A Store that lost its state shows in what was written before: lines of samples.jsonl that it no longer knew, which the buffer moved to
samples.lost.jsonl, and steps or terms that go backwards.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rubato.actors.samples.run_files import LOST, SAMPLES, read_lines
from rubato.actors.samples.sample import TRAINED, group_id, split_id, trajectory_id

SHOWN = 3
"""Ids named per problem."""


class AuditLimits(NamedTuple):
    """The numbers of the config that a run is held against; `alpha` -1 is unbounded. `durable`: the Store may forget nothing at all."""

    steps: int
    batch_groups: int
    group_size: int
    alpha: int
    durable: bool = False


class Audit(NamedTuple):
    """`samples` is how many have a fate, `fates` how many have which; `problems` is empty where every promise was kept."""

    steps: int
    samples: int
    fates: dict[str, int]
    problems: list[str]


def audit(folder: Path, expected: AuditLimits) -> Audit:
    """Read `metrics.jsonl`, `samples.jsonl` and, where there is one, `samples.lost.jsonl` of the finished run in `folder`."""
    metrics = _lines(folder / "metrics.jsonl")
    rows = [row["step"] for row in metrics]
    ledger, lost = ([json.loads(line) for line in read_lines(folder, stem)] for stem in (SAMPLES, LOST))
    problems = _steps(rows, expected) + _samples(ledger, expected) + _trained(ledger, expected)
    problems += _forgotten(ledger, lost, expected) + _tokens(metrics, ledger)
    return Audit(len(rows), len(ledger), dict(Counter(line["fate"] for line in ledger)), problems)


def _steps(rows: list[int], expected: AuditLimits) -> list[str]:
    if rows == list(range(1, expected.steps + 1)):
        return []
    breaks = [step for before, step in zip([0, *rows], rows, strict=False) if step != before + 1]
    return [f"metrics.jsonl has {len(rows)} rows for {expected.steps} steps{_some('breaks at', breaks)}"]


def _samples(ledger: list[dict[str, Any]], expected: AuditLimits) -> list[str]:
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


def _trained(ledger: list[dict[str, Any]], expected: AuditLimits) -> list[str]:
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


def _forgotten(ledger: list[dict[str, Any]], lost: list[dict[str, Any]], expected: AuditLimits) -> list[str]:
    """What was trained stays trained, in its step, whatever a Store forgets: a commit that is forgotten is made again."""
    steps = {line["trajectory_id"]: line["step"] for line in ledger}
    gone = [x["trajectory_id"] for x in lost if x["step"] is not None and steps.get(x["trajectory_id"]) != x["step"]]
    problems = [f"{len(gone)} trained samples were forgotten by the Store{_some('', gone)}"] if gone else []
    if expected.durable and lost:
        problems.append(f"{len(lost)} ends were forgotten by a Store that keeps everything")
    if expected.durable and (missed := [line["trajectory_id"] for line in ledger if line["fate"] == "lost"]):
        problems.append(f"{len(missed)} samples were lost by a Store that keeps everything{_some('', missed)}")
    trained = [line for line in ledger if line["step"] is not None]
    for what in ("step", "epoch"):
        back = [later["trajectory_id"] for before, later in pairwise(trained) if later[what] < before[what]]
        if back:
            problems.append(f"the {what} goes backwards in samples.jsonl{_some('first at', back[:1])}")
    return problems


def _tokens(rows: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> list[str]:
    """In each row what was generated is held or has a fate; and what a row says was trained is so in the ledger, which may have more."""
    tokens = [{name: row[name] for name in row if name.startswith("tokens/")} for row in rows]
    odd = [row["step"] for row, of in zip(rows, tokens, strict=True) if 2 * of.get("tokens/generated", 0) != sum(of.values())]
    problems = [f"the tokens of {len(odd)} rows don't balance{_some('steps', odd)}"] if odd else []
    for fate in TRAINED:
        told = max((of.get(f"tokens/{fate}", 0) for of in tokens), default=0)
        if told > (known := sum(line.get("tokens", 0) for line in ledger if line["fate"] == fate)):
            problems.append(f"metrics.jsonl says that {told:.0f} tokens ended as {fate}, samples.jsonl knows of {known}")
    return problems


def _some(what: str, found: list[Any]) -> str:
    if not found:
        return ""
    named = ", ".join(map(str, found[:SHOWN])) + (" …" if len(found) > SHOWN else "")
    return f" ({what} {named})" if what else f" ({named})"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

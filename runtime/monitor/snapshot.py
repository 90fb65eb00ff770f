"""What a run looks like at one moment, as plain data: made from actor records, rows of metrics and the config, reading nothing."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from rubato.runtime.monitor.blocked import Diagnosis
from rubato.runtime.monitor.views import ActorView, RankRow, RunState, Snapshot, StageRow, WaitRow
from rubato.runtime.observe.figures import ITSELF, StageView, WaitView
from rubato.runtime.registry import ActorRecord

VERSION = "weights/version"
"""Metric of the whole run and of each actor that has it."""

QUEUE, DEPTH = "queue/", "/depth"
"""How the metric of a queue's depth begins and ends."""

Row = Mapping[str, float]


def snapshot(
    run: str,
    records: Sequence[ActorRecord],
    rows: Sequence[Row],
    config: dict[str, Any],
    *,
    state: RunState = "running",
    trouble: str = "",
    elapsed_s: float = 0.0,
    silent: Mapping[str, float] | None = None,
    notices: Sequence[str] = (),
    advice: Mapping[str, float] | None = None,
) -> Snapshot:
    """The run now. `rows` are the lines of metrics.jsonl, oldest first; `metrics` holds the newest value of each name in them.

    `silent` says how many seconds ago each record was written.
    """
    metrics: dict[str, float] = {}
    for row in rows:
        metrics.update(row)
    silent = silent or {}
    actors = [_actor(record, silent.get(record.name, 0.0)) for record in records]
    waits = [WaitRow(**_fields(view, record), actor=record.name) for record in records for view in record.waits]
    waits.sort(key=lambda wait: -wait.age_s)
    steps, alpha = lookup(config, "run.steps"), alpha_of(config)
    everywhere = [metrics, *(actor["metrics"] for actor in actors)]
    versions = [held[VERSION] for held in everywhere if VERSION in held]
    shown = Snapshot(
        run=run,
        state=state,
        trouble=trouble,
        step=int(rows[-1].get("step", 0)) if rows else 0,
        steps=None if steps is None else int(steps),
        alpha=-1 if alpha == -1 else metrics.get("staleness/alpha", alpha),
        version=int(max(versions)) if versions else None,
        elapsed_s=elapsed_s,
        actors=actors,
        queues={},
        waits=waits,
        blocked=Diagnosis(actors, waits).rows(),
        metrics=metrics,
        notices=list(notices),
        advice=dict(advice or {}),
    )
    for name in sorted({name for held in everywhere for name in held}):
        if name.startswith(QUEUE) and name.endswith(DEPTH):
            shown["queues"][name.removeprefix(QUEUE).removesuffix(DEPTH)] = total(shown, name) or 0.0
    return shown


def alpha_of(config: dict[str, Any]) -> float | None:
    """The bound that the config sets; -1 where it sets none, None where it adapts or the job has no such thing."""
    return -1 if _value(config, "staleness.bounded") is False else lookup(config, "staleness.alpha")


def lookup(config: dict[str, Any], key: str) -> float | None:
    """The number at the dotted `key`, or None where there is none."""
    found = _value(config, key)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _value(config: dict[str, Any], key: str) -> object:
    found: object = config
    for part in key.split("."):
        if not isinstance(found, dict):
            return None
        found = cast("dict[str, object]", found).get(part)
    return found


def total(shown: Snapshot, metric: str) -> float | None:
    """`metric` summed over the live actors that have it; else its newest value of the rows; None where neither has it."""
    found = [actor["metrics"][metric] for actor in shown["actors"] if metric in actor["metrics"]]
    return math.fsum(found) if found else shown["metrics"].get(metric)


def _actor(record: ActorRecord, silent_s: float) -> ActorView:
    shown = ActorView(
        name=record.name, role=record.role, pid=record.pid, host=record.host, state=record.state,
        incarnation=record.incarnation, mailbox=record.mailbox, rate_s=record.rate_s, idle=record.idle,
        silent_s=silent_s, metrics=record.metrics, stages=[StageRow(**_fields(view, record)) for view in record.stages],
        pool=record.pool, hardware=record.hardware,
    )  # fmt: skip
    if record.ranks:
        shown["ranks"] = [RankRow(**msgspec.structs.asdict(rank)) for rank in record.ranks]
    return shown


def _fields(view: StageView | WaitView, record: ActorRecord) -> dict[str, Any]:
    """An actor that waits for itself is named."""
    holder = record.name if view.holder == ITSELF else view.holder
    return msgspec.structs.asdict(view) | {"holder": holder}

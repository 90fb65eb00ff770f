"""What a run looks like at one moment, as plain data: made from actor records, rows of metrics and the config, reading nothing."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from runtime.monitor.blocked import diagnose
from runtime.monitor.names import DEFAULT, Names
from runtime.monitor.views import ActorView, RunState, Snapshot, StageRow, WaitRow
from runtime.observe.waits import ITSELF, WaitView
from runtime.registry import ActorRecord

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
    names: Names = DEFAULT,
) -> Snapshot:
    """The run now. `rows` are the lines of metrics.jsonl, oldest first; `metrics` holds the newest value of each name in them.

    `silent` says how many seconds ago each record was written.
    """
    metrics: dict[str, float] = {}
    for row in rows:
        metrics.update(row)
    silent = silent or {}
    actors = [_actor(record, silent.get(record.name, 0.0)) for record in records]
    waits = [_wait(record, view) for record in records for view in record.waits]
    waits.sort(key=lambda wait: -wait["age_s"])
    return Snapshot(
        run=run,
        state=state,
        trouble=trouble,
        step=int(rows[-1].get("step", 0)) if rows else 0,
        steps=_whole(lookup(config, names.steps)),
        alpha=lookup(config, names.bound),
        version=_whole(max(_values(actors, metrics, names.version), default=None)),
        elapsed_s=elapsed_s,
        actors=actors,
        queues=_queues(actors, metrics, names),
        waits=waits,
        blocked=diagnose(actors, waits),
        metrics=metrics,
    )


def lookup(config: dict[str, Any], key: str) -> float | None:
    """The number at the dotted `key`, or None where there is none."""
    found: object = config
    for part in key.split("."):
        if not isinstance(found, dict):
            return None
        found = cast("dict[str, object]", found).get(part)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def total(shown: Snapshot, metric: str) -> float | None:
    """`metric` summed over the live actors that have it; else its newest value of the rows; None where nobody knows it."""
    found = [actor["metrics"][metric] for actor in shown["actors"] if metric in actor["metrics"]]
    return math.fsum(found) if found else shown["metrics"].get(metric)


def _actor(record: ActorRecord, silent_s: float) -> ActorView:
    return ActorView(
        name=record.name,
        role=record.role,
        pid=record.pid,
        host=record.host,
        state=record.state,
        incarnation=record.incarnation,
        mailbox=record.mailbox,
        rate_s=record.rate_s,
        idle=record.idle,
        silent_s=silent_s,
        metrics=dict(record.metrics),
        stages=[
            StageRow(
                stage=view.stage,
                holder=_named(view.holder, record.name),
                num=view.num,
                load=view.load,
                longest_s=view.longest_s,
                idle=view.idle,
            )
            for view in record.stages
        ],
    )


def _wait(record: ActorRecord, view: WaitView) -> WaitRow:
    return WaitRow(
        actor=record.name,
        what=view.what,
        detail=view.detail,
        holder=_named(view.holder, record.name),
        age_s=view.age_s,
        limit=view.limit,
        stage=view.stage or view.what,
        quiet_s=view.quiet_s,
        whole=view.whole,
    )


def _named(holder: str, actor: str) -> str:
    return actor if holder == ITSELF else holder


def _values(actors: Sequence[ActorView], metrics: Row, name: str) -> list[float]:
    """What the actors and the rows say of `name`."""
    return [held[name] for held in (metrics, *(actor["metrics"] for actor in actors)) if name in held]


def _queues(actors: Sequence[ActorView], metrics: Row, names: Names) -> dict[str, float]:
    """Depth per queue: live where an actor publishes it, else as of the newest row."""
    live: dict[str, float] = {}
    for actor in actors:
        for name, depth in actor["metrics"].items():
            if _is_queue(name, names):
                live[name] = live.get(name, 0.0) + depth
    found = {name: depth for name, depth in metrics.items() if _is_queue(name, names)} | live
    return {name[len(names.queue_prefix) : -len(names.queue_suffix)]: found[name] for name in sorted(found)}


def _is_queue(name: str, names: Names) -> bool:
    return name.startswith(names.queue_prefix) and name.endswith(names.queue_suffix)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)

"""What a run looks like at one moment, as plain data: made from actor records, rows of metrics and the config, reading nothing."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from runtime.monitor.blocked import diagnose
from runtime.monitor.views import ActorView, RunState, Snapshot, StageRow, WaitRow
from runtime.observe.waits import ITSELF, WaitView
from runtime.registry import ActorRecord


class Shown(NamedTuple):
    """One figure: what it is called on the screen, the metric it is read from, and how it is written (a format spec)."""

    label: str
    metric: str
    spec: str = ".2f"


class Names(NamedTuple):
    """Where the monitor finds things. Config keys are dotted paths; the rest are names of metrics."""

    steps: str = "run.steps"
    bound: str = "staleness.alpha"
    """Config key of the bound shown as `alpha`."""
    bounded: str = "staleness.bounded"
    """Config key that lifts that bound where it is false."""
    version: str = "weights/version"
    """Metric shown as `version`, of the whole run and of each actor that has it."""
    age: str = "staleness/max"
    dropped: str = "staleness/dropped"
    """Per row; the screen shows the sum."""
    pulled: str = "weights/pulled"
    """Share of the newest version that an actor has pulled, 0 to 1."""
    failures: tuple[str, ...] = ("reward/failed/", "rollout/error/", "bus/refused/")
    """Counters whose names begin so tell what goes wrong, the reason at the end; shown as totals and rates."""
    queue_prefix: str = "queue/"
    queue_suffix: str = "/depth"
    trend: Shown = Shown("reward", "reward/mean")
    """Drawn as a sparkline."""
    headline: tuple[Shown, ...] = (
        Shown("eval", "eval/reward"),
        Shown("entropy", "policy/entropy"),
        Shown("kl", "policy/kl", ".3f"),
        Shown("clip", "policy/clip_frac", ".1%"),
        Shown("grad", "optim/grad_norm"),
        Shown("tok/s", "perf/gen_tokens_s", ",.0f"),
    )
    """Newest value each, in order of interest: the last ones fall off a narrow screen."""
    flow: tuple[Shown, ...] = (
        Shown("in flight", "rollout/in_flight", ",.0f"),
        Shown("generating", "proxy/in_flight", ",.0f"),
        Shown("held", "queue/held/depth", ",.0f"),
        Shown("ready", "queue/ready/depth", ",.0f"),
        Shown("bound", "queue/bound/depth", ",.0f"),
        Shown("trained", "samples/trained", ",.0f"),
    )
    """Summed over live actors, in the order in which work passes through."""
    network: tuple[Shown, ...] = (
        Shown("circuits", "fabric/circuits", ",.0f"),
        Shown("epoch", "fabric/epoch", ",.0f"),
        Shown("hidden s", "fabric/hidden_s", ".3f"),
        Shown("exposed s", "fabric/exposed_s", ".3f"),
    )
    """A line of its own, where any of them is known."""
    network_phase: str = "fabric/phase/"
    """Gauges whose names begin so, one of them 1: the phase, at the name's end."""
    network_down: str = "fabric/electrical"
    """Above 0, no circuit can be relied on."""


DEFAULT = Names()


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
        alpha=_bound(config, names),
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
    found = _value(config, key)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _value(config: dict[str, Any], key: str) -> object:
    found: object = config
    for part in key.split("."):
        if not isinstance(found, dict):
            return None
        found = cast("dict[str, object]", found).get(part)
    return found


def _bound(config: dict[str, Any], names: Names) -> float | None:
    """-1 where there is none: the form it has in messages."""
    return -1 if _value(config, names.bounded) is False else lookup(config, names.bound)


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

"""Rows of metrics.jsonl and evals.jsonl: what stands in them, and the file that one trainer owns."""

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import BinaryIO

import msgspec

from rubato.actors.messages.samples import Trajectory
from rubato.actors.report.breakdown import breakdown
from rubato.actors.training.train_engine import StepResult
from rubato.runtime.observe.figures import busy_seconds, cpu_seconds
from rubato.runtime.observe.trace import append_whole
from rubato.runtime.registry import ActorRecord

OWN_PREFIXES = ("queue/", "fabric/", "tokens/", "attempts/", "length/", "task/")
"""Figures of other actors that a row carries under their own names."""

SUMS = (
    "staleness/dropped", "samples/damaged", "rollout/room", "rollout/env_workers", "rollout/reward_workers", "rollout/slots",
)  # fmt: skip
"""Figures of which a row carries the sum over all actors."""


class Rows:
    """Owned by the trainer alone: `truncate` takes the file over, and what a replaced trainer still adds lands in a file not read."""

    def __init__(self, path: Path, key: str = "step") -> None:
        self._path, self._key = path, key
        self._file: BinaryIO | None = None
        self.newest = -1.0
        """`key` of the last row that was kept or added."""
        self.wall_s = 0.0
        """Training time that earlier launches took."""

    def truncate(self, step: int) -> int:
        """Forget the rows whose `key` is after `step` (they will be written again) and a torn last line, in one atomic replacement.

        Lines that are no row are left out too; returns how many.
        """
        kept: list[bytes] = []
        num_damaged = 0
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        for line in lines:
            if not line.endswith(b"\n"):
                continue
            row = _row(line, self._key)
            num_damaged += row is None
            if row is not None and row[self._key] <= step:
                kept.append(line)
                self.newest = row[self._key]
                self.wall_s = row.get("time/wall_s", 0.0)
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self._open()
        return num_damaged

    def read(self) -> Iterator[dict[str, float]]:
        """All rows so far, one after the other. Blocks."""
        with self._path.open("rb") as file:
            yield from (row for line in file if (row := _row(line, self._key)))

    def append_step(
        self,
        step: int,
        result: StepResult,
        groups: Sequence[Sequence[Trajectory]],
        times: Mapping[str, float],
        own: Mapping[str, float],
        others: Sequence[ActorRecord],
        used: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Put the row of `step` together, add it, and return it. `used` is what `cpu_used` says."""
        row: dict[str, float] = {
            "step": step,
            **times,
            **result.metrics,
            **batch_metrics(groups, step),
            "weights/version": step,
            **others_metrics(others),
            **own,
            **used,
        }
        row["perf/samples_s"] = sum(map(len, groups)) / max(1e-6, times["time/step"])
        row["perf/train_tokens_s"] = result.num_tokens / max(1e-6, times["time/train"])
        self.append(row)
        return row

    def append(self, row: Mapping[str, float]) -> None:
        """Add one row. Figures that are not finite are left out: NaN is never a number here."""
        finite = {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items() if math.isfinite(v)}
        file = self._file or self._open()
        append_whole(file.fileno(), json.dumps(finite).encode() + b"\n", sync=True)
        self.newest = row[self._key]

    def _open(self) -> BinaryIO:
        """It stays open: the path may come to lead to another trainer's file."""
        if self._file is not None:
            self._file.close()
        self._file = file = self._path.open("ab", buffering=0)
        weakref.finalize(self, file.close)
        return file


def _row(line: bytes, key: str) -> dict[str, float] | None:
    try:
        row = msgspec.json.decode(line, type=dict[str, float])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return row if key in row else None


def batch_metrics(groups: Sequence[Sequence[Trajectory]], step: int) -> dict[str, float]:
    """Of the trajectories that step `step` trains on: what their rewards consist of, what their environments told, ages, lengths in tokens
    (`len` with what was shown, `sampled` without), how many were cut, the share of their time that went into their environments, and each
    named task's reward."""
    trajectories = [t for group in groups for t in group]
    ages = [step - 1 - t.version_first for t in trajectories]
    lengths = [sum(len(s.mask) for s in t.segments) for t in trajectories]
    sampled = [sum(s.mask.count(1) for s in t.segments) for t in trajectories]
    count = len(trajectories)
    tasks = sorted({t.ticket.task for t in trajectories} - {""})
    return {
        **{f"task/{name}/reward": fmean(t.reward for t in trajectories if t.ticket.task == name) for name in tasks},
        "staleness/mean": sum(ages) / count,
        "staleness/max": float(max(ages)),
        "rollout/len_mean": sum(lengths) / count,
        "rollout/sampled_mean": sum(sampled) / count,
        "rollout/cut_frac": sum(t.cut for t in trajectories) / count,
        "rollout/turns_mean": sum(t.turns for t in trajectories) / count,
        "rollout/truncated_frac": sum(t.truncated for t in trajectories) / count,
        "rollout/wall_s_mean": fmean(t.wall_s for t in trajectories),
        "rollout/wall_s_p99": sorted(t.wall_s for t in trajectories)[int(0.99 * (count - 1))],
        "rollout/env_frac": sum(t.env_s for t in trajectories) / max(1e-9, sum(t.wall_s for t in trajectories)),
        "rollout/reward_frac": sum(t.reward_s for t in trajectories) / max(1e-9, sum(t.wall_s for t in trajectories)),
        **breakdown(trajectories),
    }


def off_policy(metrics: Mapping[str, float]) -> dict[str, float]:
    """`ess` and `kl` as Claim tells them, of a step's metrics. What engine and trainer compute differently is in no age's KL."""
    kl = metrics.get("policy/kl", 0.0) - metrics.get("policy/mismatch_kl", 0.0)
    told = {"ess": metrics.get("policy/ess", 1.0), "kl": max(0.0, kl)}
    return {name: value for name, value in told.items() if math.isfinite(value)}


def own_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a row carries of the trainer's own figures."""
    return {name: metrics.get(name, 0.0) for name in ("loop/lag_p99", "staleness/publish_lag")}


def others_metrics(records: Sequence[ActorRecord]) -> dict[str, float]:
    """What other actors last reported of themselves: idle shares, queues, room for rollouts, tokens per second, circuits, and whether engines are paced."""
    row: dict[str, float] = {}
    for record in records:
        row[f"idle/{record.name}"] = record.idle
        row |= {name: value for name, value in record.metrics.items() if name.startswith(OWN_PREFIXES)}
    for name in SUMS:
        row[name] = sum(r.metrics.get(name, 0.0) for r in records)
    for name in ("rollout/reward_each_s", "rollout/reward_alone_s"):
        if told := [r.metrics[name] for r in records if name in r.metrics]:
            row[name] = fmean(told)
    finished = sum(r.metrics.get("rollout/finished", 0.0) for r in records)
    errors = sum(r.metrics.get("rollout/error", 0.0) for r in records)
    row["rollout/error_frac"] = errors / (finished + errors) if finished + errors else 0.0
    row["perf/gen_tokens_s"] = sum(r.metrics.get("engine/tokens_s", 0.0) for r in records)
    paced = [r.metrics for r in records if "paced/engines" in r.metrics]
    if paced:
        steps = sum(metrics.get("paced/steps", 0.0) for metrics in paced)
        over = sum(metrics.get("paced/steps", 0.0) * metrics.get("paced/outlasted_frac", 0.0) for metrics in paced)
        row |= {"paced/engines": float(len(paced)), "paced/outlasted_frac": over / max(1.0, steps)}
    return row | _weights_metrics([r.metrics for r in records])


def _weights_metrics(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the slowest engine each: what a version's way takes, how long no step runs for it, and the least share of the way that is hidden."""
    told = [metrics for metrics in told if "weights/pull_s_p50" in metrics]
    row = {f"weights/{name}_s": max(metrics[f"weights/{name}_s_p50"] for metrics in told) for name in ("transfer", "pull", "pause") if told}
    hidden = [1.0 - m["weights/pause_s_p50"] / max(m["weights/pull_s_p50"], 1e-9) for m in told]
    return row | ({"weights/hidden_frac": max(0.0, min(hidden))} if hidden else {})


def cpu_used(records: Sequence[ActorRecord], node: str) -> dict[str, float]:
    """`cpu/<actor>` of all actors on the host of `node`, this one, `cpu/host` of whatever runs there: CPU seconds so far. `cpu/cores` of it. Blocking."""
    used = cpu_seconds({record.name: record.pid for record in records if record.node == node and record.pid})
    busy = busy_seconds()
    row = {f"cpu/{name}": seconds for name, seconds in used.items()}
    return row if busy is None else row | {"cpu/host": busy, "cpu/cores": float(os.cpu_count() or 1)}

"""metrics.jsonl: one row per step, gapless, whatever died in between."""

import json
import math
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import msgspec

from actors.messages.samples import Trajectory
from actors.training.engine import StepResult
from runtime.observe.figures import busy_seconds, cpu_seconds
from runtime.registry import ActorRecord

OWN_PREFIXES = ("queue/", "fabric/")
"""Figures of other actors that a row carries under their own names."""


class Rows:
    """Owned by the trainer alone: `truncate` takes the file over, and what a replaced trainer still adds lands in a file nobody reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.wall_s = 0.0
        """Training time that earlier launches took."""

    def truncate(self, step: int) -> int:
        """Forget the rows after `step` (they will be written again) and a torn last line, in one atomic replacement.

        Lines that are no row are left out too; returns how many.
        """
        kept: list[bytes] = []
        num_damaged = 0
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        for line in lines:
            if not line.endswith(b"\n"):
                continue
            row = _row(line)
            num_damaged += row is None
            if row is not None and row["step"] <= step:
                kept.append(line)
                self.wall_s = row.get("time/wall_s", 0.0)
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self._open()
        return num_damaged

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
            **result.metrics,
            **batch_metrics(groups, step),
            "weights/version": step,
            **times,
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
        file.write(json.dumps(finite).encode() + b"\n")
        os.fsync(file.fileno())

    def _open(self) -> BinaryIO:
        """It stays open: the path may come to lead to another trainer's file."""
        if self._file is not None:
            self._file.close()
        self._file = file = self._path.open("ab", buffering=0)
        weakref.finalize(self, file.close)
        return file


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row = msgspec.json.decode(line, type=dict[str, float])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return row if "step" in row else None


def batch_metrics(groups: Sequence[Sequence[Trajectory]], step: int) -> dict[str, float]:
    """Ages and lengths of the trajectories that step `step` trains on."""
    trajectories = [t for group in groups for t in group]
    ages = [step - 1 - t.version_first for t in trajectories]
    lengths = [sum(len(s.mask) for s in t.segments) for t in trajectories]
    count = len(trajectories)
    return {
        "staleness/mean": sum(ages) / count,
        "staleness/max": float(max(ages)),
        "rollout/len_mean": sum(lengths) / count,
        "rollout/turns_mean": sum(t.turns for t in trajectories) / count,
        "rollout/truncated_frac": sum(t.truncated for t in trajectories) / count,
        "rollout/wall_s_p99": sorted(t.wall_s for t in trajectories)[int(0.99 * (count - 1))],
    }


def own_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a row carries of the trainer's own figures."""
    return {name: metrics.get(name, 0.0) for name in ("loop/lag_p99", "staleness/publish_lag")}


def others_metrics(records: Sequence[ActorRecord]) -> dict[str, float]:
    """What other actors last reported of themselves: idle shares, queues, tokens per second, circuits."""
    row: dict[str, float] = {}
    for record in records:
        row[f"idle/{record.name}"] = record.idle
        row |= {name: value for name, value in record.metrics.items() if name.startswith(OWN_PREFIXES)}
    row["staleness/dropped"] = sum(r.metrics.get("staleness/dropped", 0.0) for r in records)
    finished = sum(r.metrics.get("rollout/finished", 0.0) for r in records)
    errors = sum(r.metrics.get("rollout/error", 0.0) for r in records)
    row["rollout/error_frac"] = errors / (finished + errors) if finished + errors else 0.0
    row["perf/gen_tokens_s"] = sum(r.metrics.get("engine/tokens_s", 0.0) for r in records)
    transfers = [r.metrics["weights/transfer_s_p50"] for r in records if "weights/transfer_s_p50" in r.metrics]
    if transfers:
        row["weights/transfer_s"] = max(transfers)
    return row


def cpu_used(records: Sequence[ActorRecord]) -> dict[str, float]:
    """`cpu/<actor>` of all actors on this host, `cpu/host` of whatever runs there: CPU seconds so far. `cpu/cores` of it. Blocking."""
    host = socket.gethostname()
    used = cpu_seconds({record.name: record.pid for record in records if record.host == host and record.pid})
    busy = busy_seconds()
    row = {f"cpu/{name}": seconds for name, seconds in used.items()}
    return row if busy is None else row | {"cpu/host": busy, "cpu/cores": float(os.cpu_count() or 1)}

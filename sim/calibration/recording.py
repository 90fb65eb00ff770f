"""Reads what a live run wrote down about itself: its config, a row per step, what its engines' steps cost, its trajectories."""

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rubato.actors.samples.run_files import SAMPLES, read_lines
from rubato.actors.samples.sample import TRAINED
from rubato.actors.training.trainer import CheckpointSection
from rubato.runtime.config import RunSection
from rubato.runtime.config.overrides import read
from rubato.runtime.errors import ConfigError

WARM_STEPS = 5
"""Left out at the start: slots fill, torch sets itself up."""

LAST_STEPS = 2
"""Left out at the end, when no further group starts."""

LEAST_STEPS = 12
"""What has to be left between the two."""

NEEDED = (
    "step", "time/wall_s", "time/step", "time/wait_for_batch", "time/train", "time/publish", "rollout/turns_mean",
    "rollout/len_mean", "perf/samples_s", "perf/train_tokens_s",
)  # fmt: skip
"""Of every row. Rows of runs that were recorded before there were CPU seconds have these, and are refused by name."""

ABOVE_ZERO = ("time/step", "rollout/turns_mean", "rollout/len_mean", "perf/samples_s")
"""Of these: what costs are divided by."""

Row = Mapping[str, float]

LineT = TypeVar("LineT")


class RecordedEngine(msgspec.Struct, frozen=True):
    """One engine's life: see TorchEngine._tell_times. `sampled` has (rows, tokens, CPU seconds) of single steps."""

    cpu_s: float
    updates: int
    update_cpu_s: float
    process_cpu_s: float
    sampled: tuple[tuple[int, int, float], ...]


class RecordedRollout(msgspec.Struct, frozen=True):
    """A trajectory that was in a batch: a line of samples.jsonl."""

    fate: str
    version_first: int
    turns: int
    tokens: int
    """Sampled ones."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One run."""

    folder: Path
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    rollouts: tuple[RecordedRollout, ...]

    @property
    def window(self) -> tuple[Row, ...]:
        """The rows that figures come from; the first is the state at their beginning."""
        return self.rows[WARM_STEPS - 1 : len(self.rows) - LAST_STEPS]

    @property
    def engines(self) -> dict[str, RecordedEngine]:
        """By name. Raises ConfigError where an engine did not tell: only fitting needs it."""
        return dict(_step_times(self.folder))

    @property
    def seconds(self) -> float:
        """Wall time of the window."""
        return self.window[-1]["time/wall_s"] - self.window[0]["time/wall_s"]

    def cpu_s(self, role: str) -> float:
        """CPU seconds that all actors of `role` took in the window; `host` is the whole machine."""
        first, last = self.window[0], self.window[-1]
        names = [name for name in last if name == f"cpu/{role}" or name.rpartition("-")[0] == f"cpu/{role}"]
        if not names or any(name not in first for name in names):
            raise ConfigError(
                f"{self.folder}/metrics.jsonl has no cpu/{role} for the whole run: an actor came or went meanwhile, or the run is "
                f"older than these figures, or not of Linux. Record it anew."
            )
        return sum(last[name] - first[name] for name in names)

    @property
    def foreign_cores(self) -> float:
        """Cores that other programs of the host took in the window."""
        own = sum(self.cpu_s(role) for role in (*self.config["actors"], "node"))
        return max(0.0, self.cpu_s("host") - own) / self.seconds

    @property
    def train_cpu_s_per_token(self) -> float:
        """CPU seconds of training per trained token: the same work in every run of a job, so it tells of the host's speed."""
        rows = self.window[1:]
        if any("time/train_cpu" not in row for row in rows):
            raise ConfigError(f"{self.folder}/metrics.jsonl has no time/train_cpu. Record the run anew.")
        return sum(row["time/train_cpu"] for row in rows) / sum(map(trained_tokens, rows))

    def count(self, role: str) -> int:
        """Processes of `role`."""
        return int(self.config["actors"][role].get("count", 1))

    def rest_s(self, row: Row) -> float:
        """Seconds of a step beside waiting, training and publishing: its row, and the checkpoint of the step before."""
        return max(0.0, row["time/step"] - row["time/wait_for_batch"] - row["time/train"] - row["time/publish"])

    def follows_checkpoint(self, row: Row) -> bool:
        """Whether the step before was saved: its time is in this row."""
        return int(row["step"] - 1) % self.checkpoint.every == 0

    @property
    def checkpoint(self) -> CheckpointSection:
        return CheckpointSection(**self.config.get("checkpoint", {}))

    @property
    def run(self) -> RunSection:
        return RunSection(**self.config["run"])


def trained_tokens(row: Row) -> float:
    """Tokens of the step's trajectories that had an advantage."""
    return row["perf/train_tokens_s"] * row["time/train"]


def read_run(folder: Path) -> Recording:
    """Raises ConfigError with one sentence where `folder` holds no run, too short a one, or damaged lines."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no run folder. Give the --run-dir of a launch.")
    config = read(folder / "config.yaml").filled_in().tree
    for role in ("engine", "env_manager", "trainer", "sample_buffer"):
        if role not in config.get("actors", {}):
            raise ConfigError(f"{folder}/config.yaml names no {role}: only whole jobs can be calibrated from.")
    rows = tuple(_lines(folder, "metrics.jsonl", dict[str, float]))
    least = WARM_STEPS + LEAST_STEPS + LAST_STEPS
    if len(rows) < least:
        raise ConfigError(f"{folder} has {len(rows)} training steps; calibration needs {least}. Launch with more run.steps.")
    if [row.get("step") for row in rows] != list(range(1, len(rows) + 1)):
        raise ConfigError(f"{folder}/metrics.jsonl does not count its steps from 1 without a gap. Record the run anew.")
    for row in rows:
        if lacking := [name for name in NEEDED if name not in row]:
            raise ConfigError(f"{folder}/metrics.jsonl has no {lacking[0]} in step {row['step']:.0f}. Record the run anew.")
        if nothing := [name for name in ABOVE_ZERO if row[name] <= 0]:
            raise ConfigError(
                f"{folder}/metrics.jsonl has {nothing[0]} at {row[nothing[0]]:g} in step {row['step']:.0f}; it must be above 0. "
                "Record the run anew."
            )
    rollouts = tuple(line for line in _lines(folder, "samples.jsonl", RecordedRollout) if line.fate in TRAINED)
    if not rollouts:
        raise ConfigError(f"{folder}/samples.jsonl has no sample that was trained. Record the run anew.")
    return Recording(folder, config, rows, rollouts)


def _step_times(folder: Path) -> Iterator[tuple[str, RecordedEngine]]:
    names = {path.name.removesuffix(".gz") for path in (folder / "logs").glob("engine-*.jsonl*")}
    for name in sorted(names):
        told = [line for line in _lines(folder, f"logs/{name}", dict[str, Any]) if line.get("event") == "step_times"]
        if not told:
            raise ConfigError(
                f"{folder}/logs/{name} has no step_times: the engine was killed, or is not the built-in one. Let a run end by itself."
            )
        try:
            yield name.removesuffix(".jsonl"), msgspec.convert(told[-1], RecordedEngine)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{folder}/logs/{name} has damaged step_times: {error}. Record the run anew.") from error


def _lines(folder: Path, name: str, kind: type[LineT]) -> Iterator[LineT]:
    """The objects of a JSON-lines file, or of the same with .gz behind."""
    path = folder / name
    packed = path.with_name(f"{path.name}.gz")
    try:
        if not path.exists():
            lines = gzip.decompress(packed.read_bytes()).splitlines()
        elif name == f"{SAMPLES}.jsonl":
            lines = list(read_lines(folder))
        else:
            lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Give the --run-dir of a run that has ended.") from None
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is damaged in line {number}: {error}. Record the run anew.") from error

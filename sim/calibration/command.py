"""The command tools/calibrate.py: from a live run's folder, the simulator's parameters and the figures that simulations are held against."""

import argparse
import gzip
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rubato.runtime.config import Section
from rubato.runtime.errors import ConfigError
from rubato.sim.calibration.fit import fit, rollouts
from rubato.sim.calibration.recording import LAST_STEPS, WARM_STEPS, Recording, read_run
from rubato.sim.onehost.observed import ROLES, Observed
from rubato.sim.scenario import reason

HEAD = "# Written by tools/calibrate.py; do not edit. {what}\n"

KEPT = ("step", "time/", "cpu/", "idle/", "rollout/", "perf/")
"""What calibration reads of a row, by the beginnings of the names."""


def main(argv: Sequence[str]) -> int:
    """Do what ARGV asks for. Raises ConfigError for bad input."""
    args = _parsed(argv)
    recording = read_run(Path(args.run))
    try:
        seen = observed(recording)
        fitted = fit(recording, args.host or _host(recording)) if args.out else None
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{args.run} can't be calibrated from: {reason(error)}. Record the run anew.") from error
    if fitted:
        what = "Costs are CPU seconds; simulations that use them are calibrated on this one run."
        _write(Path(args.out), fitted, what)
    if args.observed:
        _write(Path(args.observed), seen, "What this live run was seen to do.")
    if args.keep:
        keep(recording, Path(args.keep))
    idle = ", ".join(f"{role} {share:.2f}" for role, share in seen.idle.items())
    print(f"{args.run}: {seen.engines} engines, {seen.steps_s:.3f} steps/s; idle: {idle}")  # noqa: T201
    return 0


def observed(recording: Recording) -> Observed:
    """Steps per second and idle shares, over the window of the recording."""
    rows = recording.window[1:]
    idle: dict[str, float] = {}
    for role in ROLES:
        names = [name for name in rows[0] if name.rpartition("-")[0] == f"idle/{role}"]
        if names and all(name in row for name in names for row in rows):
            each = [sum(row[name] for name in names) / len(names) * row["time/step"] for row in rows]
            idle[role] = round(sum(each) / sum(row["time/step"] for row in rows), 4)
    if not idle:
        raise ConfigError(f"{recording.folder}/metrics.jsonl has no idle/ of any role for the whole run. Record it anew.")
    return Observed(
        engines=recording.count("engine"), env_managers=recording.count("env_manager"), steps=len(recording.rows),
        window=(WARM_STEPS + 1, len(recording.rows) - LAST_STEPS), steps_s=round(len(rows) / recording.seconds, 5),
        idle=idle, foreign_cores=round(recording.foreign_cores, 3),
        train_cpu_s_per_token=float(f"{recording.train_cpu_s_per_token:.4g}"), rollouts=rollouts(recording),
    )  # fmt: skip


def keep(recording: Recording, folder: Path) -> None:
    """Copy what calibration reads, packed: some tens of kilobytes. Raises ConfigError where that can't be written."""
    try:
        _keep(recording, folder)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}. Give another --keep.") from error


def _keep(recording: Recording, folder: Path) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_bytes((recording.folder / "config.yaml").read_bytes())
    rows = [{k: v for k, v in row.items() if k.startswith(KEPT)} for row in recording.rows]
    _pack(folder / "metrics.jsonl.gz", rows)
    _pack(folder / "samples.jsonl.gz", [msgspec.structs.asdict(rollout) for rollout in recording.rollouts])
    for name, told in recording.engines.items():
        _pack(folder / "logs" / f"{name}.jsonl.gz", [{"event": "step_times"} | msgspec.structs.asdict(told)])


def _pack(path: Path, lines: Sequence[Any]) -> None:
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _write(path: Path, section: Section, what: str) -> None:
    text = HEAD.format(what=what) + yaml.safe_dump(_plain(section.model_dump()), sort_keys=False, width=120)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}. Give another path.") from error


def _plain(value: Any) -> Any:
    """As YAML has it, with the six digits that figures are good for at most."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _host(recording: Recording) -> str:
    cores = recording.window[-1].get("cpu/cores", 0)
    return f"{cores:.0f} cores, {platform.machine()}"


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("calibrate", description="Fit the simulator's parameters to one live run.")
    parser.add_argument("run", metavar="RUN_DIR", help="the folder of a run that has ended")
    parser.add_argument("--out", metavar="FILE.yaml", help="write the fitted parameters there")
    parser.add_argument("--observed", metavar="FILE.yaml", help="write what a simulation of this run is held against")
    parser.add_argument("--keep", metavar="DIR", help="copy what calibration reads, packed")
    parser.add_argument("--host", default="", help="what the host is, in words; its cores, where left out")
    return parser.parse_args(list(argv))

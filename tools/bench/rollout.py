"""Batch-level stepping beside trajectories that go on alone, on live processes: seconds per 64 trajectories as latencies spread.

python tools/bench/rollout.py                             four spreads and a Pareto tail: nine minutes
python tools/bench/rollout.py --json FILE --plot FILE     figures as JSON, and drawn
python tools/bench/rollout.py --sigma 1 --no-tail         one point alone

Sleeping environments, a scripted engine whose every token takes the same time, and a scripted trainer, whose rows are what is timed. That time
is no hardware's: `engine.pace` is not set. What is measured, and how: docs/benchmarks.md.
"""

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from rubato.runtime.errors import ExitCode  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from tools.bench.peers.lock_step import ENVIRONMENTS, GROUP, PARETO_SHAPE, TURNS, latency  # noqa: E402

SIGMAS = (0.1, 0.3, 0.6, 1.0)
GENERATION = 0.5
"""Of a turn, in units of μ: the scripted engine's fixed latency."""
PEER = ROOT / "tools/bench/peers/lock_step.py"
MANAGERS = {"batch": f"{PEER}:LockStepManager", "trajectory": "rubato.actors.envs.manager:EnvManager"}
ROLES = {
    "sample_buffer": "rubato.actors.samples.buffer:SampleBuffer",
    "llm_proxy": "rubato.actors.proxy.proxy:LLMProxy",
    "engine": "rubato.actors.engines.worker:EngineWorker",
    "trainer": "rubato.actors.training.trainer:Trainer",
}
ALPHA = 2
"""A rollout begins as soon as another ends: 64 groups may wait for training, beside those that run."""
WARM = 1
"""Rows before those that are timed: the first batch, and starting."""
AFTER = {"batch": 0, "trajectory": 2}
"""Rows after them, while which environments fall idle: the last trajectories were admitted. In lock step they all end at once."""
START_S, BATCH_MUS = 120.0, 150.0
"""Longest that a job may take to start, and a batch in units of μ: in lock step under the Pareto tail it takes 102 on average."""
OF_HOST = ("cpu/host", "cpu/cores")
DRAWN = 10_000
"""Turns of 64 that the ideal is the mean of."""


def config(arm: str, sigma: float | None, *, mu_s: float, batches: int, model: Path) -> dict[str, Any]:
    """Of one job that has `batches` rows to be timed. Both arms have the same tasks and seeds, and so the same latencies."""
    kwargs = {"mu_s": mu_s, "sigma_over_mu": sigma, "spread": arm == "trajectory"}
    return {
        "run": {"name": f"rollout-{arm}", "seed": 1, "steps": WARM + batches + AFTER[arm]},
        "actors": {role: {"class": name} for role, name in (ROLES | {"env_manager": MANAGERS[arm]}).items()},
        "model": {"path": str(model)},
        "env": {"class": f"{PEER}:PacedSteps", "kwargs": kwargs, "isolation": "inline", "concurrency": ENVIRONMENTS},
        "engine": {"kind": "scripted", "num_slots": ENVIRONMENTS, "scripted": {"token_s": GENERATION * mu_s}},
        "rollout": {"max_turns": TURNS, "max_new_tokens": 1},
        "staleness": {"alpha": ALPHA},
        "train": {
            "kind": "scripted",
            "scripted": {"step_s": 0.0, "weights_mib": 0.01},
            "batch_groups": ENVIRONMENTS // GROUP,
            "group_size": GROUP,
        },
        "check": {"enabled": False},
        "eval": {"every": 0, "final_num_tasks": 0},
        "checkpoint": {"every": 1000},
        "report": {"finish": ""},
    }


def play(jobs: Sequence[tuple[dict[str, Any], Path]], limit_s: float) -> list[list[dict[str, Any]]]:
    """Run jobs side by side to their end, each of a config in a new folder; their rows. Raises RuntimeError where one does not get there."""
    running = [(settings["run"]["name"], folder, launch(settings, folder)) for settings, folder in jobs]
    try:
        for name, folder, launcher in running:
            try:
                code = launcher.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{name} did not end in {limit_s:g} s: {said(folder)}") from None
            if code:
                raise RuntimeError(f"{name} ended with {code}: {said(folder)}")
    finally:
        for _, _, launcher in running:
            launcher.terminate()
        for _, _, launcher in running:
            launcher.wait()
    return [[json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()] for _, folder in jobs]


def launch(settings: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes]":
    """The job's launcher, which ends with this process."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "tools/launch.py", str(file), "--run-dir", str(folder)]
    with folder.with_suffix(".log").open("w") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, preexec_fn=die_with_parent)


def said(folder: Path) -> str:
    """The launcher's last words."""
    return folder.with_suffix(".log").read_text(errors="replace")[-2000:]


def seconds_of(rows: Sequence[dict[str, Any]], batches: int) -> tuple[float, float]:
    """(seconds per 64 trajectories, cores that the job's processes used), over `batches` rows in the middle.

    Raises RuntimeError where any rollout failed: it was not the same work.
    """
    if failed := max(row.get("rollout/error_frac", 0.0) for row in rows):
        raise RuntimeError(f"{failed:.1%} of the rollouts failed")
    first, last = rows[WARM - 1], rows[WARM + batches - 1]
    took_s = last["time/unix_s"] - first["time/unix_s"]
    used = (last[key] - first.get(key, 0.0) for key in last if key.startswith("cpu/") and key not in OF_HOST)
    return took_s / batches, sum(used) / took_s


def ideal(sigma: float | None, mu_s: float) -> dict[str, float]:
    """The same seconds if nothing but latencies and generation took time: by Monte Carlo, a turn is the longest of 64, or the mean."""
    chance = random.Random(1)
    turns = [[latency(sigma, chance) for _ in range(ENVIRONMENTS)] for _ in range(DRAWN)]
    batch = statistics.fmean(map(max, turns)) + GENERATION
    trajectory = statistics.fmean(map(statistics.fmean, turns)) + GENERATION
    figures = {"ideal_batch_s": TURNS * batch * mu_s, "ideal_trajectory_s": TURNS * trajectory * mu_s}
    return figures | {"ideal_speedup": batch / trajectory}


def measure(asked: argparse.Namespace, sigma: float | None, model: Path) -> dict[str, Any]:
    """One point, its arms at the same time: neither uses more than a part of one core, and whatever else the machine does meets both."""
    found: dict[str, Any] = {"pareto_shape": PARETO_SHAPE} if sigma is None else {"sigma_over_mu": sigma}
    timed = {"batch": asked.batches, "trajectory": 2 * asked.batches}  # of the shorter ones more fit into the time
    configs = {arm: config(arm, sigma, mu_s=asked.mu, batches=num, model=model) for arm, num in timed.items()}
    limit_s = START_S + BATCH_MUS * asked.mu * max(settings["run"]["steps"] for settings in configs.values())
    played = play([(settings, model.parent / f"{arm}-{sigma}") for arm, settings in configs.items()], limit_s)
    for arm, rows in zip(timed, played, strict=True):
        found[f"{arm}_s"], found[f"{arm}_cores"] = seconds_of(rows, timed[arm])
    found["speedup"] = found["batch_s"] / found["trajectory_s"]
    found |= ideal(sigma, asked.mu)
    print(line(found), flush=True)
    return found


def line(point: dict[str, Any]) -> str:
    """A point for a reader."""
    name = f"σ/μ {point['sigma_over_mu']:<6g}" if "sigma_over_mu" in point else "Pareto tail"
    return (
        f"{name:11} batch-level {point['batch_s']:6.2f} s (ideal {point['ideal_batch_s']:6.2f}), trajectory-level "
        f"{point['trajectory_s']:5.2f} s (ideal {point['ideal_trajectory_s']:5.2f}), {point['speedup']:.2f} × "
        f"(ideal {point['ideal_speedup']:.2f}); {point['batch_cores']:.2f} and {point['trajectory_cores']:.2f} cores"
    )


def plot(points: Sequence[dict[str, Any]], mu_s: float, target: Path) -> None:
    """Speed-up over σ/μ, measured and ideal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sigmas = [point["sigma_over_mu"] for point in points]
    axes.plot(sigmas, [point["ideal_speedup"] for point in points], "--", color="0.4", label="ideal, Monte Carlo")
    axes.plot(sigmas, [point["speedup"] for point in points], "o-", label="live processes")
    axes.set_xlabel("σ/μ of an environment's step")
    axes.set_ylabel("trajectory-level over batch-level")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.suptitle(f"{ENVIRONMENTS} environments, {TURNS} turns, generation paced at {GENERATION:g} μ, μ = {mu_s:g} s")
    figure.savefig(target, format="png", dpi=110)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """What was asked for; ends the process with one sentence where it can't be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigma", type=float, nargs="+", default=SIGMAS, metavar="σ/μ", help="points")
    parser.add_argument("--no-tail", action="store_true", help="leave out the Pareto tail")
    parser.add_argument("--mu", type=float, default=0.4, metavar="S", help="mean of an environment's step, in seconds")
    parser.add_argument(
        "--batches", type=int, default=2, help="64 trajectories each, that are timed per point in lock step; twice as many of the other arm"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG")
    asked = parser.parse_args(argv)
    if asked.batches < 1:
        parser.error("--batches must be at least 1")
    if not (math.isfinite(asked.mu) and asked.mu > 0):
        parser.error("--mu must be a finite number of seconds above 0")
    if not all(math.isfinite(sigma) and sigma >= 0 for sigma in asked.sigma):
        parser.error("--sigma must be finite numbers of at least 0")
    try:
        for file in filter(None, (asked.json, asked.plot)):
            file.open("ab").close()
    except OSError as error:
        parser.error(str(error))
    return asked


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures and the plot where asked for."""
    asked = arguments(argv)
    print(f"Generation is a scripted engine's fixed latency, {GENERATION * asked.mu:g} s a turn: no hardware's.", flush=True)
    from rubato.actors.training.base_model import make

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended then too
    with tempfile.TemporaryDirectory(prefix="rubato-rollout-") as scratch:
        model = Path(scratch) / "model"  # engines take its vocabulary, environment managers its tokenizer
        make(model, 1, lambda _what, _done: None, steps=0)
        try:
            points = [measure(asked, sigma, model) for sigma in asked.sigma]
            tail = {} if asked.no_tail else {"pareto": measure(asked, None, model)}
        except RuntimeError as error:
            print(f"rollout: {error}", file=sys.stderr)
            return ExitCode.FAILED
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
    facts = {"points": points, **tail, "mu_s": asked.mu, "generation_over_mu": GENERATION, "batches": asked.batches}
    facts["generation"] = "scripted, fixed latency"
    if asked.json:
        asked.json.write_text(json.dumps(facts, indent=1))
    if asked.plot:
        plot(points, asked.mu, asked.plot)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

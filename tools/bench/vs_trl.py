"""The quickstart's task beside TRL's synchronous GRPO trainer: same model, tokens, batches, loss, optimiser, schedule and reward.

python tools/bench/vs_trl.py                          one run of 90 s per side and latency: 12 minutes
python tools/bench/vs_trl.py --runs 5 --json FILE     seeds 1 to 5, the sides in turn; medians and all runs as JSON
python tools/bench/vs_trl.py --latency tail           one point alone
python tools/bench/vs_trl.py --short                  three batches of Rubato alone, without TRL: they show that it starts

Needs the extra `bench`, or another interpreter that has it: --trl-python PATH. What is measured, and how: docs/benchmarks.md.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from rubato.actors.config import RolloutSection, TrainSection  # noqa: E402
from rubato.runtime.errors import ExitCode  # noqa: E402
from rubato.runtime.observe.trace import wall_s  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

LATENCIES = ("0", "50ms", "tail")
STEPS, LR_STEPS = 1000, 120
"""More than a side can train in its time, and the length of the learning rate's schedule, which is the quickstart's."""
SMOOTH = 3
"""Batches that a reward is the mean of."""
START_S, THREE_S, END_S = 240.0, 60.0, 30.0
"""Longest until the first batch is trained, at least from it to the third, and longest from the signal to the end."""
LOOK_S, MEMORY_LOOKS = 1.0, 5
"""How often processes are looked at; their memory at every fifth look, since that costs them time."""


class Row(NamedTuple):
    """One trained batch."""

    samples: int
    """So far, this batch included."""
    reward: float
    turns: float
    """Mean over the batch's episodes."""
    unix_s: float


class Look(NamedTuple):
    """What all processes of a side have used by then."""

    unix_s: float
    cpu_s: float
    rss_mib: float = 0.0
    pss_mib: float = 0.0


class Played(NamedTuple):
    """One run of one side."""

    began: float
    rows: Sequence[Row]
    looks: Sequence[Look]


class Tree:
    """A process and all that come from it, those that ended included."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._root = psutil.Process(pid)
        self._cpu: dict[Any, float] = {self._root: 0.0}

    def look(self, *, memory: bool) -> Look:
        """CPU seconds so far and, with `memory`, what is resident: RSS counts shared pages in each process, PSS once."""
        import psutil

        with suppress(psutil.Error):
            self._cpu |= {child: 0.0 for child in self._root.children(recursive=True) if child not in self._cpu}
        rss = pss = 0
        for process in self._cpu:
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._cpu[process] = times.user + times.system
                if memory:
                    used = process.memory_full_info()
                    rss, pss = rss + used.rss, pss + used.pss
        return Look(wall_s(), sum(self._cpu.values()), rss / 2**20, pss / 2**20)

    def kill(self) -> None:
        """Whatever is left of it."""
        import psutil

        self.look(memory=False)
        for process in self._cpu:
            with suppress(psutil.Error):
                process.kill()


async def play(command: Sequence[str], rows: Path, log: Path, seconds: float) -> Played:
    """Run `command` until `seconds` after its first row and three rows; nothing of it is left. Raises RuntimeError without rows."""
    began, found, looks = wall_s(), [], []
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins for one without a core made TRL seven times slower
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, cwd=ROOT, env=os.environ | quiet, start_new_session=True
        )
    tree = Tree(process.pid)
    try:
        while process.returncode is None and not is_over(found, seconds, wall_s() - began):
            await asyncio.sleep(LOOK_S)
            looks.append(tree.look(memory=len(looks) % MEMORY_LOOKS == 0))
            found = read_rows(rows)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
        tree.kill()
        await process.wait()
    if len(found) < 2:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"{command[1]} trained {len(found)} batches in {wall_s() - began:.0f} s: {' '.join(last)}")
    return Played(began, found, looks)


def is_over(rows: Sequence[Row], seconds: float, elapsed: float) -> bool:
    """Its time is up, and three batches are trained or will not be."""
    if not rows:
        return elapsed > START_S
    trained_s = wall_s() - rows[0].unix_s
    return trained_s > seconds and (len(rows) > 2 or trained_s > max(2 * seconds, THREE_S))


def read_rows(file: Path) -> list[Row]:
    """Of either side's file; a line that is being written is left out."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row_of(json.loads(line)) for line in lines]


def row_of(row: Mapping[str, Any]) -> Row:
    """From a line of ours (metrics.jsonl, whose batches are whole) or of TRL's."""
    if "samples" in row:
        return Row(row["samples"], row["reward"], row["turns"], row["unix_s"])
    return Row(row["step"] * BATCH, row["reward/mean"], row["rollout/turns_mean"], row["time/unix_s"])


def settings() -> dict[str, Any]:
    """The quickstart's."""
    return yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())


TRAIN = TrainSection(**settings()["train"], lr_steps=LR_STEPS)
BATCH = TRAIN.batch_groups * TRAIN.group_size


def rubato(scratch: Path, latency: str, seed: int) -> tuple[list[str], Path]:
    """Command and rows of our side: the quickstart without fabric and evaluations, on the model in `scratch`."""
    config: dict[str, Any] = settings() | {"eval": {"every": 0, "final_num_tasks": 0}}
    config["run"] |= {"name": "vs-trl", "seed": seed, "steps": STEPS}
    config["train"]["lr_steps"] = LR_STEPS
    config["model"]["path"] = str(scratch / f"model-{seed}")
    config["env"] |= {"class": f"{PEERS / 'latent_lake.py'}:LatentLake", "kwargs": {"latency": latency}}
    for name in ("fabric", "prepare"):
        del config[name]
    for role in ("fabric_controller", "optical_switch"):
        del config["actors"][role]
    file, run = scratch / "rubato.yaml", scratch / f"rubato-{latency}-{seed}"
    file.write_text(yaml.safe_dump(config))
    return [sys.executable, str(ROOT / "tools" / "launch.py"), str(file), "--run-dir", str(run)], run / "metrics.jsonl"


def trl(scratch: Path, latency: str, seed: int, python: str) -> tuple[list[str], Path]:
    """Command and rows of TRL's side."""
    out = scratch / f"trl-{latency}-{seed}"
    out.mkdir()
    given = {"model": str(scratch / f"model-{seed}"), "seed": seed, "steps": STEPS, "latency": latency, "out": str(out)}
    sections = {"train": TRAIN.model_dump(), "rollout": RolloutSection(**settings()["rollout"]).model_dump()}
    (out / "settings.json").write_text(json.dumps(given | sections | {"threads": os.cpu_count()}))
    return [python, str(PEERS / "trl_grpo.py"), str(out / "settings.json")], out / "rows.jsonl"


def figures(played: Played, samples: int) -> dict[str, float]:
    """Of one run; rewards after `samples` samples, which both sides reached, and at its end."""
    first, last = played.rows[0], played.rows[-1]
    span_s, num = last.unix_s - first.unix_s, last.samples - first.samples
    episodes_turns = sum(row.turns for row in played.rows[1:]) / len(played.rows[1:])
    return {
        "samples_s": num / span_s,
        "turns_s": num * episodes_turns / span_s,
        "cpu_s_per_1000": (cpu_at(played.looks, last.unix_s) - cpu_at(played.looks, first.unix_s)) / num * 1000,
        "first_step_s": first.unix_s - played.began,
        "samples": last.samples,
        "reward_after_samples": reward_at(played.rows, samples),
        "reward_at_end": reward_at(played.rows, last.samples),
        "rss_mib": max(look.rss_mib for look in played.looks),
        "pss_mib": max(look.pss_mib for look in played.looks),
    }


def cpu_at(looks: Sequence[Look], unix_s: float) -> float:
    """At the look nearest to then."""
    return min(looks, key=lambda look: abs(look.unix_s - unix_s)).cpu_s


def reward_at(rows: Sequence[Row], samples: int) -> float:
    """Mean of the last batches up to `samples`."""
    return statistics.fmean([row.reward for row in rows if row.samples <= samples][-SMOOTH:])


def point(latency: str, runs: Sequence[tuple[Played, Played]]) -> dict[str, Any]:
    """Medians over the runs of one latency: (ours, TRL's) of each seed."""
    reached = min(played.rows[-1].samples for run in runs for played in run)
    sides = [[figures(played, reached) for played in side] for side in zip(*runs, strict=True)]
    ours, theirs = ({key: statistics.median(run[key] for run in side) for key in side[0]} for side in sides)
    return {
        "latency": latency,
        "rubato_samples_s": ours["samples_s"],
        "trl_samples_s": theirs["samples_s"],
        "ratio": ours["samples_s"] / theirs["samples_s"],
        "reward_after": reached,
        "rubato": ours,
        "trl": theirs,
        "runs": [{"rubato": one, "trl": other} for one, other in zip(*sides, strict=True)],
    }


COLUMNS = {
    "samples_s": "samples/s",
    "turns_s": "turns/s",
    "cpu_s_per_1000": "CPU s per 1000 samples",
    "first_step_s": "s to first step",
    "samples": "samples trained",
    "reward_after_samples": "reward after equal samples",
    "reward_at_end": "reward at the end",
    "rss_mib": "RSS MiB",
    "pss_mib": "PSS MiB",
}


def table(points: Iterable[Mapping[str, Any]]) -> str:
    """As in docs/benchmarks.md."""
    found = list(points)
    head = ["", *(f"{p['latency']}: {side}" for p in found for side in ("Rubato", "TRL"))]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * 2 * len(found)]
    for key, name in COLUMNS.items():
        cells = [f"{p[side][key]:.2f}" if "reward" in key else f"{p[side][key]:.0f}" for p in found for side in ("rubato", "trl")]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    ratios = ", ".join(f"{p['latency']} {p['ratio']:.2f} ×" for p in found)
    return "\n".join([*lines, f"samples/s over TRL's: {ratios}"])


def make_model(scratch: Path, seed: int) -> None:
    """The quickstart's base model, which both sides start from."""
    from rubato.actors.training.base_model import make

    make(scratch / f"model-{seed}", seed, lambda _what, _done: None)


async def measure(asked: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Every point, its runs in turn: ours first with odd seeds, TRL's with even ones."""
    runs: dict[str, list[tuple[Played, Played]]] = {latency: [] for latency in asked.latency}
    for seed in range(1, asked.runs + 1):
        make_model(scratch, seed)
        for latency, done in runs.items():
            sides = {"Rubato": rubato(scratch, latency, seed), "TRL": trl(scratch, latency, seed, asked.trl_python)}
            played: dict[str, Played] = {}
            for name in sorted(sides, reverse=seed % 2 == 0):
                command, rows = sides[name]
                played[name] = await play(command, rows, scratch / f"{name}.log", asked.seconds)
                print(f"{latency}, seed {seed}, {name}: {told(played[name])}", file=sys.stderr, flush=True)
            done.append((played["Rubato"], played["TRL"]))
    return [point(latency, done) for latency, done in runs.items()]


async def short(scratch: Path) -> None:
    """Rubato's side alone, for three batches."""
    make_model(scratch, 1)
    played = await play(*rubato(scratch, LATENCIES[0], 1), scratch / "Rubato.log", 0.0)
    print(f"{NO_RESULT}\n{LATENCIES[0]}, seed 1, Rubato: {told(played)}")


def told(played: Played) -> str:
    """The rate of one run."""
    return f"{figures(played, played.rows[-1].samples)['samples_s']:.1f} samples/s"


def versions(python: str) -> dict[str, str]:
    """Of what is compared, in the interpreter of TRL. Raises RuntimeError where it has none."""
    names = ["trl", "transformers", "torch"]
    look = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    found = subprocess.run([python, "-c", look], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(
            f"{python} has no trl. Run pip install -e '.[bench]' -c constraints.txt, or name an interpreter that has it with --trl-python"
        )
    return json.loads(found.stdout)


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="seeds per point and side")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each run, from its first trained batch on")
    parser.add_argument("--latency", nargs="+", choices=LATENCIES, default=LATENCIES)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has trl")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="without FILE in place of the table")
    parser.add_argument("--short", action="store_true", help="three batches of Rubato's side: it starts, its rate says nothing")
    asked = parser.parse_args(argv)
    if asked.runs < 1 or not 0 < asked.seconds < float("inf"):
        parser.error("--runs must be at least 1, and --seconds a finite number above 0")
    try:
        if asked.json not in (None, "-"):
            Path(asked.json).touch()
        known = {} if asked.short else versions(asked.trl_python)
    except (RuntimeError, OSError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended then too
    try:
        with tempfile.TemporaryDirectory(prefix="rubato-vs-trl-") as scratch:
            if asked.short:
                asyncio.run(short(Path(scratch)))
                return ExitCode.DONE
            points = asyncio.run(measure(asked, Path(scratch)))
    except RuntimeError as error:
        print(f"vs_trl: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    facts = {"points": points, "versions": known, "seconds": asked.seconds, "cores": os.cpu_count()}
    image = json.dumps(facts, indent=1)
    print(image if asked.json == "-" else table(points))
    if asked.json not in (None, "-"):
        Path(asked.json).write_text(image)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

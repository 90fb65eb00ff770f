"""Do predicted quantiles of lengths hold on what live runs sampled? Steps of a run's samples.jsonl, each forecast from those before it, as live.

python tools/bench/forecast.py RUN… [--json FILE]
python tools/bench/forecast.py --play FOLDER [--seed 1] [key.sub=value …]

A step's trajectories are forecast at its start, and once half and four fifths of them have ended; those still running then count. Of each
quantile the share that ended within it is compared with it, over all steps together. Time in environments counts as the tokens that would
be sampled meanwhile; how a running trajectory's work divides at that moment is not on record, so it is taken to divide as in the end. As
live, the curves know of no limit on tokens, and what they say is cut at that of the trajectory's task.

`--play` first plays a run in FOLDER, on real processes: five tasks whose lengths are drawn from configs/lengths, a sixteenth as long, by
scripted engines; two rollouts of one prompt are alike, one task's lengths grow, and one is agentic, with up to twelve turns and
time in environments.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actors.samples.parts import read_lines  # noqa: E402
from actors.scheduling.lengths import STEPS_KEPT  # noqa: E402
from actors.training.base_model import make_tokenizer, write_tokenizer  # noqa: E402
from planning.forecast import WINDOW, Over, Seen, fit, over  # noqa: E402
from runtime.launch.children import die_with_parent  # noqa: E402
from tools.bench.peers.long_turns import CURVES  # noqa: E402

QUANTILES = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95)
ENDED = (0.0, 0.5, 0.8)

STEPS, PROMPTS, GROUPS, SIZE = 24, 40, 40, 8
MOST = 1024
"""Tokens of a response: the longest of the curves, where `drift` is cut."""
LIMIT_S = 540.0


class Step(NamedTuple):
    """Its trajectories, tokens per second of their turns, and the most tokens of each task."""

    seen: list[Seen]
    tokens_s: float
    most: Mapping[str, int]


class Off(NamedTuple):
    """By how much the share of `num` trajectories within a quantile is off, at worst."""

    ended: float
    quantile: float
    off: float
    num: int


def steps_of(run: Path) -> list[Step]:
    """Trained or without spread: what was whole when its step was claimed, in the order of steps. Raises ValueError, one sentence."""
    file = run / "samples.jsonl"
    if not file.is_file():
        raise ValueError(f"{file} is not there: name the folder of a run.")
    found: dict[int, list[Seen]] = defaultdict(list)
    turns_s: dict[int, float] = defaultdict(float)
    for line in read_lines(run):
        sample = json.loads(line)
        if sample.get("step") and sample.get("purpose") == "train" and sample.get("tokens"):
            env_s = sample.get("env_s", 0.0)
            found[sample["step"]].append(Seen(sample["task"], str(sample["row"]), float(sample["tokens"]), env_s))
            turns_s[sample["step"]] += sample.get("wall_s", 0.0) - env_s
    tokens = {step: sum(each.tokens for each in seen) for step, seen in found.items()}
    most = limits(run)
    rates = {step: tokens[step] / turns_s[step] if turns_s[step] > 0 else 1.0 for step in found}
    return [Step(found[step], rates[step], most) for step in sorted(found)]


def limits(run: Path) -> dict[str, int]:
    """Tokens that all turns of a trajectory of each task may have, as the run's config says; none where that is gone."""
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text()) if file.is_file() else {}
    usual, tasks = config.get("rollout", {}), config.get("tasks", {})
    of = {
        name: usual | {key: value for key, value in task.items() if value is not None} for name, task in tasks.items()
    }
    keys = ("max_turns", "max_new_tokens")
    return {name: math.prod(task[key] for key in keys) for name, task in of.items() if all(key in task for key in keys)}


def worst(steps: Sequence[Step], task: str = "") -> list[Off]:
    """For each share of a step that has ended, the quantile that is most off, of one task or of all.

    Of a length that many have any share up to theirs is right.
    """
    found: list[Off] = []
    overs = remembered(steps)
    for ended in ENDED:
        below, at_most, num = dict.fromkeys(QUANTILES, 0), dict.fromkeys(QUANTILES, 0), 0
        for at in range(WINDOW, len(steps)):
            first = max(0, at - STEPS_KEPT)
            for quantiles, work in forecast(overs[first:at], steps[at], ended, task, rate(steps[first:at])):
                num += 1
                for quantile, most in quantiles.items():
                    below[quantile] += work < most - 1e-6
                    at_most[quantile] += work <= most + 1e-6
        if num:
            off = {q: max(below[q] / num - q, q - at_most[q] / num, 0.0) for q in QUANTILES}
            quantile = max(off, key=off.__getitem__)
            found.append(Off(ended, quantile, off[quantile], num))
    return found


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second of turns."""
    return sum(each.tokens_s for each in steps) / len(steps)


def remembered(steps: Sequence[Step]) -> list[Over]:
    """Each step as the orchestrator keeps it once it is over."""
    found: list[Over] = []
    for at, step in enumerate(steps):
        first = max(0, at - STEPS_KEPT)
        found.append(over(found[first:], step.seen, tokens_s=rate(steps[first : at + 1])))
    return found


def forecast(
    before: Sequence[Over], step: Step, ended: float, task: str, tokens_s: float
) -> Iterator[tuple[dict[float, float], float]]:
    """Of each trajectory that runs still once a share of `step` has ended: its quantiles of work, and its work in truth."""
    works = {seen: seen.tokens + seen.env_s * tokens_s for seen in step.seen}
    lengths = sorted(works[seen] for seen in step.seen)
    far = lengths[int(ended * len(lengths))] if ended else 0.0

    def until(seen: Seen) -> Seen:
        part = far / works[seen]
        return seen._replace(tokens=seen.tokens * part, env_s=seen.env_s * part, done=False)

    now = [seen if works[seen] <= far else until(seen) for seen in step.seen]
    made = fit(before, now if ended else (), tokens_s=tokens_s)
    for seen in step.seen:
        if works[seen] > far and task in ("", seen.task):
            left = {quantile: made.remaining(until(seen), quantile) for quantile in QUANTILES}
            most = step.most.get(task or seen.task, math.inf) - until(seen).tokens
            ends = {quantile: min(each.tokens, most) + each.env_s * tokens_s for quantile, each in left.items()}
            yield {quantile: far + end for quantile, end in ends.items()}, works[seen]


def job(folder: Path, seed: int) -> dict[str, Any]:
    """The config of `--play`."""
    peers = f"{ROOT}/tools/bench/peers/long_turns.py"
    agentic = {"max_turns": 12, "max_new_tokens": MOST // 4}
    return {
        "run": {"name": "long-turns", "steps": STEPS, "seed": seed},
        "actors": {
            "sample_buffer": {"class": "actors.samples.buffer:SampleBuffer"},
            "llm_proxy": {"class": "actors.proxy.proxy:LLMProxy"},
            "engine": {"class": f"{peers}:LongTurnsEngine", "count": 2},
            "env_manager": {"class": "actors.envs.manager:EnvManager"},
            "trainer": {"class": "actors.training.trainer:Trainer"},
        },
        "tasks": {
            name: {"data": {"path": str(folder / f"{name}.jsonl"), "verifier": f"{peers}:worth"}}
            | (agentic if name == "agent" else {"max_turns": 1, "max_new_tokens": MOST})
            for name in CURVES
        },
        "model": {"path": str(folder / "model")},
        "engine": {
            "kind": "scripted", "num_slots": 256, "max_len": 8192, "stream_every": 256,
            "scripted": {"stop_share": 0.0, "vocab_size": make_tokenizer().get_vocab_size()},
        },
        "env": {"isolation": "inline", "concurrency": GROUPS * SIZE},
        "rollout": {"max_len": 4 * MOST},
        "staleness": {"alpha": 0},
        "train": {"kind": "scripted", "batch_groups": GROUPS, "group_size": SIZE, "scripted": {"step_s": 0.0}},
        "check": {"enabled": False},
        "eval": {"every": 0, "final_num_tasks": 0},
        "report": {"finish": ""},
    }  # fmt: skip


def play(folder: Path, seed: int, overrides: Sequence[str]) -> Path:
    """A run from start to end; its folder. Raises ValueError, one sentence."""
    write_tokenizer(folder / "model")
    for name in CURVES:
        rows = ({"prompt": f"{number} {name}", "answer": ""} for number in range(PROMPTS))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(json.dumps(job(folder, seed)))
    command = [sys.executable, ROOT / "tools/launch.py", folder / "job.yaml", *overrides, "--run-dir", folder / "run"]
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=LIMIT_S, preexec_fn=die_with_parent, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"the run ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return folder / "run"


def report(run: str, steps: Sequence[Step]) -> dict[str, list[Off]]:
    """Print lines for a run and each of its tasks."""
    if len(steps) <= WINDOW:
        print(f"{run}: no more than {WINDOW} steps, nothing to forecast")
        return {}
    tasks = {seen.task for step in steps for seen in step.seen}
    found = {task: worst(steps, task) for task in ("", *sorted(tasks if len(tasks) > 1 else ()))}
    for task, offs in found.items():
        for each in offs:
            print(
                f"{run} {task:6} {each.ended:4.0%} ended, {each.num:5} running: "
                f"quantile {each.quantile} is off by {100 * each.off:.1f} points, at worst"
            )
    return found


def main(argv: Sequence[str]) -> int:
    """Print lines for each run and share; write JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="or, with --play, key.sub=value")
    parser.add_argument("--play", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    if not asked.runs and not asked.play:
        parser.error("name the folders of runs, or a folder to --play one in")
    try:
        runs = [play(asked.play.resolve(), asked.seed, asked.runs)] if asked.play else [Path(run) for run in asked.runs]
        found = {str(run): report(str(run), steps_of(run)) for run in runs}
    except ValueError as error:
        parser.error(str(error))
    if asked.json:
        told = {
            run: {task: [each._asdict() for each in offs] for task, offs in of.items()} for run, of in found.items()
        }
        asked.json.write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

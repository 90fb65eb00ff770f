"""Stragglers that a step waits for beside those that are dropped (`staleness.stragglers`), live, on scripted engines at the same bound.

python tools/bench/stragglers.py [--seeds 3] [--alpha 1] [--json FILE] [--short] [key.sub=value …]

Both arms of a seed get the same prompts in the same order, one-turn ones, whose responses are as long as RollPacker's scenario of 8k has them
in RLSim (configs/workloads/rollpacker_8k.yaml), shrunk; a harder prompt has longer ones. Of two tasks, `easy` has the easier half of the
prompts, `hard` the others. Every token of an engine takes the same time, which is no hardware's, and so does a step of the trainer.
Per arm: steps and trained tokens per second, mean tokens of a trained sample, the share of each task's samples that trained and that were
too old, and the oldest trained. What is drawn is the same, so that the tokens of `drop` over those of `wait`, which leaves nothing out, are
its bias. Both arms of a seed run at the same time. Fails where a sample was older than the bound, or `wait` dropped one for its age.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.samples.sample import TRAINED  # noqa: E402
from rubato.actors.training.base_model import make_tokenizer, write_tokenizer  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.sim.rollpacker.rollout import difficulty  # noqa: E402
from tools.bench.peers.long_tail import SHRINK, law  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

ARMS, TASKS = ("wait", "drop"), ("easy", "hard")
STEPS, SHORT_STEPS = 40, 4
GROUPS, SIZE = 8, 4
TOKEN_S, STEP_S = 0.004, 0.2
LIMIT_S = 600.0


def rows(seed: int, task: str) -> list[dict[str, str]]:
    """Prompts of one task: more than are drawn. The law's own difficulty says whose they are."""
    numbers = range(10_000 * seed, 10_000 * seed + 8 * STEPS * GROUPS)
    return [{"prompt": str(n), "answer": "0.5"} for n in numbers if (difficulty(0, n, 1)[1] > 0) == (task == "hard")]


def job(arm: str, seed: int, alpha: int, steps: int, folder: Path) -> dict[str, Any]:
    """Its config."""
    peers, most = f"{ROOT}/tools/bench/peers/long_tail.py", law().most // SHRINK
    return {
        "run": {"name": f"stragglers-{arm}", "steps": steps, "seed": seed},
        "actors": {
            "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
            "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
            "engine": {"class": f"{peers}:LongTailEngine", "count": 1},
            "env_manager": {"class": "rubato.actors.envs.manager:EnvManager"},
            "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
        },
        "tasks": {
            task: {"data": {"path": str(folder / f"{task}.jsonl"), "grader": f"{peers}:worth"}, "max_turns": 1, "max_new_tokens": most}
            for task in TASKS
        },
        "model": {"path": str(folder / "model")},
        "engine": {
            "kind": "scripted", "num_slots": 64, "max_len": 2 * most, "stream_every": 256,
            "scripted": {"stop_share": 0.0, "token_s": TOKEN_S, "vocab_size": make_tokenizer().get_vocab_size()},
        },
        "env": {"isolation": "inline", "concurrency": 2 * GROUPS * SIZE},
        "rollout": {"max_len": 2 * most},
        "staleness": {"alpha": alpha, "stragglers": arm},
        "train": {"kind": "scripted", "batch_groups": GROUPS, "group_size": SIZE, "scripted": {"step_s": STEP_S, "weights_mib": 0.01}},
        "check": {"enabled": False},
        "eval": {"every": 0, "final_num_tasks": 0},
        "checkpoint": {"every": steps},
        "report": {"finish": ""},
    }  # fmt: skip


def run(arm: str, seed: int, alpha: int, steps: int, overrides: Sequence[str]) -> dict[str, float]:
    """One arm's job from start to end."""
    with tempfile.TemporaryDirectory(prefix="rubato-stragglers-") as scratch:
        place = Path(scratch)
        write_tokenizer(place / "model")
        for task in TASKS:
            (place / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(seed, task)))
        (place / "job.yaml").write_text(json.dumps(job(arm, seed, alpha, steps, place)))
        command = [sys.executable, ROOT / "tools/launch.py", place / "job.yaml", *overrides, "--run-dir", place / "run"]
        done = subprocess.run(
            [str(part) for part in command], cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=LIMIT_S, preexec_fn=die_with_parent, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed}: {(done.stdout + done.stderr)[-2000:]}")
        found = measured(place / "run", alpha)
    if arm == "wait" and found["stale"]:
        raise SystemExit(f"seed {seed}: {found['stale']:.0f} samples were too old, where the step waits for them")
    print(f"seed {seed} {arm}: {told(found)}", flush=True)
    return found


def measured(folder: Path, alpha: int) -> dict[str, float]:
    """What a run that ended has to say. Raises SystemExit where a sample that was too old was trained."""
    metrics, samples = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()] for name in ("metrics.jsonl", "samples.jsonl")
    )
    if (oldest := max(row["staleness/max"] for row in metrics)) > alpha:
        raise SystemExit(f"a sample of age {oldest:g} was trained, and staleness.alpha is {alpha}")
    trained, wall_s = [each for each in samples if each["fate"] in TRAINED], metrics[-1]["time/wall_s"]
    shares = {f"{task}_{what}": metrics[-1].get(f"task/{task}/{what}_frac", 0.0) for task in TASKS for what in ("trained", "stale")}
    return {
        "steps_s": len(metrics) / wall_s,
        "tokens_s": sum(each["tokens"] for each in trained) / wall_s,
        "tokens": fmean(each["tokens"] for each in trained),
        "age_max": oldest,
        "stale": sum(each["fate"] == "stale" for each in samples),
        "stale_frac": sum(each["fate"] == "stale" for each in samples) / sum(each["fate"] != "unused" for each in samples),
        **shares,
    }


def told(found: dict[str, float]) -> str:
    of_tasks = ", ".join(f"{task} {found[f'{task}_stale']:.0%}" for task in TASKS)
    return (
        f"{found['steps_s']:.2f} steps/s and {found['tokens_s']:.0f} trained tokens/s, scripted; {found['tokens']:.1f} tokens a trained sample, "
        f"none older than {found['age_max']:.0f}; dropped {found['stale_frac']:.1%} ({of_tasks})"
    )


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alpha", type=int, default=1)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_STEPS} steps of one seed: it starts, its figures say nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_intermixed_args(argv)
    if asked.seeds < 1:
        parser.error(f"--seeds is {asked.seeds}; it must be at least 1")
    if asked.short:
        print(NO_RESULT, flush=True)
    steps, seeds = (SHORT_STEPS, 1) if asked.short else (STEPS, asked.seeds)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in range(1, seeds + 1):
        with ThreadPoolExecutor(len(ARMS)) as pool:
            running = {arm: pool.submit(run, arm, seed, asked.alpha, steps, asked.overrides) for arm in ARMS}
            for arm in ARMS:
                found[arm].append(running[arm].result())
    means = {arm: {name: fmean(each[name] for each in found[arm]) for name in found[arm][0]} for arm in ARMS}
    ratios = {
        name: [b[name] / a[name] for a, b in zip(found["wait"], found["drop"], strict=True)] for name in ("steps_s", "tokens_s", "tokens")
    }
    for arm in ARMS:
        print(f"{arm}: {told(means[arm])}")
    spread = {name: f"{fmean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for name, each in ratios.items()}
    print(f"drop over wait: steps/s {spread['steps_s']}, trained tokens/s {spread['tokens_s']}, tokens a trained sample {spread['tokens']}")
    if asked.json:
        asked.json.write_text(json.dumps({"alpha": asked.alpha, "means": means, "ratios": ratios, "seeds": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""RollPacker's tail batching beside the same job without it, live, on paced engines at α = 0: steps per second and reward per sample.

python tools/bench/tail.py [--seeds 5] [--json FILE] [key.sub=value …]

One epoch of a data set of single-turn prompts, ten steps: two periods of four short rounds and a long one. Both arms of a seed train the
same prompts once. Responses are as long as RollPacker's scenario of 8k has it in RLSim (configs/workloads/rollpacker_8k.yaml), shrunk;
a harder prompt has longer responses, which are right less often, so that an arm which left prompts out would have more reward. Everything
is live but the engines' time, which is paced (docs/pace.md). Both arms of a seed run at the same time.
`--json` writes {"off_steps_s", "on_steps_s", "gain", "reward": {"off", "on", "difference", "noise"}, "tokens", "seeds": [...]}: means over the
seeds; noise is twice the standard error of the difference, where each sample is worth 0 or 1. Fails where an arm did not train each prompt
once, or more than 2 % of its steps outlasted their pace.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.engines.pace import MOST_OUTLASTED  # noqa: E402
from rubato.actors.samples.sample import TRAINED  # noqa: E402
from rubato.actors.training.base_model import make_tokenizer, write_tokenizer  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.sim.rollpacker.rollout import difficulty  # noqa: E402
from tools.bench.peers.long_tail import SHRINK, law  # noqa: E402

STEPS, GROUPS, SIZE = 10, 16, 4
ENGINES, SCALE = 2, 2.0
LIMIT_S = 280.0
ARMS = ("off", "on")


class Measured(NamedTuple):
    steps_s: float
    reward: float
    """Mean over trained samples."""
    tokens: float
    """Mean over trained samples."""
    outlasted: float
    """Share of the engines' steps."""


def rows(seed: int) -> list[dict[str, str]]:
    """The data set of a seed: each prompt's number, and the share of its responses that is right."""
    numbers = [1000 * seed + place for place in range(STEPS * GROUPS)]
    normal = NormalDist()
    return [{"prompt": str(n), "answer": f"{1 - normal.cdf(difficulty(0, n, 1)[1]):.3f}"} for n in numbers]


def job(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Its config."""
    peers = f"{ROOT}/tools/bench/peers/long_tail.py"
    most = law().most // SHRINK
    return {
        "run": {"name": f"tail-{arm}", "steps": STEPS, "seed": seed},
        "actors": {
            "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
            "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
            "engine": {"class": f"{peers}:LongTailEngine", "count": ENGINES},
            "env_manager": {"class": "rubato.actors.envs.manager:EnvManager"},
            "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
        },
        "tasks": {"numbers": {
            "data": {"path": str(folder / "rows.jsonl"), "grader": f"{peers}:worth"}, "max_turns": 1, "max_new_tokens": most
        }},
        "model": {"path": str(folder / "model")},
        "engine": {
            "kind": "scripted", "num_slots": 64, "max_len": 2 * most, "max_batch_tokens": 2048, "stream_every": 256,
            "scripted": {"stop_share": 0.0, "vocab_size": make_tokenizer().get_vocab_size()},
            "pace": {"hardware": "h800", "model": "qwen3-8b", "scale": SCALE},
        },
        "env": {"isolation": "inline", "concurrency": 128},
        "rollout": {"max_len": 2 * most},
        "staleness": {"alpha": 0},
        "tail_batching": {"enabled": arm == "on"},
        "train": {"kind": "scripted", "batch_groups": GROUPS, "group_size": SIZE, "scripted": {"step_s": 0.0, "weights_mib": 0.01}},
        "check": {"enabled": False},
        "eval": {"every": 0, "final_num_tasks": 0},
        "checkpoint": {"every": STEPS},
        "report": {"finish": ""},
    }  # fmt: skip


def run(arm: str, seed: int, overrides: Sequence[str]) -> Measured:
    """One arm's job from start to end."""
    with tempfile.TemporaryDirectory(prefix="rubato-tail-") as scratch:
        place = Path(scratch)
        write_tokenizer(place / "model")
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(seed)))
        (place / "job.yaml").write_text(json.dumps(job(arm, seed, place)))
        command = [sys.executable, ROOT / "tools/launch.py", place / "job.yaml", *overrides, "--run-dir", place / "run"]
        done = subprocess.run(
            [str(part) for part in command], cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=LIMIT_S, preexec_fn=die_with_parent, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed}: {(done.stdout + done.stderr)[-2000:]}")
        found = measured(place / "run")
    print(
        f"seed {seed} {arm:4} {found.steps_s:.4f} steps/s, reward {found.reward:.3f}, {found.tokens:.1f} tokens a sample, paced, "
        f"{100 * found.outlasted:.1f} % of steps outlasted", flush=True,
    )  # fmt: skip
    return found


def measured(folder: Path) -> Measured:
    """What a run that ended has to say. Raises SystemExit where it did not train each prompt once."""
    metrics, samples = (lines(folder / name) for name in ("metrics.jsonl", "samples.jsonl"))
    trained = [sample for sample in samples if sample["fate"] in TRAINED]
    times = Counter(row for row, _ in {(sample["row"], sample["group_id"]) for sample in trained})
    if dict(times) != dict.fromkeys(range(STEPS * GROUPS), 1) or len(trained) != STEPS * GROUPS * SIZE:
        raise SystemExit(f"{len(trained)} samples of {len(times)} prompts were trained, and not each prompt once")
    return Measured(
        STEPS / metrics[-1]["time/wall_s"],
        fmean(sample["reward"] for sample in trained),
        fmean(sample["tokens"] for sample in trained),
        metrics[-1]["paced/outlasted_frac"],
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summed_up(found: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """As `--json` writes it."""
    off = found["off"]
    rewards = {arm: fmean(each.reward for each in found[arm]) for arm in ARMS}
    samples = STEPS * GROUPS * SIZE * len(off)
    rates = {arm: fmean(each.steps_s for each in found[arm]) for arm in ARMS}
    return {
        "off_steps_s": rates["off"],
        "on_steps_s": rates["on"],
        "gain": rates["on"] / rates["off"],
        "reward": {
            **rewards,
            "difference": rewards["on"] - rewards["off"],
            "noise": 2 * math.sqrt(sum(mean * (1 - mean) / samples for mean in rewards.values())),
        },
        "tokens": {arm: fmean(each.tokens for each in found[arm]) for arm in ARMS},
        "outlasted": {arm: max(each.outlasted for each in found[arm]) for arm in ARMS},
        "seeds": [{arm: found[arm][place]._asdict() for arm in ARMS} for place in range(len(off))],
        "paced": True,
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    if asked.seeds < 1:
        parser.error(f"--seeds is {asked.seeds}; it must be at least 1")
    found: dict[str, list[Measured]] = {arm: [] for arm in ARMS}
    for seed in range(1, asked.seeds + 1):
        with ThreadPoolExecutor(len(ARMS)) as pool:
            running = {arm: pool.submit(run, arm, seed, asked.overrides) for arm in ARMS}
            for arm in ARMS:
                found[arm].append(running[arm].result())
    summary = summed_up(found)
    if asked.json:
        asked.json.write_text(json.dumps(summary, indent=2))
    reward = summary["reward"]
    print(
        f"{summary['gain']:.2f} x the steps/s, paced; reward {reward['on']:.3f} beside {reward['off']:.3f}: "
        f"a difference of {reward['difference']:+.3f} ± {reward['noise']:.3f}"
    )
    late = [arm for arm, share in summary["outlasted"].items() if share > MOST_OUTLASTED]
    if late:
        print(f"more than {100 * MOST_OUTLASTED:g} % of the steps outlasted their pace: these figures say nothing")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

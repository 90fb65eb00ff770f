"""The parts of tools/bench/gpu.py that are whole jobs: the quickstart, GSM8K's shape on generated data, and a trainer of several ranks."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rubato.actors.config import TrainSection
from tools.bench.gpu_model import SHAPES, make_model, word_problems, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]

SHORT_QUICKSTART = (
    "run.steps=2", "train.batch_groups=4", "train.group_size=4", "eval.every=0", "eval.final_num_tasks=8", "actors.engine.count=1",
    'report.finish=""',
)  # fmt: skip
SHORT_GSM8K = (
    "run.steps=3", "train.batch_groups=2", "train.group_size=2", "env.concurrency=8", "engine.num_slots=8", "tasks.gsm8k.max_new_tokens=16",
)  # fmt: skip

SWAPS = ("weights/pull_s", "weights/pause_s", "weights/hidden_frac")


class Ended(NamedTuple):
    """A job that is over."""

    rows: list[dict[str, float]]
    evals: list[dict[str, float]]
    wall_s: float
    agreed: str
    """What the comparison of trainer and engine said."""

    def mean(self, name: str) -> float:
        """Of all steps but the first two, during which kernels warm up and nothing overlaps yet; NaN where none has it."""
        found = [row[name] for row in self.rows[2:] if name in row]
        return fmean(found) if found else float("nan")


def quickstart_part(bench: Any) -> dict[str, Any]:
    """The README's, with engines and trainer on the device."""
    short = SHORT_QUICKSTART if bench.shapes == ["tiny"] else ()
    ended = launched("configs/quickstart.yaml", f"model.device={bench.device}", *short)
    rewards = [row["reward/mean"] for row in ended.rows]
    found = {
        "steps": len(rewards), "reward_first": rewards[0], "reward_last": fmean(rewards[-10:]),
        "held_out": ended.evals[-1]["reward"], "train_s": ended.rows[-1]["time/wall_s"], "wall_s": ended.wall_s, "agreed": ended.agreed,
    }  # fmt: skip
    print(f"quickstart: reward {rewards[0]:.2f} to {found['reward_last']:.2f}, held out {found['held_out']:.2f}, in {found['train_s']:.0f} s "
          f"of {ended.wall_s:.0f} s", flush=True)  # fmt: skip
    return found


def gsm8k_part(bench: Any, *more: str) -> dict[str, Any]:
    """configs/gsm8k_qwen3_0.6b.yaml with a random model of that shape, generated word problems and answers of 256 tokens."""
    short, shape = (SHORT_GSM8K, "tiny") if bench.shapes == ["tiny"] else ((), "0.6B")
    kind = "vllm" if find_spec("vllm") is not None and bench.device == "cuda" else "torch"
    with tempfile.TemporaryDirectory() as scratch:
        model, data = Path(scratch, "model"), Path(scratch, "word_problems.jsonl")
        make_model(model, shape, bench.device)
        write_tokenizer(model, SHAPES[shape]["vocab_size"])
        data.write_text("".join(json.dumps(row) + "\n" for row in word_problems(2000, seed=1)))
        ended = launched(
            "configs/gsm8k_qwen3_0.6b.yaml", f"model.path={model}", f"model.device={bench.device}", f"engine.kind={kind}",
            *(() if kind == "vllm" else ("engine.vllm={}",)), f"tasks.gsm8k.data.path={data}", "tasks.gsm8k.data.eval_path=''",
            "tasks.gsm8k.data.eval_rows=100", f"tasks.gsm8k.data.grader={ROOT}/tools/bench/gpu_model.py:near",
            "tasks.gsm8k.max_new_tokens=256", "engine.max_len=768", "rollout.max_len=768", "run.steps=8", "eval.every=0",
            "eval.final_num_tasks=0", "report.finish=''", "rollout.chat_template_kwargs={}", *short, *more,
        )  # fmt: skip
    step_s = ended.mean("time/step")
    swaps = {name.partition("/")[2]: [row[name] for row in ended.rows if name in row] for name in SWAPS}
    found = {
        "engine": kind, "steps": len(ended.rows), "step_s": step_s, "train_s": ended.mean("time/train"),
        "wait_for_batch_frac": ended.mean("time/wait_for_batch") / step_s, "publish_s": ended.mean("time/publish"),
        "train_tokens_s": ended.mean("perf/train_tokens_s"), "samples_s": ended.mean("perf/samples_s"),
        "sampled_tokens_s": ended.mean("perf/samples_s") * ended.mean("rollout/sampled_mean"), "weights_bytes": ended.rows[-1]["weights/bytes"],
        **{name: median(seen) for name, seen in swaps.items() if seen},
        "mismatch_kl": ended.mean("policy/mismatch_kl"), "staleness_max": max(row["staleness/max"] for row in ended.rows),
        "wall_s": ended.wall_s, "agreed": ended.agreed,
    }  # fmt: skip
    if kind == "torch":
        found["missing"] = "vLLM is not installed: the built-in engine took its place"
    pause = f"pause {1e3 * found['pause_s']:.1f} ms, {found['hidden_frac']:.1%} hidden" if all(swaps.values()) else "no row has a swap"
    print(f"gsm8k ({kind}): {step_s:.1f} s a step, {found['samples_s']:.1f} samples/s, {pause}; {ended.agreed}", flush=True)
    return found


def ranks_part(bench: Any) -> dict[str, Any]:
    """The job of `gsm8k_part` with a trainer of two ranks, where there are two GPUs and a trainer that has ranks."""
    import torch

    missing = [] if "mesh" in TrainSection.model_fields else ["train.mesh is not built in: a trainer is one rank"]
    if torch.cuda.device_count() < 2:
        missing.append(f"two GPUs: torch sees {torch.cuda.device_count()}")
    if missing:
        print(f"ranks: nothing was measured, for lack of: {'; '.join(missing)}")
        return {"missing": "; ".join(missing)}
    return gsm8k_part(bench, "train.mesh={shard: 2}")


def launched(config: str, *overrides: str) -> Ended:
    """Run a job to its end. What it says goes to standard output; where it fails, so does this program, with its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run")
        command = [sys.executable, ROOT / "tools" / "launch.py", ROOT / config, *overrides, "--run-dir", run]
        began, said = time.perf_counter(), list[str]()
        with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            for line in job.stdout:
                print(line, end="", flush=True)
                said.append(line)
        wall_s = time.perf_counter() - began
        if job.returncode:
            sys.exit(job.returncode)
        agreed = re.search(r"trainer and engine agree: .*", "".join(said))
        return Ended(rows_of(run / "metrics.jsonl"), rows_of(run / "evals.jsonl"), wall_s, agreed[0].strip() if agreed else "")


def rows_of(path: Path) -> list[dict[str, float]]:
    """Objects of a file of lines, none where there is no file."""
    lines: Sequence[str] = path.read_text().splitlines() if path.exists() else ()
    return [json.loads(line) for line in lines]

"""What several training ranks cost beside one process, and how soon they train again when one of them is killed.

python tools/bench/ranks.py [--json FILE] [--short]

`grad_rel_err`: largest ‖Δ‖/‖g‖ of a tensor's gradient, 2 ranks against one process, float32. `overhead_2_over_1`: CPU seconds of both ranks
over those of the one process for the same steps, whatever else the machine does; `wall_2_over_1` is by the clock. `peak_host_bytes`: memory of
the largest rank while it loads, trains and saves, beyond what it had when it was forked; `peak_host_bytes_1` of the one process. `pad_frac`:
what padding would be of a micro-batch's tokens; rows have none, and `pad_frac_attention` of what their attention computes on. `start_s`: in a job of 2 ranks, from a rank's process to its first forward pass.
`restart_s`: from the death of one rank noticed to the next forward pass of all. With --short: it starts, its figures say nothing.
"""

import argparse
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from rubato.actors.config import MeshSection, ModelSection, TrainSection  # noqa: E402
from rubato.actors.messages.generation import VersionSpan  # noqa: E402
from rubato.actors.messages.samples import Segment, Ticket, Trajectory  # noqa: E402
from rubato.actors.ranks.meeting import Meeting  # noqa: E402
from rubato.actors.ranks.torch_rank import TorchRank  # noqa: E402
from rubato.actors.training.torch_train import TorchTrainEngine  # noqa: E402
from tools.bench.forked import forked  # noqa: E402
from tools.bench.padding import shares  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32}
SHORT_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
MICRO_BATCH_TOKENS = 2048
LIMIT_S = 200.0

JOB = """
run: {name: ranks, steps: 100000}
prepare: [rubato.actors.training.base_model]
actors:
  sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}
  llm_proxy: {class: "rubato.actors.proxy.proxy:LLMProxy"}
  engine: {class: "rubato.actors.engines.worker:EngineWorker"}
  env_manager: {class: "rubato.actors.envs.manager:EnvManager"}
  trainer: {class: "rubato.actors.training.trainer:Trainer"}
model: {path: model}
env: {isolation: inline, concurrency: 8}
engine: {kind: scripted, scripted: {token_s: 0.0}}
rollout: {max_turns: 3, max_new_tokens: 2}
train: {batch_groups: 2, group_size: 2, mesh: {shard: 2}}
check: {enabled: false}
eval: {every: 0, final_num_tasks: 0}
checkpoint: {every: 1, keep: 2}
report: {finish: ""}
"""
"""A trainer that learns beside an engine that answers at once."""


def batch(seed: int, num_groups: int, longest: int) -> list[list[Trajectory]]:
    """Groups of four rollouts of a fifth of `longest` to all of it."""
    chance = random.Random(seed)
    return [[_rollout(chance, group, index, longest) for index in range(4)] for group in range(num_groups)]


def _rollout(chance: random.Random, group: int, index: int, longest: int) -> Trajectory:
    num = chance.randrange(longest // 5, longest)
    tokens = [chance.randrange(32) for _ in range(num)]
    mask = [0, *[1] * (num - 1)]
    segment = Segment(struct.pack(f"<{num}i", *tokens), bytes(mask), struct.pack(f"<{num}f", *([-3.0] * num)), (VersionSpan(0, 1, num),))
    return Trajectory(Ticket("t", f"g{group}", 1, 0, 0, 0), (segment,), float(index), 1, False, 0.1)


def memory(key: str) -> int:
    """Bytes, by /proc: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def measured(engine: Any, model: Path, folder: Path, steps: list[list[list[Trajectory]]]) -> dict[str, Any]:
    """Gradients of the first step, and what loading, training and saving took."""
    before = memory("VmRSS")
    grads: dict[str, Any] = {}
    clip = engine._clip

    def kept() -> Any:
        for name, master in engine._masters.items():
            grads[name] = (master.grad.full_tensor() if engine.num_ranks > 1 else master.grad).double().tolist()
        return clip()

    engine.load(model, None)
    engine._clip = kept
    engine.train(1, steps[0])
    engine._clip = clip
    began, cpu = time.perf_counter(), time.process_time()
    for number, groups in enumerate(steps[1:], 2):
        engine.train(number, groups)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    if engine.num_ranks > 1:
        engine.saved(1).write(folder)
    else:
        engine.snapshot(term=1)(folder / "step_1")
    return {"grads": grads, "wall": wall, "cpu": cpu, "peak": max(0, memory("VmHWM") - before)}


def computed(folder: Path, *, short: bool) -> dict[str, float]:
    """What ranks compute beside one process, each in a process forked of this one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    sizes = SHORT_SIZES if short else SIZES
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024}
    Qwen3ForCausalLM(Qwen3Config(**heads, **sizes)).save_pretrained(folder / "model")
    steps = [batch(seed, 1 if short else 4, 20 if short else 200) for seed in range(2 if short else 4)]
    section = ModelSection(path=str(folder / "model"))

    def one(rank: int) -> dict[str, Any]:
        train = TrainSection(micro_batch_tokens=MICRO_BATCH_TOKENS, minibatches=1)
        return measured(TorchTrainEngine(section, train, steps=9, seed=1), folder / "model", folder, steps)

    def two(rank: int) -> dict[str, Any]:
        train = TrainSection(micro_batch_tokens=MICRO_BATCH_TOKENS, minibatches=1, mesh=MeshSection(shard=2))
        engine = TorchRank(section, train, steps=9, seed=1, rank=rank, meet=Meeting(str(folder / "store")))
        return measured(engine, folder / "model", folder, steps)

    alone, ranks = forked(1, folder, one)[0], forked(2, folder, two)
    lengths = [len(t.segments[0].mask) for groups in steps for group in groups for t in group]
    padding = shares(lengths, MICRO_BATCH_TOKENS)
    return {
        "grad_rel_err": max(_distance(ranks[0]["grads"][name], grad) for name, grad in alone["grads"].items()),
        "overhead_2_over_1": sum(rank["cpu"] for rank in ranks) / alone["cpu"],
        "wall_2_over_1": max(rank["wall"] for rank in ranks) / alone["wall"],
        "peak_host_bytes": max(rank["peak"] for rank in ranks),
        "peak_host_bytes_1": alone["peak"],
        "pad_frac": padding["padding/batch"],
        "pad_frac_attention": padding["padding/attention"],
    }


def _distance(found: Any, expected: Any) -> float:
    one, other = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def restarted(folder: Path) -> dict[str, float]:
    """A job of two ranks, one of which is killed once it has trained."""
    (folder / "job.yaml").write_text(JOB)
    run = folder / "run"
    command = [sys.executable, "-m", "rubato", "launch", str(folder / "job.yaml"), "--run-dir", str(run)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "said").open("wb") as said:
        launcher = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        first = _until(launcher, lambda: _told(run, "trainer_rank-1", "first_share"))[0]
        _until(launcher, lambda: list((run / "checkpoints").glob("step_*")))
        os.kill(_told(run, "node-1", "started", actor="trainer_rank-2")[-1]["pid"], signal.SIGKILL)
        died = _until(launcher, lambda: _told(run, "node-1", "died"))[0]
        again = [
            _until(launcher, lambda name=name: _told(run, name, "first_share")[1:])[0] for name in ("trainer_rank-1", "trainer_rank-2")
        ]
        begun = _told(run, "node-1", "started", actor="trainer_rank-1")[0]
        return {"start_s": _at(first) - _at(begun), "restart_s": max(map(_at, again)) - _at(died)}
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)


def _told(run: Path, name: str, event: str, **fields: str) -> list[dict[str, Any]]:
    path = run / "logs" / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line.get("event") == event and fields.items() <= line.items()]


def _at(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["t"]).timestamp()


def _until(launcher: "subprocess.Popen[bytes]", look: Any) -> Any:
    deadline = time.perf_counter() + LIMIT_S
    while not (found := look()):
        if launcher.poll() is not None or time.perf_counter() > deadline:
            raise SystemExit("the job of two ranks did not train: look at what it said")
        time.sleep(0.05)  # noqa: TID251 - another process's progress can't be awaited
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--short", action="store_true", help="see that it starts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rubato-ranks-") as name:
        found = computed(Path(name), short=options.short)
        found |= {} if options.short else restarted(Path(name))
    for key, value in found.items():
        print(f"{key:20} {value:.4g}")
    if options.short:
        print(NO_RESULT)
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What new weights cost an engine: how long its way into one takes over a link of 1 Gbit/s, how much of it is hidden, and what deltas save.

python tools/bench/weights.py [--mbps 1000] [--versions 20] [--run-dir DIR] [--json]
python tools/bench/weights.py --deltas [--json]
Either with --short: it starts, its figures say nothing.

The first is a whole job, α = 1, with a model of 100 MB in float32, over two network namespaces of the command's own, which end with it
(root, or a kernel that gives users namespaces, and iproute2). Trainer and one engine are on one host; the engine on the other decodes while
it pulls each version whole. Figures are of the versions after the first two, by the engines' logs. The second takes no job: it measures how
much a version differs from the one before where AdamW updates random weights of 0.02 by gradients of noise, computed in float32 and
published in bfloat16: synthetic, and its learning rates say which run it is like.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.training.base_model import CONFIG, make_tokenizer, write_tokenizer  # noqa: E402
from rubato.runtime.blobs.blob import BlobInfo, digest_of  # noqa: E402
from rubato.runtime.blobs.patches import patch, put_delta  # noqa: E402
from rubato.runtime.errors import RubatoError  # noqa: E402
from rubato.runtime.memory import MemoryBlobStore  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402
from tools.fabric_job import Job, Stuck  # noqa: E402
from tools.fabric_namespaces import Racks, enter  # noqa: E402

HOSTS = {"home": "10.203.9.1", "away": "10.203.9.2"}
SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "head_dim": 128}
"""24 M parameters: 97 MB in float32."""
WARM = 2
PIECES_OF = 25_000_000
"""Parameters of the synthetic update: 50 MB in bfloat16."""
SHORT_SIZE = 1_000_000
RATES = (1e-6, 1e-5, 1e-4)
UPDATES = 6
"""Until AdamW's second moment is that of the gradients: the first steps are as long as any, as it corrects for that."""


def reward(completions: Sequence[str], **_: object) -> list[float]:
    """Differs within every group, so that every update moves the weights."""
    return [float(len(text) % 7) for text in completions]


def write_model(folder: Path, sizes: Mapping[str, Any]) -> Path:
    """An untrained Qwen3 in HF format; the quickstart's, but for `sizes`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, **sizes}, vocab_size=make_tokenizer().get_vocab_size())).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_config(folder: Path, sizes: Mapping[str, Any] = SIZES) -> Path:
    """The job, as a file."""
    roles = {
        "sample_buffer": "rubato.actors.samples.buffer:SampleBuffer", "llm_proxy": "rubato.actors.proxy.proxy:LLMProxy",
        "engine": "rubato.actors.engines.worker:EngineWorker", "env_manager": "rubato.actors.envs.manager:EnvManager",
        "reward_service": "rubato.actors.rewards.service:RewardService", "trainer": "rubato.actors.training.trainer:Trainer",
    }  # fmt: skip
    config = {
        "run": {"name": "weights", "seed": 1, "steps": 10_000},
        "actors": {role: {"class": name} for role, name in roles.items()},
        "model": {"path": str(write_model(folder / "model", sizes)), "device": "cpu", "torch_threads": 1},
        "env": {"class": "rubato.actors.envs.frozen_lake:FrozenLakeText", "concurrency": 8, "isolation": "inline"},
        "engine": {"num_slots": 8},
        "rollout": {"max_turns": 2, "max_new_tokens": 32},
        "reward": {"functions": [f"{Path(__file__).resolve()}:reward"]},
        "staleness": {"alpha": 1},
        "train": {"batch_groups": 1, "group_size": 4, "lr": 1e-5, "micro_batch_tokens": 1024},
        "check": {"enabled": False},
        "eval": {"every": 0, "final_num_tasks": 0},
        "checkpoint": {"every": 10_000},
        "report": {"finish": ""},
    }
    file = folder / "weights.yaml"
    file.write_text(json.dumps(config))
    return file


def over_the_link(folder: Path, mbps: float, versions: int, sizes: Mapping[str, Any] = SIZES) -> dict[str, Any]:
    """One run; see the top. Raises RubatoError."""
    with ExitStack() as stack:
        racks = Racks("weights", HOSTS)
        racks.make(mbps)
        job = Job(write_config(folder, sizes), (), racks, folder, stack)
        job.start(HOSTS, 8)
        job.until(lambda: len(job.events("away", "engine-*", "weights_swapped")) >= WARM + versions, f"{versions} pulls")
        job.stop()
        rows = job.rows()
        found = {name: engine_figures(job, name) for name in HOSTS}
    return {
        "mbps": mbps,
        "weights_bytes": rows[-1]["weights/bytes"],
        "alpha": 1,
        **found,
        "trainer": {name: median(row[name] for row in rows) for name in ("time/step", "time/publish", "staleness/publish_lag")},
    }  # fmt: skip


def engine_figures(job: Job, host: str) -> dict[str, float]:
    """Of one engine. Raises Stuck where it never said what its steps took."""
    swaps = job.events(host, "engine-*", "weights_swapped")[WARM:]
    times = job.events(host, "engine-*", "step_times")
    if not swaps or not times:
        raise Stuck(f"the engine of host {host} told nothing of its swaps and steps. Its logs are in {job.folder}.")
    pauses, steps = sorted(swap["pause_s"] for swap in swaps), [cpu_s for *_, cpu_s in times[0]["sampled"]]
    return {
        "versions": len(swaps),
        "pull_s": median(swap["pull_s"] for swap in swaps),
        "pause_s": median(pauses),
        "pause_s_p99": pauses[-(-99 * len(pauses) // 100) - 1],
        "hidden_frac": min(1.0 - swap["pause_s"] / swap["pull_s"] for swap in swaps),
        "step_cpu_s": median(steps) if steps else 0.0,
    }


async def deltas(size: int = PIECES_OF) -> list[dict[str, float]]:
    """Per learning rate: share of words that changed, of bytes that travel, and seconds to make and to apply a delta."""
    import torch

    found: list[dict[str, float]] = []
    for rate in RATES:
        torch.manual_seed(1)
        masters = torch.nn.Parameter(torch.randn(size) * 0.02)
        optimizer = torch.optim.AdamW([masters], lr=rate, weight_decay=0.0, fused=True)
        images: list[bytes] = []
        for _ in range(UPDATES):
            masters.grad = torch.randn(size)
            optimizer.step()
            images = [*images[-1:], masters.detach().bfloat16().view(torch.uint8).numpy().tobytes()]
        found.append({"lr": rate} | await delta_figures(*images))
    return found


async def delta_figures(old: bytes, new: bytes) -> dict[str, float]:
    import numpy

    blobs, info = MemoryBlobStore(), BlobInfo("w", 2, 1, digest_of(new), len(new))
    await blobs.put("w", 1, 1, [old])
    changed = float(numpy.mean(numpy.frombuffer(old, numpy.uint16) != numpy.frombuffer(new, numpy.uint16)))
    began = time.perf_counter()
    delta = await put_delta(blobs, info, memoryview(new))
    made = time.perf_counter()
    if delta is None:
        return {"changed_frac": changed, "bytes_frac": 1.0, "make_s": made - began, "apply_s": 0.0}
    memory = bytearray(len(new))
    await patch(blobs, info, (await blobs.get("w.delta", 2))[1], memoryview(memory))
    applied = time.perf_counter() - made
    assert memory == new
    return {"changed_frac": changed, "bytes_frac": delta.size_bytes / len(new), "make_s": made - began, "apply_s": applied}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbps", type=float, default=1000.0, help="of the link between the hosts")
    parser.add_argument("--versions", type=int, default=20, help="that count")
    parser.add_argument("--deltas", action="store_true", help="how much changes from one version to the next, instead")
    parser.add_argument("--run-dir", type=Path, help="a new folder for the run; a temporary one by default")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--short", action="store_true", help="one version of a small model: it starts, its figures say nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the namespaces are there
    args = parser.parse_args(argv)
    try:
        if args.deltas:
            found: Any = {"deltas": asyncio.run(deltas(*[SHORT_SIZE] if args.short else []))}
        elif args.inside:
            folder = args.run_dir or Path(tempfile.mkdtemp(prefix="rubato-weights-"))
            folder.mkdir(parents=True, exist_ok=True)
            job = (1, {}) if args.short else (args.versions, SIZES)
            found = over_the_link(folder.resolve(), args.mbps, *job)
        else:
            enter([sys.executable, __file__, *argv, "--inside"])
    except RubatoError as error:
        print(error, file=sys.stderr)
        return 2
    if args.short:
        found = {"note": NO_RESULT, **found}
    print(json.dumps(found) if args.json else json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

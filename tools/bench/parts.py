"""What a version of weights costs whose ranks are on two hosts: bytes on the link of the trainer's host, and seconds to an engine of a third.

python tools/bench/parts.py [--mib 96] [--versions 6] [--run-dir DIR] [--json] [--short]

A whole job of scripted ranks and a scripted engine, over three network namespaces of the command's own that are joined at 1 Gbit/s (root, or a
kernel that gives users namespaces, and iproute2). Every byte of a version is another one than before, so no delta is made. Bytes are in images,
headers and what else the job says included; seconds are medians: `publish_s` training waits, `lag_s` until a version is published, `pull_s` until
the engine has it. With --short: it starts, its figures say nothing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.runtime.errors import RubatoError  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402
from tools.bench.weights import write_model  # noqa: E402
from tools.fabric_job import Job  # noqa: E402
from tools.fabric_namespaces import Racks, enter  # noqa: E402

HOSTS = {"home": "10.203.9.1", "ranks": "10.203.9.2", "engine": "10.203.9.3"}
WARM = 2
MBPS = 1000.0

JOB = """
run: {name: parts, steps: 100000}
actors:
  sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}
  llm_proxy: {class: "rubato.actors.proxy.proxy:LLMProxy"}
  engine: {class: "rubato.actors.engines.worker:EngineWorker", count: 0}
  env_manager: {class: "rubato.actors.envs.manager:EnvManager"}
  trainer: {class: "rubato.actors.training.trainer:Trainer"}
  trainer_rank: {class: "rubato.actors.ranks.rank:TrainRank", count: 1}
model: {path: MODEL}
env: {isolation: inline, concurrency: 8}
engine: {kind: scripted, scripted: {token_s: 0.0}}
rollout: {max_turns: 3, max_new_tokens: 2}
train: {kind: scripted, batch_groups: 2, group_size: 2, mesh: {shard: 2}, scripted: {weights_mib: MIB, step_s: 4.0}}
check: {enabled: false}
eval: {every: 0, final_num_tasks: 0}
checkpoint: {every: 100000}
report: {finish: ""}
"""


class PartsJob(Job):
    """The launching host has the trainer and a rank, the second the other rank, the third an engine."""

    def begin(self) -> None:
        home = self.folder / "home"
        self._rubato("home", "keys", "new", "--run", home)
        self._spawn("home", "launch", self._config, f"bus.host={HOSTS['home']}", "--run-dir", home)
        self.until(lambda: self.events("home", "env_manager-1", "ready"), "the start")
        token = self._rubato("home", "keys", "join-token", "--run", home)
        for rack, role in (("ranks", "trainer_rank"), ("engine", "engine")):
            self._spawn(rack, "add", role, "--join", token, "--host", HOSTS[rack], "--run-dir", self.folder / rack)

    def swapped(self) -> list[dict[str, Any]]:
        return self.events("engine", "engine-1", "weights_swapped")


def measured(folder: Path, mib: float, versions: int) -> dict[str, Any]:
    """One run; see the top. Raises RubatoError."""
    config = folder / "parts.yaml"
    config.write_text(JOB.replace("MODEL", str(write_model(folder / "model", {}))).replace("MIB", str(mib)))
    with ExitStack() as stack:
        racks = Racks("parts", HOSTS)
        racks.make(MBPS)
        job = PartsJob(config, (), racks, folder, stack)
        job.begin()
        job.until(lambda: len(job.swapped()) >= WARM, "the first pulls")
        first, before = len(job.swapped()), racks.sent_bytes()
        job.until(lambda: len(job.swapped()) >= first + versions, f"{versions} pulls")
        swaps, after = job.swapped()[first:], racks.sent_bytes()
        job.stop()
        rows = job.rows()[-len(swaps) :]
    sent = {pair: (after[pair] - before[pair]) / len(swaps) / (mib * 2**20) for pair in after}
    return {
        "weights_mib": mib,
        "versions": len(swaps),
        "into_home": sum(num for (_, to), num in sent.items() if to == "home"),
        "out_of_home": sum(num for (source, _), num in sent.items() if source == "home"),
        "publish_s": median(row["time/publish"] for row in rows),
        "lag_s": median(row["staleness/publish_lag"] for row in rows),
        "pull_s": median(swap["pull_s"] for swap in swaps),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=96.0, help="size of the weights")
    parser.add_argument("--versions", type=int, default=6, help="that count")
    parser.add_argument("--run-dir", type=Path, help="a new folder for the run; a temporary one by default")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--short", action="store_true", help="one version of small weights: it starts, its figures say nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the namespaces are there
    args = parser.parse_args(argv)
    try:
        if not args.inside:
            enter([sys.executable, __file__, *argv, "--inside"])
        folder = args.run_dir or Path(tempfile.mkdtemp(prefix="rubato-parts-"))
        folder.mkdir(parents=True, exist_ok=True)
        found = measured(folder.resolve(), *((1.0, 1) if args.short else (args.mib, args.versions)))
    except RubatoError as error:
        print(error, file=sys.stderr)
        return 2
    if args.short:
        found = {"note": NO_RESULT, **found}
    print(json.dumps(found) if args.json else json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

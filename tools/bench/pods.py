"""How a version of weights comes to two pods of three hosts each: copies of it over the links between the pods, and seconds until all have it.

python tools/bench/pods.py [--mib 96] [--versions 4] [--run-dir DIR] [--json] [--short]

A whole job of a scripted trainer and five scripted engines, over six network namespaces of the command's own (root, or a kernel that gives users
namespaces, and iproute2): 1 Gbit/s between hosts of a pod, 200 Mbit/s between those of different pods. Once the hosts' labels say which pod
they are in (`pods`), and once none does (`names`), as it was before. Every byte of a version is another one than before, so no delta is made.
`sync_s` is the median time from a version that is published to the last engine that has it, and `one_transfer_s` what its bytes alone need at
the rate of one link between the pods. With --short: it starts, its figures say nothing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
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

# The second of the first pod comes last by its name: an order by names would take all of the other pod before it.
PODS = {"home": "x", "y1": "y", "y2": "y", "y3": "y", "z1": "x", "z2": "x"}
HOSTS = {rack: f"10.203.8.{number}" for number, rack in enumerate(PODS, 1)}
WARM = 2
WITHIN_MBPS, BETWEEN_MBPS = 1000.0, 200.0

JOB = """
run: {name: pods, steps: 100000}
actors:
  sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}
  llm_proxy: {class: "rubato.actors.proxy.proxy:LLMProxy"}
  engine: {class: "rubato.actors.engines.worker:EngineWorker", count: 0}
  env_manager: {class: "rubato.actors.envs.manager:EnvManager"}
  trainer: {class: "rubato.actors.training.trainer:Trainer"}
model: {path: MODEL}
env: {isolation: inline, concurrency: 8}
engine: {kind: scripted, scripted: {token_s: 0.0}}
rollout: {max_turns: 3, max_new_tokens: 2}
train: {kind: scripted, batch_groups: 2, group_size: 2, scripted: {weights_mib: MIB, step_s: STEP}}
check: {enabled: false}
eval: {every: 0, final_num_tasks: 0}
checkpoint: {every: 100000}
report: {finish: ""}
"""


class PodsJob(Job):
    """The launching host has the trainer, each other one an engine."""

    def begin(self, *, labelled: bool) -> None:
        home = self.folder / "home"
        labels = {rack: [f"host.labels=[pod={pod}]"] if labelled else [] for rack, pod in PODS.items()}
        self._rubato("home", "keys", "new", "--run", home)
        self._spawn("home", "launch", self._config, *labels["home"], f"bus.host={HOSTS['home']}", "--run-dir", home)
        self.until(lambda: self.events("home", "env_manager-1", "ready"), "the start")
        token = self._rubato("home", "keys", "join-token", "--run", home)
        for rack in list(PODS)[1:]:
            where = ("--host", HOSTS[rack], "--run-dir", self.folder / rack)
            self._spawn(rack, "add", "engine", *labels[rack], "--join", token, *where)
            self.until(partial(self.events, rack, "engine-*", "ready"), f"the engine of {rack}")  # names by number, in this order

    def synced(self, num: int) -> dict[int, float]:
        """Seconds by version, of all that every engine has, once these are `num`. Raises Stuck."""
        return self.until(lambda: found if len(found := self._synced()) >= num else None, f"the sync of {num} versions to all hosts")

    def engines(self) -> list[str]:
        return list(PODS)[1:]


def measured(folder: Path, mib: float, versions: int, *, labelled: bool) -> dict[str, float]:
    """One run; see the top. Raises RubatoError."""
    config = folder / "pods.yaml"
    one_s = mib * 2**20 * 8 / (BETWEEN_MBPS * 1e6)
    job_text = JOB.replace("MODEL", str(write_model(folder / "model", {}))).replace("MIB", str(mib))
    config.write_text(job_text.replace("STEP", str(max(1.0, 3 * one_s))))
    with ExitStack() as stack:
        racks = Racks("pods" if labelled else "names", HOSTS)
        racks.make(lambda here, there: WITHIN_MBPS if PODS[here] == PODS[there] else BETWEEN_MBPS)
        job = PodsJob(config, (), racks, folder, stack)
        job.begin(labelled=labelled)
        first = job.synced(WARM)
        before = racks.sent_bytes()
        syncs = job.synced(len(first) + versions)
        after = racks.sent_bytes()
        job.stop()
    counted = [took for version, took in syncs.items() if version not in first]
    crossed = sum(after[pair] - before[pair] for pair in after if PODS[pair[0]] != PODS[pair[1]])
    return {
        "versions": len(counted),
        "copies_between_pods": crossed / len(counted) / (mib * 2**20),
        "sync_s": median(counted),
        "one_transfer_s": one_s,
        "sync_over_one_transfer": median(counted) / one_s,
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("pods", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=96.0, help="size of the weights")
    parser.add_argument("--versions", type=int, default=4, help="that count")
    parser.add_argument("--run-dir", type=Path, help="a new folder for the runs; a temporary one by default")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--short", action="store_true", help="one version of small weights: it starts, its figures say nothing")
    parser.add_argument("--only", choices=("pods", "names"), help="one of the two runs")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the namespaces are there
    args = parser.parse_args(argv)
    size = (1.0, 1) if args.short else (args.mib, args.versions)
    found: dict[str, Any] = {"note": NO_RESULT} if args.short else {}
    try:
        if not args.inside:
            enter([sys.executable, __file__, *argv, "--inside"])
        folder = (args.run_dir or Path(tempfile.mkdtemp(prefix="rubato-pods-"))).resolve()
        for name in (args.only,) if args.only else ("pods", "names"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            found[name] = measured(folder / name, *size, labelled=name == "pods")
    except RubatoError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Kill -9 random processes of two jobs that share a cluster, and of the cluster, then check that each job did what it does alone.

python tools/chaos_cluster.py [--seconds 120] [--steps 150] [--seed 1] [key.sub=value …]

Any process may be hit: actors of both jobs and their workers, their launchers (node agents), Stores and warm parents, the same of the
cluster, and its scheduler. A cluster that is down is started again. Then both jobs run to their end in peace. Each ledger is audited, and every sample that was
trained in the step in which the same job trains it alone has the reward that it has there: engines are scripted, so the tokens that rewards are
of are a function of the job's seed, the prompt and the version, and a sample of another job shows. Overrides are those of the jobs. Ends with 0
and a line of figures, or with 1 and a sentence that says where everything is kept. Linux only.
"""

import argparse
import asyncio
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rubato.actors.cluster.board import read_board  # noqa: E402
from rubato.actors.samples.run_files import read_lines  # noqa: E402
from rubato.runtime.config.compose import load  # noqa: E402
from rubato.runtime.errors import LaunchError  # noqa: E402
from rubato.runtime.store.store import StoreUnavailable  # noqa: E402
from rubato.sim.audit import AuditLimits, audit  # noqa: E402
from tools.chaos_job import PR_SET_CHILD_SUBREAPER, Process, descendants  # noqa: E402

JOB = ROOT / "configs/cluster_job.yaml"
NAMES = ("a", "b")
CLUSTER = ("scheduler.slo=1000", "scheduler.crashes=1000")
"""Limits so high that no job is sent away for being late, or for what is done to it here."""
QUICK = (
    "engine.scripted.token_s=0.005",
    "train.scripted.step_s=0.5",
    "actors.reward_service={class: rubato.actors.rewards.service:RewardService}",
    f"reward.functions=[{ROOT}/tools/bench/weights.py:reward]",
)
PAUSE_S = (1.0, 6.0)
"""Between two kills."""
PATIENCE_S = 180.0
"""Longest without a new step of any job."""
LOOK_S = 0.2
"""Another program's files and processes send no event when they change."""


class Broken(Exception):
    """A promise was not kept; the sentence for the user."""


class Victim(NamedTuple):
    """A process of a job or of the cluster, by what it is to whom."""

    role: str
    owner: str
    pid: int


class Lab:
    """A cluster in `place`, seen from outside; orphans become this process's children, so that none can hide."""

    def __init__(self, place: Path, num_steps: int, settings: Sequence[str]) -> None:
        self.place, self.folder, self.num_steps = place, place / "C", num_steps
        self._settings = [*QUICK, f"run.steps={num_steps}", *settings]
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    async def rubato(self, *words: object) -> int:
        with (self.place / "said").open("ab") as said:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rubato.runtime.cli", *map(str, words), cwd=self.place, stdout=said, stderr=said,
                stdin=asyncio.subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        return await process.wait()

    async def up(self) -> None:
        """Start the cluster, or start it again; what is hit while it starts is tried again."""
        again = (self.folder / "run.json").exists()
        what = [self.folder] if again else [ROOT / "configs/cluster.yaml", "--dir", self.folder, *CLUSTER]
        while await self.rubato("cluster", "start", *what):  # noqa: ASYNC110 - another program's processes send no event
            await asyncio.sleep(LOOK_S)

    async def submit(self, name: str) -> None:
        if await self.rubato("submit", JOB, "--cluster", self.folder, *self.own(name)):
            raise Broken(f"job {name} was not taken")

    async def alone(self, name: str) -> None:
        if await self.rubato("launch", JOB, "--run-dir", self.place / name, *self.own(name)):
            raise Broken(f"job {name} does not run alone")

    def own(self, name: str) -> list[str]:
        return [f"run.name={name}", f"run.seed={1 + NAMES.index(name)}", *self._settings]

    def run_of(self, name: str) -> Path:
        return self.folder / "jobs" / name

    async def are_done(self) -> bool:
        """False also while the cluster's Store is being started again."""
        try:
            book = (await read_board(self.folder)).book
        except (LaunchError, StoreUnavailable):
            return False
        if failed := [job for job in book.jobs.values() if job.over and job.state != "done"]:
            raise Broken(f"job {failed[0].name} is {failed[0].state}: {failed[0].why}")
        return all(job.over for job in book.jobs.values())

    def steps(self) -> dict[str, int]:
        files = {name: self.run_of(name) / "metrics.jsonl" for name in NAMES}
        return {name: file.read_text().count("\n") if file.exists() else 0 for name, file in files.items()}

    def victims(self) -> list[Victim]:
        """All processes of cluster and jobs."""
        tree = {process.pid: process for process in descendants(os.getpid())}
        return [Victim(role, self._owner(tree, each), each.pid) for each in tree.values() if (role := _role(tree, each))]

    def _owner(self, tree: Mapping[int, Process], process: Process | None) -> str:
        """The job whose launcher it is below."""
        while process is not None:
            for name in NAMES:
                if "rubato.actors.cluster.job" in process.words and str(self.run_of(name)) in process.words:
                    return name
            process = tree.get(process.parent)
        return "cluster"


def _role(tree: Mapping[int, Process], process: Process) -> str:
    """Empty for the commands that this tool gives."""
    words, parent = process.words, tree.get(process.parent)
    if "rubato.runtime.node" in words[:-2]:
        return words[words.index("rubato.runtime.node") + 2].rpartition("-")[0]
    marks = {
        "redis-server": "Store", "rubato.runtime.launch.warm": "warm parent", "rubato.actors.cluster.job": "launcher",
        "rubato.runtime.cli launch": "launcher",
    }  # fmt: skip
    below_actor = parent is not None and "rubato.runtime.node" in parent.words
    return next((role for mark, role in marks.items() if mark in " ".join(words)), "worker" if below_actor else "")


async def chaos(lab: Lab, seconds: float, rng: random.Random) -> Counter[str]:
    """Kill for so long; returns how often what of whom was hit."""
    loop, hits = asyncio.get_running_loop(), Counter[str]()
    until = loop.time() + seconds
    while loop.time() < until:
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        if max(lab.steps().values()) >= lab.num_steps:
            raise Broken(f"a job was done before the chaos was over: give more than {lab.num_steps} --steps")
        found = lab.victims()
        chosen = rng.choice(sorted({(each.owner, each.role) for each in found}))
        victim = rng.choice([each for each in found if (each.owner, each.role) == chosen])
        os.kill(victim.pid, signal.SIGKILL)
        hits[f"{victim.owner}'s {victim.role}"] += 1
        print(f"{seconds - until + loop.time():6.1f} s  steps {lab.steps()}  kill {victim.owner}'s {victim.role}", flush=True)
        if (victim.owner, victim.role) == ("cluster", "launcher"):
            await lab.up()
    return hits


async def peace(lab: Lab) -> None:
    """Until both jobs are done."""
    loop = asyncio.get_running_loop()
    last, at = lab.steps(), loop.time()
    while not await lab.are_done():
        if (now := lab.steps()) != last:
            last, at = now, loop.time()
        if loop.time() > at + PATIENCE_S:
            raise Broken(f"nothing new for {PATIENCE_S:.0f} s after steps {last}")
        await asyncio.sleep(LOOK_S)


def trained(run: Path) -> dict[tuple[str, int], float]:
    """Reward by trajectory and the step that trained it."""
    lines = map(json.loads, read_lines(run))
    return {(x["trajectory_id"], x["step"]): x["reward"] for x in lines if x["step"] is not None}


def compared(together: Mapping[tuple[str, int], float], alone: Mapping[tuple[str, int], float]) -> tuple[int, list[str]]:
    """How many samples both runs of a job trained in the same step, and those of them whose reward differs: they are another job's."""
    same = sorted(together.keys() & alone.keys())
    return len(same), [trajectory for trajectory, step in same if together[trajectory, step] != alone[trajectory, step]]


def judge(lab: Lab, name: str) -> str:
    """What the job promised; returns its figures. Raises Broken."""
    run, config = lab.run_of(name), load(lab.run_of(name) / "config.yaml")
    train = config.section("train")
    found = audit(run, AuditLimits(config.run.steps, train.batch_groups, train.group_size, 0))
    together, alone = trained(run), trained(lab.place / name)
    same, odd = compared(together, alone)
    problems = [*found.problems, *([f"{len(odd)} samples are not what they are alone, first {odd[0]}"] if odd else [])]
    if problems:
        raise Broken(f"job {name}: {'; '.join(problems)}")
    return f"job {name}: {found.steps} steps gapless, {found.samples} samples each one fate, {same} of {len(together)} trained as alone"


async def go(lab: Lab, seconds: float, rng: random.Random) -> list[str]:
    """Everything, in order; returns the lines of figures. Raises Broken."""
    await lab.up()
    for name in NAMES:
        await lab.submit(name)
    async with asyncio.timeout(PATIENCE_S):
        while not min(lab.steps().values()):  # noqa: ASYNC110 - files of other processes send no event
            await asyncio.sleep(LOOK_S)
    hits = await chaos(lab, seconds, rng)
    await peace(lab)
    await lab.rubato("cluster", "stop", lab.folder)
    if left := lab.victims():
        raise Broken(f"{len(left)} processes are left, first {left[0]}")
    await asyncio.gather(*map(lab.alone, NAMES))
    said = ", ".join(f"{num} {what}" for what, num in sorted(hits.items()))
    return [f"{hits.total()} killed: {said}", *(judge(lab, name) for name in NAMES)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the chaos lasts; then both jobs end in peace")
    parser.add_argument("--steps", type=int, default=150, help="of each job: more than the chaos lets it have")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    args = parser.parse_intermixed_args(argv)
    lab = Lab(Path(tempfile.mkdtemp(prefix="chaos-cluster-")), args.steps, args.overrides)
    try:
        lines = asyncio.run(go(lab, args.seconds, random.Random(args.seed)))
    except (Broken, TimeoutError) as error:
        print(f"BROKEN, seed {args.seed}: {error or 'no first step'} (kept in {lab.place})")
        return 1
    finally:
        for victim in lab.victims():
            os.kill(victim.pid, signal.SIGKILL)
    shutil.rmtree(lab.place, ignore_errors=True)
    print(f"seed {args.seed}, {args.seconds:g} s of chaos; {'; '.join(lines)}; 0 left")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Clusters under test, and jobs for them: real launches whose engine and trainer compute nothing, but hold permits and go on where they
were."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

from rubato.actors.cluster.board import read_board
from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.card import read_card
from rubato.runtime.store.store import StoreUnavailable
from tests.jobs import Ended, rubato

WORKER = '''
import asyncio
import json

from rubato.actors.cluster.permits import permits_of
from rubato.actors.config import ClusterSection
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig, Section


class PhasesSection(Section):
    rollout_s: float = 0.1
    train_s: float = 0.1
    crash_at: int = 0
    """Once, after this step."""
    never: bool = False
    """It crashes before its first step, each time."""


class Engine(Actor):
    role = "engine"


class Trainer(Actor):
    role = "trainer"

    class Config(ActorConfig):
        cluster: ClusterSection = ClusterSection()
        phases: PhasesSection = PhasesSection()

    async def on_start(self):
        self.spawn(self._work(), name="work")

    async def _work(self):
        rows = self.run.folder / "metrics.jsonl"
        done = len(rows.read_text().splitlines()) if rows.exists() else 0
        cluster, phases = self.config.cluster, self.config.phases
        if phases.never:
            self.finish("it crashed before its first step", failed=True)
            return
        async with permits_of(cluster) as permits:
            for step in range(done + 1, self.run.steps + 1):
                async with permits.hold(cluster.rollout_pool, "rollout", cluster.job):
                    await asyncio.sleep(phases.rollout_s)
                async with permits.hold(cluster.training_pool, "training", cluster.job):
                    await asyncio.sleep(phases.train_s)
                with rows.open("a") as file:
                    file.write(json.dumps({"step": step}) + "\\n")
                self.progress(step, {})
                mark = self.run.folder / "crashed"
                if phases.crash_at == step and not mark.exists():
                    mark.touch()
                    self.finish("it crashed, as it was told to", failed=True)
                    return
        self.finish(f"done after {self.run.steps} steps")
'''

JOB = """
run: {name: NAME, steps: 4}
actors:
  engine: {class: "worker.py:Engine"}
  trainer: {class: "worker.py:Trainer"}
report: {finish: ""}
"""

CLUSTER = """
run: {name: lab}
actors:
  scheduler: {class: "rubato.actors.cluster.scheduler:ClusterScheduler", restarts: 100}
scheduler:
  rollout: {nodes: 1, usd_hour: 1.85, memory_gb: 8}
  training: {nodes: 1, usd_hour: 5.28, memory_gb: 8}
  slo: 5
report: {finish: ""}
"""


def write_jobs(place: Path, *names: str) -> None:
    """`NAME.yaml` for each, what they run, and `cluster.yaml`."""
    (place / "worker.py").write_text(WORKER)
    (place / "cluster.yaml").write_text(CLUSTER)
    for name in names:
        (place / f"{name}.yaml").write_text(JOB.replace("NAME", name))


LIMIT_S = 90.0


def _is_dead(pid: int) -> bool:
    """Gone, or waited for by nobody yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition, what: str):
    """What `condition` returns once it is true; processes under test can only be watched from outside."""
    deadline = time.perf_counter() + LIMIT_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.1)  # noqa: TID251 - another process's progress can't be awaited
    return found


class Lab:
    """A cluster in `place`/C."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder = place, place / "C"

    def run(self, *words: object) -> Ended:
        return rubato(*words, cwd=self.place)

    def ok(self, *words: object) -> str:
        ended = self.run(*words)
        assert ended.code == 0, ended.err
        return ended.out

    def start(self) -> str:
        return self.ok("cluster", "start", "cluster.yaml", "--dir", "C")

    def submit(self, name: str, *overrides: str) -> str:
        return self.ok("submit", f"{name}.yaml", "--cluster", "C", *overrides)

    def steps(self, name: str) -> list[int]:
        try:
            lines = (self.folder / "jobs" / name / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line)["step"] for line in lines]

    def reached(self, name: str, step: int) -> None:
        until(lambda: len(self.steps(name)) >= step, f"step {step} of {name}")

    def state(self, name: str) -> str:
        """As the cluster's Store has it, without the cost of a command."""
        try:
            return asyncio.run(read_board(self.folder)).book.jobs[name].state
        except (LaunchError, StoreUnavailable):  # its Store is being started again
            return ""

    def is_at(self, name: str, state: str) -> None:
        until(lambda: self.state(name) == state, f"{name} {state}")

    def find(self, words: str) -> int:
        """The process of this cluster or its jobs with `words` in its command line; 0 where there is none."""
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words in line and str(self.folder) in line:
                return int(entry.parent.name)
        return 0

    def redis(self) -> int:
        """The process of the cluster's Store."""
        sockets = read_card(self.folder).sockets
        lines = {entry: entry.read_bytes() for entry in Path("/proc").glob("[0-9]*/cmdline")}
        return next(int(entry.parent.name) for entry, line in lines.items() if b"redis-server" in line and sockets.encode() in line)

    def pid_of(self, words: str) -> int:
        """The same, which must be there."""
        found = self.find(words)
        assert found, f"no process {words}"
        return found

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        until(lambda: _is_dead(pid), "the kill")

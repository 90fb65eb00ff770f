"""Whether real jobs on a cluster keep the bounds that they were promised: three quickstarts on three nodes of each pool, for so long.

python tools/bench/slo.py [--short | --minutes 60] [--slo 2] [--json FILE] [key.sub=value …]

Engines and trainers compute (torch, the quickstart's 0.5 M parameters), so no job's times are known beforehand: each is profiled for two
steps, and planned from then on with every response at max_tokens. Where it goes the scheduler decides. At half of the time the job that
came last to a group whose jobs are all profiled is cancelled, and those that are left may move together. A job's time is what its steps since it was
profiled took, waits and moves included, over what they would have taken alone, by its permits: what the machine's load does to a phase is in
both. Overrides are those of the jobs. Ends with 1 where a job misses its bound.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.cluster.board import read_board  # noqa: E402
from rubato.actors.cluster.book import Book, JobRecord  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

NAMES = ("a", "b", "c")
JOB = (
    "staleness.alpha=0", "actors.engine.count=1", "actors.fabric_controller.count=0", "actors.optical_switch.count=0", "eval.every=0",
    "eval.final_num_tasks=0", "run.steps=100000", "report.finish=''",
)  # fmt: skip
POOLS = (
    "scheduler.rollout={hardware: h20, nodes: 3, memory_gb: 8}", "scheduler.training={hardware: h800, nodes: 3, memory_gb: 8}",
    "scheduler.cold_s=20",
)  # fmt: skip
LOOK_S = 2.0
"""Another program's files send no event when they change."""


class Lab:
    """A cluster in `place`/C, and its jobs."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder = place, place / "C"

    def rubato(self, *words: object) -> str:
        command = [sys.executable, "-m", "rubato.runtime.cli", *map(str, words)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=self.place, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"rubato {words[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    async def book(self) -> Book:
        return (await read_board(self.folder)).book

    async def watch(self, seconds: float) -> Book:
        """Until so many are over; a job that ends by itself ends the watch in a sentence."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            book = await self.book()
            if failed := [job for job in book.jobs.values() if job.state in ("failed", "done")]:
                raise SystemExit(f"job {failed[0].name} is {failed[0].state}: {failed[0].why}")
            if loop.time() >= until:
                return book
            await asyncio.sleep(LOOK_S)


async def measure(lab: Lab, minutes: float, slo: float, overrides: Sequence[str]) -> list[JobRecord]:
    """Each job at its end."""
    print(lab.rubato("cluster", "start", ROOT / "configs/cluster.yaml", "--dir", lab.folder, *POOLS))
    try:
        for number, name in enumerate(NAMES, 1):
            own = (f"run.name={name}", f"run.seed={number}")
            print(lab.rubato("submit", ROOT / "configs/quickstart.yaml", "--cluster", lab.folder, "--slo", slo, *JOB, *own, *overrides))
        book = await lab.watch(30 * minutes)
        shared = next(
            (group for group in book.groups() if len(group.jobs) > 1 and all(book.jobs[p.job.name].kept for p in group.jobs)), None
        )
        gone = {}
        if shared is not None:
            last = shared.jobs[-1].job.name
            gone[last] = book.jobs[last]
            print(f"cancel {last}: {lab.rubato('cancel', lab.folder, last)}")
        book = await lab.watch(30 * minutes)
        return [gone.get(name, book.jobs[name]) for name in NAMES]
    finally:
        lab.rubato("cluster", "stop", lab.folder)


def told(job: JobRecord) -> str:
    kept = f"{job.kept:.3f} of {job.slo:g}" if job.kept else "never profiled"
    return f"{job.name}: {kept} over {job.alone_s:.0f} s of steps alone, started {job.starts} times; {job.promise}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Whether real jobs on a cluster keep the bounds that they were promised.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--short", action="store_true", help="a minute: it starts, its figures say nothing")
    parser.add_argument("--slo", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    given = parser.parse_intermixed_args(argv)
    if given.short:
        print(NO_RESULT)
        given.minutes = 1.0
    with tempfile.TemporaryDirectory(prefix="rubato-slo-") as place:
        lab = Lab(Path(place))
        jobs = asyncio.run(measure(lab, given.minutes, given.slo, given.overrides))
        said = [line for line in (lab.folder / "cluster.log").read_text().splitlines() if " job " in line or line.startswith("job ")]
    kept = [0 < job.kept <= job.slo for job in jobs]
    attained = sum(kept) / len(kept)
    print("\n".join([*said, *map(told, jobs), f"attained: {attained:.0%} of {len(jobs)} jobs"]))
    if given.json:
        rows = [{"name": j.name, "slo": j.slo, "kept": j.kept, "alone_s": j.alone_s, "starts": j.starts} for j in jobs]
        given.json.write_text(json.dumps({"attained": attained, "minutes": given.minutes, "jobs": rows}))
    return 0 if given.short or all(kept) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

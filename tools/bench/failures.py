"""Useful time of a run under failures: every tenth step one process or the whole host is killed, beside a job that restarts whole.

python tools/bench/failures.py [--steps 40] [--pace-s 20] [--seeds 1 2] [--every 10] [--json FILE] [--short]

Each seed is played twice, with the same steps hit at the same moment in them. *Rubato* restarts what died, and a host that died is launched
again with --resume; *whole* is what a job does that knows no supervision: whatever dies, all of it is killed and launched again from its
newest checkpoint. Both save every step. The trainer is scripted and its steps are paced: each lasts --pace-s, which no hardware here computes;
processes, recoveries and checkpoints are real. `useful_frac` is steps × pace ÷ the time from the first step's begin to the last one's row.
`recovery_s` is by role the median of what a hit cost: the time of the steps that it touched, less their pace. `away_s` is by role the median
time from a hit to the launcher's word that what died is ready again; RLSim has other lengths of steps and more seeds, by that
(configs/sim/failures.yaml).
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.training.base_model import make  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.sim.failures import HOWS, Hit, hits_of  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402
from tools.chaos_job import Job  # noqa: E402

STUCK_S = 300.0
"""Longest time beyond its pace that a step may take."""
LOOK_S = 0.05
PREPARE_S = 300.0

CONFIG = """
run: {{name: failures, steps: {steps}}}
actors:
  sample_buffer: {{class: "rubato.actors.samples.buffer:SampleBuffer"}}
  llm_proxy: {{class: "rubato.actors.proxy.proxy:LLMProxy"}}
  engine: {{class: "rubato.actors.engines.worker:EngineWorker", count: 2}}
  env_manager: {{class: "rubato.actors.envs.manager:EnvManager", count: 2}}
  trainer: {{class: "rubato.actors.training.trainer:Trainer"}}
model: {{path: "{model}"}}
env: {{isolation: inline, concurrency: 16}}
engine: {{kind: scripted, scripted: {{token_s: {token_s}}}}}
rollout: {{max_turns: 3, max_new_tokens: 2}}
train: {{kind: scripted, batch_groups: 4, group_size: 4, scripted: {{step_s: {pace_s}, weights_mib: 8}}}}
check: {{enabled: false}}
eval: {{every: 0, final_num_tasks: 0}}
checkpoint: {{every: 1}}
report: {{finish: ""}}
"""


class Played(NamedTuple):
    """One run."""

    useful_frac: float
    recoveries: list[tuple[str, float, float, float]]
    """Of each hit the role, its place within its step as a share of the pace, what it cost in seconds, and how long until what died was ready."""


def clock() -> float:
    return time.monotonic()  # noqa: TID251


async def played(place: Path, hits: Sequence[Hit], steps: int, pace_s: float, *, whole: bool) -> Played:
    """Play a run to its end. Raises SystemExit where it stands still."""
    place.mkdir()
    config = place / "job.yaml"
    config.write_text(CONFIG.format(steps=steps, pace_s=pace_s, token_s=pace_s / 10, model=place.parent / "model"))
    job = Job(config, place / "run", ["actors.engine.restarts=100"])
    rng = random.Random(repr(hits))
    try:
        await job.start()
        begin = await until(job, 1, PREPARE_S + pace_s) - pace_s
        times, returns = {1: begin + pace_s}, list[asyncio.Task[float]]()
        async with asyncio.TaskGroup() as tasks:
            for hit in hits:
                await follow(job, times, hit.step, pace_s)
                await asyncio.sleep(max(0.0, times[hit.step] + hit.share * pace_s - clock()))
                said = job.output.stat().st_size
                word = await strike(job, hit.role, rng, whole=whole)
                returns.append(tasks.create_task(ready_again(job, said, word)))
            await follow(job, times, steps, pace_s)
        await job.launcher.wait()
        rows = [json.loads(line)["step"] for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
        if rows != list(range(1, steps + 1)):
            raise SystemExit(f"the run is not gapless: {rows}. {job.kept()}")
    finally:
        await job.end_left()
    job.forget(keep=False)
    spent = times[steps] - begin
    cuts = [*(hit.step for hit in hits), steps]
    cost = [
        (hit.role, hit.share, max(0.0, times[until_] - times[hit.step] - (until_ - hit.step) * pace_s), back.result())
        for hit, until_, back in zip(hits, cuts[1:], returns, strict=True)
    ]
    return Played(steps * pace_s / spent, cost)


async def until(job: Job, step: int, limit_s: float) -> float:
    """When the row of `step` was seen. Raises SystemExit where none comes."""
    began = clock()
    while job.steps() < step:
        if clock() - began > limit_s:
            raise SystemExit(f"step {step} had no row within {limit_s:.0f} s: {job.last_words()}. {job.kept()}")
        if job.launcher.returncode not in (None, 0):
            raise SystemExit(f"the launcher ended with {job.launcher.returncode}: {job.last_words()}. {job.kept()}")
        await asyncio.sleep(LOOK_S)
    return clock()


async def follow(job: Job, times: dict[int, float], step: int, pace_s: float) -> None:
    """Note when each step up to `step` first had its row."""
    for each in range(max(times) + 1, step + 1):
        times[each] = await until(job, each, pace_s + STUCK_S)


async def strike(job: Job, role: str, rng: random.Random, *, whole: bool) -> str:
    """Kill one process of `role`; where that ends the job, as the `whole` one's end does, launch it again. What its launcher will say of its
    return."""
    if not whole and role != "host":
        victim = rng.choice([victim for victim in job.victims() if victim.role == role])
        os.kill(victim.pid, signal.SIGKILL)
        return f"{'the embedded redis' if role == 'redis' else victim.name} is back"
    for process in job.left():
        os.kill(process.pid, signal.SIGKILL)
    job.launcher.kill()
    await job.launcher.wait()
    await job.start()
    return "  actors "


async def ready_again(job: Job, said: int, word: str) -> float:
    """The seconds until the launcher says `word`, behind the `said` bytes that it had said before."""
    began = clock()
    while word.encode() not in job.output.read_bytes()[said:]:
        if clock() - began > STUCK_S:
            raise SystemExit(f"the launcher did not say '{word.strip()}' within {STUCK_S:.0f} s. {job.kept()}")
        await asyncio.sleep(LOOK_S)
    return clock() - began


async def measured(seeds: Sequence[int], steps: int, pace_s: float, every: int, jobs: int) -> dict[str, Any]:
    """Each run has a process of its own, which all of the run is below."""
    turns, found = asyncio.Semaphore(jobs), {how: dict[int, Played]() for how in HOWS}

    async def play(seed: int, how: str) -> None:
        async with turns:
            command = [sys.executable, __file__, "--play", how, "--seeds", seed, "--steps", steps, "--pace-s", pace_s, "--every", every]
            run = await asyncio.create_subprocess_exec(*map(str, command), stdout=asyncio.subprocess.PIPE, preexec_fn=die_with_parent)
            out, _ = await run.communicate()
        if run.returncode:
            raise SystemExit(run.returncode)
        done = found[how][seed] = Played(*json.loads(out))
        cost = ", ".join(f"{role} {seconds:.1f} s, back after {away_s:.1f}" for role, _, seconds, away_s in done.recoveries)
        print(f"seed {seed}, {how}: useful {done.useful_frac:.3f} ({cost})", flush=True)

    async with asyncio.TaskGroup() as tasks:
        for seed in seeds:
            for how in HOWS:
                tasks.create_task(play(seed, how))
    hits = {how: [each for run in runs.values() for each in run.recoveries] for how, runs in found.items()}
    return {
        "useful_frac": round(statistics.fmean(run.useful_frac for run in found["rubato"].values()), 4),
        "useful_frac_whole": round(statistics.fmean(run.useful_frac for run in found["whole"].values()), 4),
        "hits": len(hits["rubato"]),
        "recovery_s": by_role([(role, seconds) for role, _, seconds, _ in hits["rubato"]]),
        "recovery_s_whole": round(statistics.median(seconds for _, _, seconds, _ in hits["whole"]), 2),
        "away_s": by_role([(role, away_s) for role, _, _, away_s in hits["rubato"]]),
        "away_s_whole": round(statistics.median(away_s for _, _, _, away_s in hits["whole"]), 2),
        "steps": steps,
        "pace_s": pace_s,
        "seeds": list(seeds),
        "each": hits,
    }


def by_role(figures: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The median of each role."""
    return {name: round(statistics.median(figure for role, figure in figures if role == name), 2) for name in sorted(dict(figures))}


async def played_alone(how: str, seed: int, steps: int, pace_s: float, every: int) -> Played:
    with tempfile.TemporaryDirectory(prefix="failures-") as scratch:
        make(Path(scratch) / "model", 1, lambda what, share: None, steps=0)
        return await played(Path(scratch) / how, hits_of(seed, steps, every), steps, pace_s, whole=how == "whole")


def main() -> int:
    parser = argparse.ArgumentParser("failures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--pace-s", type=float, default=20.0, help="what a step lasts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="each draws who is hit, and when")
    parser.add_argument("--every", type=int, default=10, help="one step of so many is hit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--short", action="store_true", help="six steps of a second: it starts, its figures say nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once: they share the cores, and mostly wait for their pace")
    parser.add_argument("--play", choices=HOWS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        done = asyncio.run(played_alone(given.play, given.seeds[0], given.steps, given.pace_s, given.every))
        print(json.dumps(done))
        return 0
    if given.short:
        given.steps, given.pace_s, given.seeds, given.every = 6, 1.0, [1], 3
    found = asyncio.run(measured(given.seeds, given.steps, given.pace_s, given.every, given.jobs))
    if given.short:
        found = {"note": NO_RESULT, **found}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

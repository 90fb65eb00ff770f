"""Useful time of a run under failures: every tenth step one process or the whole host is killed, beside a job that restarts whole.

python tools/bench/failures.py [--steps 40] [--pace-s 20] [--seeds 1 2] [--every 10] [--json FILE] [--short]

Each seed is played twice, with the same steps hit at the same moment in them. *Rubato* restarts what died, and a host that died is launched
again with --resume; *whole* is what a job does that knows no supervision: whatever dies, all of it is killed and launched again from its
newest checkpoint. Both save every step. The trainer is scripted and its steps are paced: each lasts --pace-s, which no hardware here computes;
processes, recoveries and checkpoints are real. `useful_frac` is steps × pace ÷ the time from the first step's begin to the last one's row.
`recovery_s` is by role the median of what a hit cost: the time of the steps that it touched, less their pace.
`computed` is no measurement: what hits cost here, put into other lengths of steps and five seeds.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.training.base_model import make  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402
from tools.chaos_job import Job  # noqa: E402

ROLES = ("engine", "env_manager", "trainer", "sample_buffer", "llm_proxy", "redis", "host")
"""Of which a hit draws one; *host* is the launcher with all below it."""
PACES_S = (5.0, 20.0, 60.0, 300.0)
"""Lengths of steps for which the useful share is computed from what hits cost."""
COMPUTED_SEEDS = (1, 2, 3, 4, 5)
HOWS = ("rubato", "whole")
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


class Hit(NamedTuple):
    """One failure: in the step after `step`, that share of the pace after the row of `step`."""

    step: int
    role: str
    share: float


class Played(NamedTuple):
    """One run."""

    useful_frac: float
    recoveries: list[tuple[str, float, float]]
    """Of each hit the role, its place within its step as a share of the pace, and what it cost in seconds."""


def clock() -> float:
    return time.monotonic()  # noqa: TID251


def hits_of(seed: int, steps: int, every: int) -> list[Hit]:
    """The seed's, one in each `every` steps; no role again before all had their turn."""
    rng, deck, found = random.Random(seed), list[str](), list[Hit]()
    for begin in range(1, steps, every):
        last = min(begin + every, steps)
        if not deck:
            deck = rng.sample(ROLES, len(ROLES))
        found.append(Hit(rng.randrange(begin, last), deck.pop(), rng.uniform(0.1, 0.9)))
    return found


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
        times = {1: begin + pace_s}
        for hit in hits:
            await follow(job, times, hit.step, pace_s)
            await asyncio.sleep(max(0.0, times[hit.step] + hit.share * pace_s - clock()))
            await strike(job, hit.role, rng, whole=whole)
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
        (hit.role, hit.share, max(0.0, times[until_] - times[hit.step] - (until_ - hit.step) * pace_s))
        for hit, until_ in zip(hits, cuts[1:], strict=True)
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


async def strike(job: Job, role: str, rng: random.Random, *, whole: bool) -> None:
    """Kill one process of `role`; where that ends the job, as the `whole` one's end does, launch it again."""
    victims = [victim for victim in job.victims() if victim.role == role]
    if not whole and role != "host":
        os.kill(rng.choice(victims).pid, signal.SIGKILL)
        return
    for process in job.left():
        os.kill(process.pid, signal.SIGKILL)
    job.launcher.kill()
    await job.launcher.wait()
    await job.start()


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
        cost = ", ".join(f"{role} {seconds:.1f} s" for role, _, seconds in done.recoveries)
        print(f"seed {seed}, {how}: useful {done.useful_frac:.3f} ({cost})", flush=True)

    async with asyncio.TaskGroup() as tasks:
        for seed in seeds:
            for how in HOWS:
                tasks.create_task(play(seed, how))
    by_role: dict[str, list[float]] = {}
    hits = {how: [each for run in runs.values() for each in run.recoveries] for how, runs in found.items()}
    for role, _, seconds in hits["rubato"]:
        by_role.setdefault(role, []).append(seconds)
    return {
        "useful_frac": round(statistics.fmean(run.useful_frac for run in found["rubato"].values()), 4),
        "useful_frac_whole": round(statistics.fmean(run.useful_frac for run in found["whole"].values()), 4),
        "hits": len(hits["rubato"]),
        "recovery_s": {role: round(statistics.median(each), 2) for role, each in sorted(by_role.items())},
        "recovery_s_whole": round(statistics.median(seconds for _, _, seconds in hits["whole"]), 2),
        "steps": steps,
        "pace_s": pace_s,
        "seeds": list(seeds),
        "each": hits,
        "computed": {str(pace): computed(hits, pace_s, pace, steps, every) for pace in PACES_S},
    }


def computed(
    hits: Mapping[str, Sequence[tuple[str, float, float]]], played_s: float, pace_s: float, steps: int, every: int
) -> dict[str, float]:
    """Useful shares over five seeds at steps of `pace_s`: a hit costs its role's median seconds, of which those of the step that is done
    again grow with the pace. A role that was never hit costs what the dearest one does."""
    found: dict[str, float] = {}
    for how, told in hits.items():
        fixed: dict[str, list[float]] = {}
        for role, share, seconds in told:
            fixed.setdefault(role, []).append(max(0.0, seconds - share * played_s * _redone(role, how)))
        costs = {role: statistics.median(each) for role, each in fixed.items()}
        dearest, fracs = max(costs.values(), default=0.0), list[float]()
        for seed in COMPUTED_SEEDS:
            lost = sum(costs.get(hit.role, dearest) + hit.share * pace_s * _redone(hit.role, how) for hit in hits_of(seed, steps, every))
            fracs.append(steps * pace_s / (steps * pace_s + lost))
        found["useful_frac" if how == "rubato" else "useful_frac_whole"] = round(statistics.fmean(fracs), 4)
    return found


def _redone(role: str, how: str) -> bool:
    """Whether a hit has the trainer begin its step again."""
    return how == "whole" or role in ("trainer", "host")


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

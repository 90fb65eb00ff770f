"""Jobs that share pools by phases, against the same jobs on pools of their own: paced, live processes.

python tools/bench/multiplexing.py [--short | --only two] [--steps 3] [--json FILE] [--gantt PNG] [key.sub=value …]

*two*: a rollout pool and a training pool for two jobs whose steps are split 52 to 48 between them. *three*: three jobs with a rollout pool
each and one training pool; two roll out 2.5 times as long as they train, one 6 times. *environments*: two jobs on one pool of each kind,
whose resets and rewards are 30 % of a step and need neither. After RollMux, section 7.2, whose figures are 1.82 and 1.90.

Cost efficiency is (price of pools of one's own ÷ price of the shared pools) × mean(T_solo ÷ T_co): a rollout pool is eight H20 at $1.85 an
hour each, a training pool eight H800 at $5.28, T the mean step of those within the time in which all jobs run, without the first. All at
staleness.alpha=0. Everything here is paced: a pool is one scripted engine whose steps, sleep and wake-up last what an H20's do for Qwen3-8B,
times a scale, and a scripted trainer. Its step is set, and its warm start is to its step as 4.1 s to the 126 s of RollMux's job A (7B, section
3.6 and figure of the schedule). Jobs are launched as users do.
Fails where more than 2 % of an engine's steps outlasted their pace. `--json` writes {"cases": [{"name", "cost_efficiency", "slowdown": [of
each job], …}]}.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.cluster.permits import Permits  # noqa: E402
from rubato.actors.engines.pace import MOST_OUTLASTED, deployment_of  # noqa: E402
from rubato.actors.engines.section import PaceSection  # noqa: E402
from rubato.planning.coexecution import JobProfile, NodePool, SharedCluster  # noqa: E402
from rubato.planning.roofline import Roofline  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.launch.shared import SharedScope, open_shared, write_shared  # noqa: E402
from rubato.runtime.store.embedded import EmbeddedRedis  # noqa: E402
from rubato.sim.live.shared import held, turns  # noqa: E402
from tools.bench.peers.phase_gantt import Held, draw, worst_deviation  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

SCALE = 0.18
PACE = {"hardware": "h20", "model": "qwen3-8b", "scale": SCALE}
ROWS, GROUP = 256, 8
"""Responses of a step, all of which one engine decodes at once: its steps last long enough for two cores to keep up."""
WARM_START = 4.1 / 126.0
"""Of a training step."""
JUDGE_CALLS = 5
"""The reward service takes a step's responses in so many calls, one after another."""
H20, H800 = 8 * 1.85, 8 * 5.28
"""Of one pool, in $ an hour."""
START_S, END_S = 90.0, 60.0

COMMON = (
    "run.steps=1000000",
    "actors.engine.count=1",
    "actors.fabric_controller.count=0",
    "actors.optical_switch.count=0",
    f"env.class={ROOT}/tools/bench/peers/pausing.py:Pausing",
    f"env.concurrency={ROWS}",
    "engine.kind=scripted",
    f"engine.num_slots={ROWS}",
    "engine.max_len=8192",
    "engine.max_batch_tokens=8192",
    "engine.stream_every=4096",
    "engine.prefix_cache=false",
    "engine.gather_s=0.05",
    "engine.scripted={stop_share: 0, vocab_size: 1048576}",
    f"engine.pace={json.dumps(PACE)}",
    "rollout.max_turns=1",
    "rollout.max_len=8192",
    "staleness.alpha=0",
    f"train.batch_groups={ROWS // GROUP}",
    f"train.group_size={GROUP}",
    "train.kind=scripted",
    "train.scripted.weights_mib=0.01",
    "check.enabled=false",
    "eval.every=0",
    "eval.final_num_tasks=0",
    "checkpoint.every=1000",
    "samples.keep=0",
    'report.finish=""',
)


class Phases(NamedTuple):
    """What a step of a job takes, in seconds of this machine's clock."""

    rollout_s: float
    train_s: float
    reset_s: float = 0.0
    judge_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Of each response, so that a batch lasts `rollout_s`."""
        roofline, tokens, took_s = Roofline(deployment_of(PaceSection.model_validate(PACE))), 0, 0.0
        while took_s < self.rollout_s:
            tokens += 1
            took_s += SCALE * roofline.step_s(ROWS, ROWS * tokens)
        return tokens

    def settings(self) -> list[str]:
        judged = [f"reward.functions=[{ROOT}/tools/bench/peers/pausing.py:judge]", "reward.timeout_s=60"]
        alone = ["actors.reward_service.count=0", "reward.functions=[]"]
        return [
            f"rollout.max_new_tokens={self.tokens}",
            f"train.scripted.step_s={self.train_s}",
            f"train.scripted.switch_s={WARM_START * self.train_s / 2}",
            f"env.kwargs={{reset_s: {self.reset_s}, judge_s: {self.judge_s}}}",
            *(judged if self.judge_s else alone),
        ]

    def profile(self, name: str) -> JobProfile:
        """As RLSim has it: what its trainer takes to wake and sleep is in its step."""
        outside_s = self.reset_s + JUDGE_CALLS * self.judge_s
        return JobProfile(name, self.rollout_s, self.train_s * (1 + WARM_START), 1, 1, 0, 0, 1, environment_s=outside_s)


class Case(NamedTuple):
    """Jobs, each with the rollout pool that it runs on; all share one training pool."""

    jobs: Sequence[tuple[Phases, str]]

    @property
    def price_ratio(self) -> float:
        shared = (len(self.pools) - 1) * H20 + H800
        return len(self.jobs) * (H20 + H800) / shared

    @property
    def pools(self) -> set[str]:
        """With that of training."""
        return {"training", *(pool for _, pool in self.jobs)}


EVEN, BESIDE = Phases(12.0, 12.0 * 48 / 52), Phases(6.4, 5.9, reset_s=4.0, judge_s=0.25)
SHORT, LONG = Phases(6.0, 2.4), Phases(12.0, 2.0)
CASES: Mapping[str, Case] = {
    "two": Case([(EVEN, "rollout"), (EVEN, "rollout")]),
    "three": Case([(SHORT, "rollout-1"), (SHORT, "rollout-2"), (LONG, "rollout-3")]),
    "environments": Case([(BESIDE, "rollout"), (BESIDE, "rollout")]),
}
BRIEF = Phases(1.0, 0.5)
SHORTENED = Case([(BRIEF, "rollout"), (BRIEF, "rollout")])
FEW = ("env.concurrency=32", f"train.batch_groups={32 // GROUP}")
"""Settings of the case that only shows that the bench starts."""


class Job:
    """A launched job, and what its rows say."""

    def __init__(self, folder: Path, name: str, settings: Sequence[str]) -> None:
        self.name = name
        self._folder, self._said = folder / name, folder / f"{name}.said"
        command = [sys.executable, "tools/launch.py", "configs/quickstart.yaml", *COMMON, *settings]
        with self._said.open("w") as out:
            self.launcher = subprocess.Popen(
                [*command, "--run-dir", str(self._folder)], cwd=ROOT, stdout=out, stderr=out, preexec_fn=die_with_parent
            )

    def rows(self) -> list[dict[str, Any]]:
        if self.launcher.poll() is not None:
            raise SystemExit(f"{self.name} ended: {self._said.read_text()[-2000:]}")
        file = self._folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def end(self) -> None:
        self.launcher.terminate()
        self.launcher.wait(END_S)


class Seen(NamedTuple):
    """Of one job within the time that all ran."""

    step_s: float
    parts: Mapping[str, float]
    outlasted: float


async def measure(jobs: Sequence[Job], steps: int, step_s: float) -> list[Seen]:
    """Let all jobs make `steps` steps at least after their first ones."""
    try:
        async with asyncio.timeout(START_S + 3 * (steps + 1) * step_s):
            while min(len(job.rows()) for job in jobs) <= steps:  # noqa: ASYNC110 - files of other processes send no event
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise SystemExit(f"steps did not come: {[len(job.rows()) for job in jobs]} of {steps + 1}") from None
    since = max(job.rows()[0]["time/unix_s"] for job in jobs)
    return [_seen([row for row in job.rows()[1:] if row["time/unix_s"] - row["time/step"] >= since - 0.5 * step_s]) for job in jobs]


def _seen(rows: Sequence[Mapping[str, float]]) -> Seen:
    names = ("time/step", "time/wait_for_batch", "time/train", "time/wait_for_permit", "time/publish")
    parts = {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in names}
    return Seen(parts["time/step"], parts, max(row.get("paced/outlasted_frac", 0.0) for row in rows))


async def run(names: Mapping[str, Sequence[str]], steps: int, step_s: float) -> dict[str, Seen]:
    """Launch the jobs, each with its settings, measure them together, and stop them."""
    with tempfile.TemporaryDirectory(prefix="rubato-multiplexing-") as scratch:
        jobs = [Job(Path(scratch), name, settings) for name, settings in names.items()]
        try:
            return dict(zip(names, await measure(jobs, steps, step_s), strict=True))
        finally:
            for job in jobs:
                job.launcher.terminate()
            for job in jobs:
                job.end()


async def shared(case: Case, steps: int, given: Sequence[str]) -> tuple[list[Seen], Held]:
    """The jobs of a case on one cluster, and who held which pool when."""
    with tempfile.TemporaryDirectory(prefix="rubato-cluster-") as scratch:
        server = EmbeddedRedis(Path(scratch))
        write_shared(Path(scratch), SharedScope(f"bench-{secrets.token_hex(4)}", await server.start()))
        jobs: dict[str, list[str]] = {}
        for number, (phases, pool) in enumerate(case.jobs):
            cluster = f"{{dir: {scratch}, job: job-{number}, rollout_pool: {pool}, training_pool: training}}"
            jobs[f"job-{number}"] = [*phases.settings(), f"run.seed={number + 1}", f"cluster={cluster}", *given]
        store = open_shared(Path(scratch))
        try:
            seen = await run(jobs, steps, max(sum(phases) for phases, _ in case.jobs))
            return list(seen.values()), await held(Permits(store), case.pools)
        finally:
            await store.close()
            await server.stop()


def simulated(case: Case) -> Held:
    """The same in RLSim's second mode."""
    switch_s = 2 * SCALE * Roofline(deployment_of(PaceSection.model_validate(PACE))).sleep_s(0)
    cluster = SharedCluster(NodePool(H20, 0, switch_s=switch_s), NodePool(H800, 0))
    jobs = [(phases.profile(f"job-{number}"), pool) for number, (phases, pool) in enumerate(case.jobs)]
    with tempfile.TemporaryDirectory(prefix="rubato-simulated-") as scratch:
        return turns(jobs, cluster, Path(scratch))


async def bench(cases: Mapping[str, Case], steps: int, given: Sequence[str], live: dict[str, Held]) -> dict[str, Any]:
    """Each job alone first, all of them beside each other on pools of their own; then the cases. Who held which pool is left in `live`."""
    alone = {phases for case in cases.values() for phases, _ in case.jobs}
    settings = {f"solo-{number}": [*phases.settings(), *given] for number, phases in enumerate(alone)}
    longest = max(sum(phases) for phases in alone)
    solo = dict(zip(alone, (await run(settings, max(2, steps - 1), longest)).values(), strict=True))
    for phases, seen in solo.items():
        print(f"alone   {seen.step_s:6.2f} s a step {_told(seen)}  set: {phases}", flush=True)
    found: list[dict[str, Any]] = []
    for name, case in cases.items():
        together, live[name] = await shared(case, steps, given)
        slowdown = [seen.step_s / solo[phases].step_s for seen, (phases, _) in zip(together, case.jobs, strict=True)]
        efficiency = case.price_ratio * statistics.fmean(1 / each for each in slowdown)
        outlasted = max(seen.outlasted for seen in (*together, *(solo[phases] for phases, _ in case.jobs)))
        for seen in together:
            print(f"{name:7} {seen.step_s:6.2f} s a step {_told(seen)}")
        print(f"{name}: cost efficiency {efficiency:.2f} (prices {case.price_ratio:.3f}), slowdown "
              f"{', '.join(f'{each:.3f}' for each in slowdown)}; {outlasted:.1%} of steps outlasted their pace (all paced)", flush=True)  # fmt: skip
        found.append({"name": name, "cost_efficiency": efficiency, "slowdown": slowdown, "price_ratio": case.price_ratio,
                      "step_s": [seen.step_s for seen in together], "solo_s": [solo[phases].step_s for phases, _ in case.jobs],
                      "outlasted_frac": outlasted, "paced": True})  # fmt: skip
    return {"cases": found}


def _told(seen: Seen) -> str:
    return "  ".join(f"{name.partition('/')[2]} {value:.2f}" for name, value in list(seen.parts.items())[1:])


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for; exit 1 where engines did not keep their pace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CASES), action="append", help="of the three cases")
    parser.add_argument("--steps", type=int, default=3, help="of each job that are measured, after the first")
    parser.add_argument("--short", action="store_true", help="two jobs of short steps: it starts, its figures say nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gantt", type=Path, metavar="PNG", help="draw the permits beside those of RLSim")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    live: dict[str, Held] = {}
    cases, steps, given = {name: CASES[name] for name in asked.only or CASES}, asked.steps, asked.overrides
    if asked.short:
        print(NO_RESULT, flush=True)
        cases, steps, given = {"short": SHORTENED}, 2, [*FEW, *given]
    found = asyncio.run(bench(cases, steps, given, live))
    if asked.gantt:
        sides = {name: (seen, simulated(cases[name])) for name, seen in live.items()}
        draw(sides, asked.gantt)
        for case in found["cases"]:
            case["phase_deviation"] = worst_deviation(*sides[case["name"]])
            print(f"{case['name']}: a phase's mean duration differs from RLSim's by {case['phase_deviation']:.1%} at most")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2))
    return 1 if not asked.short and any(case["outlasted_frac"] > MOST_OUTLASTED for case in found["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Rewards in slots set apart, against the same slots given to rollout and rewards in an elastic pool: paced, live processes.

python tools/bench/rewards.py [--steps 2] [--json FILE] [key.sub=value …]

Eight slots. *dedicated*: four roll out, four serve rewards only. *elastic*: all eight roll out; rewards run in a pool of 0 to 8 processes, as
functions of a platform would (RollArt, section 7.5; its figures: utilisation 6 -> 88 %, rollout 158 -> 77 s). A slot that rolls out is a
scripted engine whose steps last what an H800's do for Qwen3-8B, times four; one that serves rewards is a process in which each
trajectory occupies a slot for what a 7B reward model's prefill takes there, times four. Tokens and rewards are made up: all figures are paced.

A batch is four waves of all eight engines (eight waves of four), and no rollout is of older weights, so that rollout and training take turns.
`rollout_s` is how long the trainer waits for a batch, without the weight swap that comes before it in both arms; the mean of `--steps` batches after two
that warm up. `utilisation` is of the four slots in question: paced busy time (of the engines, without swaps; of reward calls) ÷ the wall time of these
rollouts. What actors have counted is compared between two pauses in which nothing is scored, known by the number scored so far: the engines swap weights then.
`pool_mean` and `pool_most` are the reward processes. Fails where no pause was seen, and where more than 2 % of the engines' steps outlasted their pace.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.engines.pace import MOST_OUTLASTED, EnginePace  # noqa: E402
from rubato.actors.engines.section import PaceSection  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.runtime.registry import ActorRecord, list_actors  # noqa: E402

PACE = {"hardware": "h800", "model": "qwen3-8b", "scale": 4.0}
SLOTS, NUM_SLOTS, WAVES = 4, 16, 4
GROUP = 8
OVERRIDES = (
    "run.steps=1000000",
    f"env.concurrency={2 * SLOTS * NUM_SLOTS * WAVES}",
    "engine.kind=scripted",
    f"engine.num_slots={NUM_SLOTS}",
    "engine.scripted={stop_share: 0.01, vocab_size: 512}",
    f"engine.pace={json.dumps(PACE)}",
    "rollout.max_turns=1",
    "rollout.max_new_tokens=192",
    f"reward.functions=[{ROOT}/tools/bench/peers/paced_judge.py:judge]",
    "staleness.alpha=0",
    f"train.batch_groups={2 * SLOTS * NUM_SLOTS * WAVES // GROUP}",
    f"train.group_size={GROUP}",
    "train.kind=scripted",
    "train.scripted.step_s=0",
    "train.scripted.weights_mib=0.01",
    "check.enabled=false",
    "eval.every=0",
    "eval.final_num_tasks=0",
    "checkpoint.every=1000",
    'report.finish=""',
)
POOLS = {
    "dedicated": ({"kept": SLOTS}, (f"reward.workers={SLOTS}",)),
    "elastic": ({"kept": SLOTS, "freed": SLOTS}, (f"reward.workers={2 * SLOTS}", "reward.min_workers=0")),
}
START_S, STEP_S, END_S = 120.0, 120.0, 60.0
WARM, LOOK_S = 2, 0.25


class Seen:
    """What actors have counted."""

    def __init__(self, actors: Sequence[ActorRecord]) -> None:
        engines = [actor for actor in actors if actor.role == "engine"]
        (rewards,) = (actor for actor in actors if actor.role == "reward_service")
        self.freed_s = sum(actor.metrics["paced/busy_s"] for actor in engines if actor.pool == "freed")
        self.rewards_s = rewards.metrics.get("reward/busy_s", 0.0)
        self.scored = rewards.metrics.get("reward/scored", 0.0)
        self.workers = rewards.metrics["reward/workers"]
        self.cold_starts = rewards.metrics.get("reward/cold_starts", 0.0)
        steps = sum(actor.metrics["paced/steps"] for actor in engines)
        over = sum(actor.metrics["paced/steps"] * actor.metrics["paced/outlasted_frac"] for actor in engines)
        self.outlasted = over / max(1.0, steps)


async def measure(folder: Path, launcher: "subprocess.Popen[bytes]", steps: int) -> dict[str, Any]:
    """Watch the run in `folder`: `WARM` steps, then `steps`. Raises TimeoutError where they do not come."""
    await _reached(folder, launcher, 1, START_S)
    seen: list[Seen] = []
    async with connect(folder, types=False) as run:

        async def watch() -> None:
            while True:
                seen.append(Seen(await list_actors(run.store)))
                await asyncio.sleep(LOOK_S)

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            await _reached(folder, launcher, WARM + steps + 1, STEP_S * (WARM + steps))
            watching.cancel()
    train = yaml.safe_load((folder / "config.yaml").read_text())["train"]
    batch = train["batch_groups"] * train["group_size"]
    first, last = _pause(seen, WARM * batch), _pause(seen, (WARM + steps) * batch)
    sizes = [each.workers for each in seen[seen.index(first) : seen.index(last) + 1]]
    swap_s = EnginePace(PaceSection.model_validate(PACE)).swap_s()
    rollouts = [row["time/wait_for_batch"] - swap_s for row in _rows(folder)[WARM : WARM + steps]]
    wall_s = SLOTS * sum(rollouts)
    freed_s = last.freed_s - first.freed_s - SLOTS * steps * swap_s
    rewards_s = last.rewards_s - first.rewards_s
    return {
        "utilisation": (freed_s if last.freed_s else rewards_s) / wall_s,
        "rollout_s": statistics.fmean(rollouts),
        "rollouts_s": rollouts,
        "reward_busy_s": rewards_s / steps,
        "scored": (last.scored - first.scored) / steps,
        "pool_mean": statistics.fmean(sizes),
        "pool_most": max(sizes),
        "cold_starts": last.cold_starts - first.cold_starts,
        "outlasted_frac": last.outlasted,
    }


def _pause(seen: Sequence[Seen], scored: int) -> Seen:
    """The middle of what was seen between two batches, `scored` trajectories after the start."""
    between = [each for each in seen if each.scored == scored]
    if not between:
        raise SystemExit(f"no figures of the pause after {scored} trajectories were seen: the machine is too busy for this bench")
    return between[len(between) // 2]


async def _reached(folder: Path, launcher: "subprocess.Popen[bytes]", step: int, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while len(_rows(folder)) < step:
            await asyncio.sleep(0.1)
            if launcher.poll() is not None:
                raise TimeoutError


def _rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def run(arm: str, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Launch the job of one arm, measure it, and stop it."""
    pools, own = POOLS[arm]
    engine = {"class": "rubato.actors.engines.worker:EngineWorker", "pools": {n: {"count": num} for n, num in pools.items()}}
    with tempfile.TemporaryDirectory(prefix="rubato-rewards-") as scratch:
        folder, said = Path(scratch) / "run", Path(scratch) / "said"
        command = ["tools/launch.py", "configs/quickstart.yaml", f"actors.engine={json.dumps(engine)}", *OVERRIDES, *own]
        with said.open("w") as out:
            launcher = subprocess.Popen(
                [sys.executable, *command, *overrides, "--run-dir", str(folder)],
                cwd=ROOT,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,
            )
        try:
            return asyncio.run(measure(folder, launcher, steps))
        except TimeoutError:
            raise SystemExit(f"{arm}: the steps were not trained: {said.read_text()[-2000:]}") from None
        finally:
            launcher.terminate()
            launcher.wait(END_S)


def main(argv: Sequence[str]) -> int:
    """Measure both arms, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="batches that are measured, of each arm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    given = parser.parse_args(argv)
    found = {arm: run(arm, given.steps, given.overrides) for arm in POOLS}
    for arm, figures in found.items():
        print(
            f"{arm:9}  rollout {figures['rollout_s']:6.1f} s   the four slots {figures['utilisation']:4.0%} busy   "
            f"reward processes {figures['pool_mean']:.1f} (most {figures['pool_most']:.0f}, {figures['cold_starts']:.0f} cold starts)   "
            f"{figures['outlasted_frac']:.2%} of steps outlasted their pace"
        )
    speedup = found["dedicated"]["rollout_s"] / found["elastic"]["rollout_s"]
    print(f"dedicated / elastic: {speedup:.2f} (paced; paper 158 / 77 s = 2.05, 6 -> 88 % busy)")
    if given.json:
        given.json.write_text(json.dumps({**found, "speedup": speedup}, indent=2))
    late = [arm for arm, figures in found.items() if figures["outlasted_frac"] > MOST_OUTLASTED]
    if late:
        print(f"{' and '.join(late)}: more than {MOST_OUTLASTED:.0%} of the steps outlasted their pace: these times are the host's")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

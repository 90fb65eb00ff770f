"""The quickstart beside an honest one-process loop: same model, task, optimiser and sampler code, no actors.

python tools/bench/quickstart.py                         both, one after the other, and the ratio of their times to 0.8
python tools/bench/quickstart.py --only loop             the one-process loop alone
python tools/bench/quickstart.py --run RUN_DIR           the loop beside a run that is there already
python tools/bench/quickstart.py --only loop --age 8     the loop, each batch played by weights eight versions old
python tools/bench/quickstart.py --short                 three small steps of both: they start, their figures say nothing
Any `key.sub=value` changes the config for both.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.config import ModelSection, RolloutSection, TrainSection  # noqa: E402
from rubato.actors.engines.engine import Work  # noqa: E402
from rubato.actors.engines.runner import ModelRunner  # noqa: E402
from rubato.actors.engines.scheduler import Scheduler  # noqa: E402
from rubato.actors.engines.scheduler import Sequence as Running  # noqa: E402
from rubato.actors.engines.section import EngineSection  # noqa: E402
from rubato.actors.envs.chat import ChatRenderer, Transcript  # noqa: E402
from rubato.actors.envs.frozen_lake import FrozenLakeText  # noqa: E402
from rubato.actors.messages.generation import Sampling  # noqa: E402
from rubato.actors.messages.samples import Ticket, Trajectory  # noqa: E402
from rubato.actors.rewards.functions import malformed_penalty  # noqa: E402
from rubato.actors.training.base_model import make  # noqa: E402
from rubato.actors.training.torch_train import TorchTrainEngine  # noqa: E402
from rubato.actors.training.train_engine import image_of  # noqa: E402
from rubato.bus.message import unpack_i32  # noqa: E402
from rubato.runtime.config import RunSection  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

GOAL = 0.8
SMOOTH = 3
"""Steps averaged before the goal counts as reached: one step's mean over 32 groups still jumps by 0.05."""

HELD_OUT = 200

SHORT = (
    "run.steps=3", "train.batch_groups=4", "train.group_size=4", "eval.every=0", "eval.final_num_tasks=0",
    "actors.engine.count=1", "actors.fabric_controller.count=0", "actors.optical_switch.count=0", 'report.finish=""',
)  # fmt: skip
"""Of a run that shows that it starts."""


class Settings(NamedTuple):
    """What both sides read from the config."""

    run: RunSection
    train: TrainSection
    rollout: RolloutSection


class Point(NamedTuple):
    """One training step: mean reward of its samples, and seconds since training began."""

    step: int
    reward: float
    seconds: float


class Sampler:
    """Plays many episodes in lock step with the built-in engine's model code: one batch, one KV slot per episode."""

    def __init__(self, folder: Path, rollout: RolloutSection, *, episodes: int, threads: int, seed: int) -> None:
        self._section = EngineSection(num_slots=episodes, max_len=rollout.max_len, max_batch_tokens=1 << 20)
        self._runner = ModelRunner.load(folder, ModelSection(device="cpu", dtype="float32", torch_threads=threads), self._section)
        self._renderer = ChatRenderer(folder, system_prompt=rollout.system_prompt)
        self._rollout = rollout
        self._seed = seed
        self.num_tokens = 0

    def update(self, image: memoryview) -> None:
        """Take the trainer's weights."""
        self._runner.weights = self._runner.prepare(image, "the trainer")

    def play(self, seeds: Sequence[int], *, version: int, split: str, greedy: bool = False) -> list[Trajectory]:
        """One finished trajectory per seed."""
        scheduler = Scheduler(self._section.num_slots, self._section.max_batch_tokens)
        sampling = Sampling(
            self._rollout.max_new_tokens,
            temperature=0.0 if greedy else self._rollout.temperature,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=self._seed,
        )
        episodes = [_Episode(self._renderer, index, seed, version, split) for index, seed in enumerate(seeds)]
        live = episodes
        while live:
            for episode in live:
                scheduler.add(episode.ask(sampling, self._section.max_len))
            self._generate(scheduler, version)
            live = [episode for episode in live if episode.advance(self._rollout.max_turns)]
        return [episode.trajectory(version) for episode in episodes]

    def _generate(self, scheduler: Scheduler, version: int) -> None:
        import torch

        with torch.inference_mode():
            while scheduler.num_running or scheduler.num_waiting:
                rows, ids, logprobs = self._runner.step(scheduler.schedule())
                done = scheduler.computed(rows)
                for sequence, token, logprob in zip(done, ids, logprobs, strict=True):
                    sequence.sampled(token, logprob, version)
                self.num_tokens += len(ids)
                scheduler.retire([s for s in done if s.finish_reason])


class _Episode:
    """One trajectory being played."""

    def __init__(self, renderer: ChatRenderer, index: int, seed: int, version: int, split: str) -> None:
        self._renderer = renderer
        self._name = f"{version}.{split}.{index}"
        self._env = FrozenLakeText(split=split)  # type: ignore[arg-type]
        observation, _ = self._env.reset(seed=seed)
        self._transcript = Transcript(renderer.opening(str(observation)))
        self._running: Running
        self._reward, self._turns, self._invalid = 0.0, 0, 0

    def ask(self, sampling: Sampling, max_len: int) -> Running:
        """The next completion to sample."""
        work = Work(f"{self._name}.{self._turns}", self._name, tuple(unpack_i32(self._transcript.prompt)), sampling)
        self._running = Running(work, max_len)
        return self._running

    def advance(self, max_turns: int) -> bool:
        """Step the environment with what was sampled; False when the episode is over."""
        tokens = self._running.chunk().tokens
        self._transcript.sample(tokens)
        observation, reward, terminated, _, info = self._env.step(self._renderer.decode(tokens.ids))
        self._turns += 1
        self._reward += reward
        self._invalid += bool(info.get("invalid"))
        if terminated or self._turns >= max_turns:
            return False
        self._transcript.show(self._renderer.follow_up(str(observation), unpack_i32(tokens.ids)[-1]))
        return True

    def trajectory(self, version: int) -> Trajectory:
        penalty = malformed_penalty([""], [self._turns], [self._invalid])[0]
        ticket = Ticket(self._name, self._name, 1, 0, 0, version)
        segments = (self._transcript.segment(),)
        temperature = self._running.work.sampling.temperature
        return Trajectory(ticket, segments, self._reward + penalty, self._turns, False, 0.0, temperature)


def loop(settings: Settings, folder: Path, threads: int, age: int) -> Iterator[Point]:
    """Each step trains the oldest of `age` + 1 batches, hands the weights over and plays another; age 0 is synchronous.

    The first batches are all played by the base model. Prints the held-out reward.
    """
    train, run = settings.train, settings.run
    model = ModelSection(path=str(folder), torch_threads=threads)
    engine = TorchTrainEngine(model, train.resolved(alpha=age, folder=folder), steps=run.steps, seed=run.seed)
    engine.load(folder, None)
    num = train.batch_groups * train.group_size
    sampler = Sampler(folder, settings.rollout, episodes=max(num, HELD_OUT), threads=threads, seed=run.seed)
    seeds = random.Random(run.seed)
    began = time.perf_counter()

    def play(version: int) -> list[Trajectory]:
        tasks = [seeds.randrange(1 << 31) for _ in range(train.batch_groups)]
        return sampler.play([t for t in tasks for _ in range(train.group_size)], version=version, split="train")

    waiting = deque(play(0) for _ in range(age))
    for step in range(1, run.steps + 1):
        waiting.append(play(step - 1))
        played = waiting.popleft()
        engine.train(step, [played[i : i + train.group_size] for i in range(0, num, train.group_size)])
        sampler.update(image_of(engine))
        yield Point(step, sum(t.reward for t in played) / num, time.perf_counter() - began)
    held_out = sampler.play(range(HELD_OUT), version=run.steps, split="eval", greedy=True)
    print(f"loop: held-out {sum(t.reward for t in held_out) / HELD_OUT:.3f} over {HELD_OUT} maps")


def launched(config: Path, overrides: Sequence[str], folder: Path) -> Path:
    """Run the quickstart itself to its end; returns its run folder."""
    run = folder / "run"
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), str(config), *overrides, "--run-dir", str(run)]
    subprocess.run(command, check=True, cwd=ROOT)
    return run


def points_of(run: Path) -> list[Point]:
    """The curve of a run folder."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [Point(row["step"], row["reward/mean"], row["time/wall_s"]) for row in rows]


def seconds_to(goal: float, points: Sequence[Point]) -> float | None:
    """When the mean over `SMOOTH` steps first reached `goal`; None when it never did."""
    for end in range(SMOOTH, len(points) + 1):
        if sum(p.reward for p in points[end - SMOOTH : end]) / SMOOTH >= goal:
            return points[end - 1].seconds
    return None


def report(name: str, points: Sequence[Point]) -> float | None:
    """Print one side's result; returns its time to the goal."""
    found = seconds_to(GOAL, points)
    last = points[-10:]
    reached = f"{found:.1f} s" if found is not None else "not reached"
    print(
        f"{name}: {GOAL:g} after {reached}; last {len(last)} steps {sum(p.reward for p in last) / len(last):.3f}, "
        f"{len(points)} steps in {points[-1].seconds:.1f} s"
    )
    return found


def settings_of(config: Path, overrides: Sequence[str]) -> Settings:
    """Run, train and rollout sections of the config, overrides applied."""
    import yaml

    raw = yaml.safe_load(config.read_text())
    for override in overrides:
        key, _, value = override.partition("=")
        *above, name = key.split(".")
        section = raw
        for part in above:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    return Settings(RunSection(**raw.get("run", {})), TrainSection(**raw.get("train", {})), RolloutSection(**raw.get("rollout", {})))


def main(argv: Sequence[str]) -> int:
    """Run what was asked for and print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of the one-process loop")
    parser.add_argument("--age", type=int, default=0, help="of the loop's samples, in weight versions")
    parser.add_argument("--only", choices=("loop", "actors"))
    parser.add_argument("--short", action="store_true", help="three small steps: it starts, its figures say nothing")
    parser.add_argument("--run", type=Path, help="a finished run to compare with, instead of a new one")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    overrides = [*(SHORT if asked.short else ()), *asked.overrides]
    if asked.short:
        print(NO_RESULT)
    times: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as scratch:
        if asked.only != "actors":
            settings = settings_of(asked.config, overrides)
            make(Path(scratch) / "model", settings.run.seed, lambda _, __: None)
            points: list[Point] = []
            for point in loop(settings, Path(scratch) / "model", asked.threads, asked.age):
                points.append(point)
                if point.step % 5 == 0 or point.step == 1:
                    print(f"{point.step:4d}  {point.reward:.3f}  {point.seconds:6.1f} s", flush=True)
            times["loop"] = report("loop", points)
        if asked.only != "loop":
            run = asked.run or launched(asked.config, overrides, Path(scratch))
            times["actors"] = report("actors", points_of(run))
    if times.get("loop") and times.get("actors"):
        print(f"ratio actors / loop to {GOAL:g}: {times['actors'] / times['loop']:.2f}")  # type: ignore[operator]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

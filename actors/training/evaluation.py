"""Held-out evaluations: exact in their version, beside training, and kept in evals.jsonl.

An evaluation of version v needs engines that sample under v from its first token to its last. So before anything newer is published, one engine
in `SHARE` is asked to hold v; the others go on with training. The SampleBuffer accepts no held-out rollout with a token of another version, so
that a hold that was lost can spoil an evaluation, which is then done again, but never its exactness.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Final

from rubato.actors.config import EvalSection
from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.samples import EvalResult, Evaluate
from rubato.actors.messages.weights import HoldWeights
from rubato.actors.training.hooks import StepHook
from rubato.actors.training.publishing import BUFFER
from rubato.actors.training.rows import Rows
from rubato.bus.errors import AskFailed
from rubato.runtime.actor import Actor
from rubato.runtime.observe.trace import wall_s

if TYPE_CHECKING:
    from rubato.actors.training.trainer import Trainer

SHARE: Final = 8
"""One engine in this many evaluates while training goes on; the least is one. After the last step all do."""

HOLD_S: Final = 90.0
"""A hold that is not renewed ends by itself; it is renewed with each ask of the sample buffer."""

TRIES: Final = 5
"""Evaluations of one version that are begun, where engines that held it died, before there is none."""

REPLY_S: Final = 30.0
"""Beyond the time that the sample buffer may hold the ask back."""

ONLY_TASK: Final = "env"
"""What the task of a job is called whose config has no `tasks`: as the section that describes it."""

FAILED_SHARE: Final = 0.01
"""Above this share of rollouts without a score the user is told: the reward says nothing about them."""


def figures(found: EvalResult, section: EvalSection) -> dict[str, float]:
    """A row of evals.jsonl: `version`, `reward` (absent where all failed), `num` rollouts that finished, `failed` ones, how prompts were
    sampled, and the means of what the rewards consist of and of what the environment told (see `breakdown`).

    With `eval.samples` k > 1 also `avg@k`, the mean over prompts of the mean reward of those that finished, and `pass@j` for the powers of
    two up to k and k itself: a rollout that failed solved nothing. Each task has the same under `task/NAME/`, also where k is 1, and its
    `reward`, where not all failed.
    """
    rewards = [reward for prompt in found.rewards for reward in prompt]
    row: dict[str, float] = {"version": found.version}
    if rewards:
        row["reward"] = fmean(rewards)
        row |= found.figures
    greedy = section.samples == 1
    row |= {"num": len(rewards), "failed": found.failed, "samples": section.samples}
    row |= {"temperature": 0.0 if greedy else section.temperature, "top_p": 1.0 if greedy else section.top_p}
    row |= {} if greedy else _at_k(found.rewards, section)
    names = found.tasks or (ONLY_TASK,) * len(found.rewards)
    for task in dict.fromkeys(names):
        own = [p for name, p in zip(names, found.rewards, strict=True) if name == task]
        own_rewards = [reward for prompt in own for reward in prompt]
        row |= {f"task/{task}/reward": fmean(own_rewards)} if own_rewards else {}
        row |= {f"task/{task}/{name}": value for name, value in _at_k(own, section).items()}
    return row


def _at_k(prompts: Sequence[Sequence[float]], section: EvalSection) -> dict[str, float]:
    """`avg@k` and `pass@j` over prompts, of each the rewards of its rollouts that finished."""
    k, finished = section.samples, [prompt for prompt in prompts if prompt]
    row = {f"avg@{k}": fmean(map(fmean, finished))} if finished else {}
    if prompts:
        for j in sorted({k, *(2**n for n in range(k.bit_length()))}):
            passed = [(max(k, len(prompt)), sum(r >= section.pass_reward for r in prompt)) for prompt in prompts]
            row[f"pass@{j}"] = fmean(pass_at(j, num, solved) for num, solved in passed)
    return row


def pass_at(k: int, num: int, passed: int) -> float:
    """Probability that one of `k` ≤ `num` rollouts passes where `passed` of `num` did, without bias: 1 - C(num - passed, k) / C(num, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - math.comb(num - passed, k) / math.comb(num, k)


class Evaluation(StepHook):
    """Evaluates versions as `eval` says: the last one on all engines before the run ends, any other one beside training."""

    def __init__(self, trainer: "Trainer") -> None:
        super().__init__(trainer)
        self._held_out = HeldOut(trainer, trainer.config.eval)

    async def begin(self, step: int, rows: Callable[[], Iterator[Mapping[str, float]]]) -> None:
        trainer = self.trainer
        if damaged := await trainer.on_disk(trainer.run.folder, self._held_out.take_over, step):
            trainer.notice(f"{damaged} damaged lines of {trainer.run.folder}/evals.jsonl were left out")
        trainer.spawn(self._settle_when_leaving(), name=f"{trainer.name}.settle")

    async def _settle_when_leaving(self) -> None:
        await self.trainer.leaving.wait()
        self._held_out.settle()

    async def before_publish(self, version: int) -> None:
        with self.trainer.waits.on(f"evaluation {version}", stage="evaluation", holder="engine", blocks_actor=True):
            await self._held_out.settled()

    async def after_publish(self, version: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        trainer, held_out = self.trainer, self._held_out
        num = held_out.due(version, trainer.run.steps)
        if version == trainer.run.steps:
            await trainer.out.announced()
            with trainer.waits.on(f"evaluation {version}", stage="evaluation", holder=BUFFER, blocks_actor=True):
                whole = await held_out.last(version, trainer.term, num, trainer.leaving)
            if not whole:
                trainer.notice(f"the evaluation after step {version} was cut short: the run is being saved")
        elif num and trainer.out.version != version:
            held_out.put_off()
        elif num and not trainer.leaving.is_set():
            held_out.begin(version, trainer.term, num)
        return held_out.take()

    async def on_peers(self, joined: Sequence[str], left: Sequence[str]) -> None:
        self._held_out.left(left)

    def keep(self, steps: Collection[int]) -> Collection[int]:
        return self._held_out.worth_keeping(steps) if self.trainer.config.checkpoint.keep_best else ()


class HeldOut:
    """Evaluates versions one at a time, and keeps the newest result until a row takes it."""

    def __init__(self, actor: Actor, section: EvalSection) -> None:
        self._actor = actor
        self._section = section
        self._rows = Rows(actor.run.folder / "evals.jsonl", "version")
        self._result: dict[str, float] = {}
        self.version = 0
        """Evaluated last, or now."""
        self._under_way: asyncio.Task[None] | None = None
        self._overdue = False
        self._settled = asyncio.Event()
        self._settled.set()
        self._held_by: Sequence[str] = ()
        self._asked: dict[str, asyncio.Task[str]] = {}

    def take_over(self, step: int) -> int:
        """Own evals.jsonl from here on, as far as version `step`; returns how many damaged lines were left out. Blocks."""
        return self._rows.truncate(step)

    def due(self, step: int, last: int) -> int:
        """Tasks to evaluate version `step` on; 0 where that is not due, or done."""
        if self._rows.newest >= step:
            return 0
        if step == last:
            return self._section.final_num_tasks
        every = self._section.every
        return self._section.num_tasks if every and (step % every == 0 or self._overdue) else 0

    def take(self) -> dict[str, float]:
        """What was found since the last call, for the training row that is written next."""
        result, self._result = self._result, {}
        return result

    def worth_keeping(self, versions: Collection[int]) -> set[int]:
        """Of these the version with the best reward, the newer of equals, and the one that is evaluated now. Blocks."""
        rewards = {int(row["version"]): row.get("reward", -math.inf) for row in self._rows.read()}
        best = max(rewards.keys() & set(versions), key=lambda v: (rewards[v], v), default=self.version)
        return {best} if self.version in rewards else {best, self.version}

    def begin(self, version: int, term: int, num: int) -> None:
        """Evaluate `version`, the newest, while training goes on. Where an evaluation is under way the next one waits for its end."""
        self._overdue = self._under_way is not None and not self._under_way.done()
        if not self._overdue:
            self.version = version
            self._settled.clear()
            work = self.evaluate(version, term, num)
            self._under_way = self._actor.spawn(work, name=f"{self._actor.name}.evaluate")

    def put_off(self) -> None:
        """The version is older than what engines hold: the next one that is published is evaluated instead."""
        self._overdue = True

    async def settled(self) -> None:
        """Return once the engines of the evaluation that began last hold its version, or `settle`: nothing newer is to be published before."""
        await self._settled.wait()

    def settle(self) -> None:
        """End that wait: the trainer is about to leave."""
        self._settled.set()

    def left(self, names: Sequence[str]) -> None:
        """These actors went away: they will not answer."""
        for name in names:
            if task := self._asked.get(name):
                task.cancel()

    async def last(self, version: int, term: int, num: int, leaving: asyncio.Event) -> bool:
        """Wait for the evaluation under way, then evaluate `version` on all engines where `num` is not 0.

        False at once when the actor is `leaving`: environments are drained by then, and the step is to be saved.
        """
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._last(version, term, num))
            waiting = (work, tasks.create_task(leaving.wait()))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return not leaving.is_set()

    async def _last(self, version: int, term: int, num: int) -> None:
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
        if num:
            await self.evaluate(version, term, num, share=1)

    async def evaluate(self, version: int, term: int, num: int, *, share: int = SHARE) -> None:
        """Returns when there is a row of `version`, or none to be had; never raises for the latter.

        Where engines died, the last version is evaluated again at once; another one may be gone, and the next published takes its place.
        """
        log, self._held_by = self._actor.log, ()
        try:
            async with asyncio.timeout(self._section.timeout_s):
                await self._evaluate(version, term, num, share)
        except TimeoutError:
            log.warning("evaluation_timed_out", version=version)
            self._actor.notice(f"the evaluation of version {version} took longer than eval.timeout_s and was given up")
        except AskFailed as error:
            log.warning("evaluation_failed", version=version, error=str(error))
        finally:
            self._settled.set()
        for name in self._held_by:
            self._actor.spawn(self._let_go(name, version, term), name=f"{self._actor.name}.let_go.{name}")

    async def _evaluate(self, version: int, term: int, num: int, share: int) -> None:
        for attempt in range(TRIES if share == 1 else 1):
            while not (engines := self._actor.peers(GENERATION)):
                await self._actor.directory.change()
            self._held_by = engines[-max(1, len(engines) // share) :]
            key, samples = f"{term}.{version}.{attempt}", self._section.samples
            if await self._evaluate_once(Evaluate(key, num, version=version, samples=samples), term):
                return
        self._actor.log.warning("evaluation_lost", version=version)
        self._overdue = share > 1

    async def _evaluate_once(self, request: Evaluate, term: int) -> bool:
        """False where it is to be done again: the engines that held the version died."""
        began = asyncio.get_running_loop().time()
        hold = HoldWeights(request.version, term, HOLD_S)
        holding = await self._ask_all(self._held_by, hold)
        self._settled.set()
        if not holding:
            return False
        buffer, limit_s, lost = self._actor.ref(BUFFER), request.wait_s + REPLY_S, False
        while not isinstance(found := await buffer.ask(request, timeout=limit_s), EvalResult):
            held = await self._ask_all(self._held_by, hold)
            lost = lost or not holding <= held
            if not held:
                return False
        if found.failed and lost:
            samples = self._actor.run.folder / "evals" / f"{request.version}.jsonl"  # of an evaluation that does not count
            await self._actor.offload(partial(samples.unlink, missing_ok=True))
            return False
        await self._keep(found, asyncio.get_running_loop().time() - began)
        return True

    async def _ask_all(self, names: Sequence[str], request: HoldWeights) -> set[str]:
        """Those that hold the version. One that dies meanwhile does not."""

        async def ask(name: str) -> str:
            try:
                reply = await self._actor.ref(name).ask(request, timeout=self._section.timeout_s, retry=False)
            except AskFailed as error:
                self._actor.log.warning("weights_not_held", engine=name, version=request.version, error=str(error))
                return ""
            return name if reply.held else ""

        async with asyncio.TaskGroup() as tasks:
            asked = {name: tasks.create_task(ask(name)) for name in names}
            self._asked |= asked
        return {task.result() for task in asked.values() if not task.cancelled()} - {""}

    async def _let_go(self, name: str, version: int, term: int) -> None:
        """A link that breaks under this must not keep an engine from newer weights: asked again until its hold has ended by itself."""
        with suppress(AskFailed):
            await self._actor.ref(name).ask(HoldWeights(version, term, 0.0), timeout=HOLD_S)

    async def _keep(self, found: EvalResult, seconds: float) -> None:
        """One row, and its figures for the next training row. A failed rollout has no reward: 0 would mix broken with unsolved."""
        row = figures(found, self._section)
        self._result = {f"eval/{name}": value for name, value in row.items()}
        self._actor.log.info("evaluated", **row)
        await self._actor.on_disk(self._actor.run.folder, self._rows.append, row | {"time_s": seconds, "unix_s": wall_s()})
        total = row["num"] + row["failed"]
        if found.failed > FAILED_SHARE * total:
            self._actor.notice(
                f"evaluation of version {found.version}: {found.failed} of {total:.0f} rollouts failed, and eval/reward leaves them out"
            )

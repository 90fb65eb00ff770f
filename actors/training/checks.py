"""What looks after a run beside training: do trainer and engines give the same tokens the same log-probabilities, and is anything learned?

Each finding is one sentence that names the likely cause. The judgements are pure functions and small watches; the two hooks carry them out.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rubato.actors.checkpoints.model_folder import num_parameters, vocab_size_of
from rubato.actors.cluster.lease import TRAINING, GivenUp, Held
from rubato.actors.config import LOSSES, CheckSection, ModelSection, TrainSection
from rubato.actors.messages.generation import Completion, Generate, Sampling, WeightsNeed, why_early
from rubato.actors.messages.samples import SPREAD, Trajectory
from rubato.actors.report.breakdown import SHOWN, left_out
from rubato.actors.training.hooks import StepHook, TrainedStep
from rubato.actors.training.train_engine import TrainError
from rubato.bus.errors import AskFailed
from rubato.bus.message import pack_i32, unpack_f32, unpack_i32
from rubato.runtime.courier import Ref

if TYPE_CHECKING:
    from rubato.actors.training.trainer import Trainer

PROMPT_TOKENS = 8
FULL_ROWS = 2
"""Prompts of a check that are as long as trajectories may get: some thousand tokens of prefill, which a check can afford."""

WORST_SHOWN = 5

PATIENCE = 5
"""Steps in a row: one batch of rare tokens says nothing."""

MOST_KL = {"float32": 1e-3, "bfloat16": 1e-2}
"""Nats per token between two computations of the same weights; rounding alone stays a tenfold below."""


class LogprobCheck(StepHook):
    """Compares trainer and engines where that is due, or where the last steps' mismatch asks for it; TrainError where they differ."""

    def __init__(self, trainer: "Trainer") -> None:
        super().__init__(trainer)
        self._mismatch = MismatchWatch(coarser_dtype(trainer.config.model, trainer.config.train))
        self._agreed = False
        """They were compared, and agreed."""

    async def after_publish(self, version: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        trainer, section = self.trainer, self.trainer.config.check
        began, mismatch_kl = asyncio.get_running_loop().time(), metrics.get("policy/mismatch_kl")
        alarmed = mismatch_kl is not None and self._mismatch.alarms(mismatch_kl)
        due = section.due(trainer.out.num_published, version, trainer.run.steps) or (alarmed and section.enabled)
        due = due and trainer.out.version == version
        agreed = False
        if due:
            await trainer.out.announced()
            agreed = await self.check(version)
        if alarmed:
            trainer.notice(self._mismatch.why(compared=agreed))
        return {"time/check": asyncio.get_running_loop().time() - began} if due else {}

    async def before_end(self) -> None:
        """Whether engines took the last version is known once they tell what they compute with."""
        if self.trainer.config.check.enabled and self.trainer.out.num_published:
            await self.trainer.out.taken_by_all()

    async def check(self, step: int) -> bool:
        """Compare with the engines under version `step`; False where they gave nothing to compare, or the trainer is leaving.

        The trainer's turn begins once the engines have answered: they may wait for one of their own.
        """
        try:
            return await self._compared(step)
        except (NotCompared, GivenUp) as error:
            self.trainer.notice(f"trainer and engines were not compared after step {step}: {error}")
            return False

    async def _compared(self, step: int) -> bool:
        actor, config, engine = self.trainer, self.trainer.config, self.trainer.engine
        temperature = config.rollout.temperature
        vocab_size = await actor.offload(vocab_size_of, actor.run.folder / config.model.path)
        with actor.waits.on("agreement", stage="check", holder="llm_proxy", blocks_actor=True) as wait:
            async with actor.lease.waiting():
                sampled = await sample_random_prompts(
                    actor.ref("llm_proxy"), config.check, vocab_size=vocab_size or 2, version=step,
                    key=f"{actor.incarnation}.{step}", seed=actor.run.seed, temperature=temperature,
                    max_len=config.rollout.max_len,
                )  # fmt: skip
            wait.update(holder="")
            dtype = coarser_dtype(config.model, config.train)
            async with actor.lease(TRAINING) as held:
                found = at_1 = await held.compute(compare_logprobs, sampled, step, partial(engine.logprobs, temperature=temperature))
                if temperature not in (0.0, 1.0) and not agree(found, config.check, dtype):
                    at_1 = await held.compute(compare_logprobs, sampled, step, engine.logprobs)
                await self.compared(held, sampled, step, found)
        told = require_agreement(found, at_1, config.check, dtype, temperature=temperature, agreed_before=self._agreed)
        if silent := {reply.engine for _, reply in sampled} - {difference.name for difference in found}:
            raise NotCompared(f"{', '.join(sorted(silent))} sampled no token under version {step}")
        actor.log.info("agreement", step=step, found=told)
        if not self._agreed:
            actor.notice(told, good=True)
        self._agreed = True
        return True

    async def compared(self, held: Held, sampled: Sequence[tuple[list[int], Completion]], step: int, found: "Sequence[Difference]") -> None:
        """What else is to be seen in what engines sampled; they were compared, and may turn out to disagree. Raises TrainError."""


class Concerns(StepHook):
    """Tells the user what may spoil the result without any error, and fails a run that learns nothing."""

    def __init__(self, trainer: "Trainer") -> None:
        super().__init__(trainer)
        self._spread, self._info = SpreadWatch(), InfoWatch()
        self._updates = UpdateWatch(trainer.config.train, trainer.config.run.max_idle_steps)

    async def begin(self, step: int, rows: Callable[[], Iterator[Mapping[str, float]]]) -> None:
        for sentence in await self.trainer.offload(self._of_config):
            self.trainer.notice(sentence)
        await self.trainer.offload(lambda: self._updates.replay(rows()))

    def _of_config(self) -> list[str]:
        config, folder = self.trainer.config, self.trainer.run.folder
        count = num_parameters(folder / config.model.path) if config.train.has_model else 0
        if config.train.lora is not None:  # what counts is how many are trained
            count = self.trainer.engine.image_bytes() // (2 if config.model.dtype == "bfloat16" else 4)
        said = [lr_concern(config.train.lr, count) if count else "", clip_concern(config.train)]
        said.append(best_concern(keep_best=config.checkpoint.keep_best, every=config.eval.every))
        return [each for each in said if each]

    async def after_step(self, trained: TrainedStep) -> None:
        watched = self._spread.step(trained.metrics, trained.groups), self._info.step(trained.groups)
        for said in (*filter(None, watched), *self._updates.step(trained.metrics)):
            self.trainer.notice(said)

    async def after_row(self, row: Mapping[str, float]) -> None:
        self._require_updates()

    async def before_end(self) -> None:
        self._require_updates(ended=True)

    def _require_updates(self, *, ended: bool = False) -> None:
        if why := self._updates.nothing_learned(ended=ended):
            raise TrainError(why)


# -- trainer and engines -----------------------------------------------------------------------------------------------


def coarser_dtype(model: ModelSection, train: TrainSection) -> str:
    """Of those that engines and trainer compute in: what they may differ by follows from it."""
    return "bfloat16" if "bfloat16" in (model.dtype, train.dtype) else "float32"


class NotCompared(Exception):
    """The engines gave no completion in time: they are busy, away or draining."""


class Difference(NamedTuple):
    """One sampled token as both sides see it (log-probabilities, nats)."""

    prompt: int
    position: int
    token: int
    engine: float
    trainer: float
    name: str = ""
    """Of the engine."""

    @property
    def gap(self) -> float:
        return abs(self.engine - self.trainer)


async def sample_random_prompts(
    proxy: Ref, section: CheckSection, *, vocab_size: int, version: int, key: str, seed: int, temperature: float = 1.0, max_len: int = 0
) -> list[tuple[list[int], Completion]]:
    """Completions of random prompts under weights no older than `version`: off any task, so every weight matters.

    The first `FULL_ROWS` end at `max_len` tokens where they are that long, the others soon. Raises NotCompared.
    """
    chance = random.Random(f"{seed}/{version}")
    asked: list[tuple[list[int], Generate]] = []
    for index in range(section.num_prompts):
        length = max(PROMPT_TOKENS, max_len - section.num_tokens if index < FULL_ROWS else 0)
        prompt = [chance.randrange(vocab_size) for _ in range(length)]
        name = f"check.{key}.{index}"
        sampling = Sampling(section.num_tokens, temperature, seed=chance.randrange(2**31))
        asked.append((prompt, Generate(name, name, pack_i32(prompt), sampling, WeightsNeed(version))))

    async def reply_to(request: Generate) -> Completion | str:
        try:
            reply = await proxy.ask(request, timeout=section.timeout_s)
        except AskFailed as error:
            return str(error)
        return reply if isinstance(reply, Completion) else why_early(reply)

    async with asyncio.TaskGroup() as tasks:
        replies = [tasks.create_task(reply_to(request)) for _, request in asked]
    found: list[tuple[list[int], Completion]] = []
    for (prompt, _), task in zip(asked, replies, strict=True):
        reply = task.result()
        if isinstance(reply, str):
            raise NotCompared(reply)
        found.append((prompt, reply))
    return found


def compare_logprobs(
    sampled: Sequence[tuple[list[int], Completion]], version: int, logprobs: Callable[[list[list[int]]], list[list[float]]]
) -> list[Difference]:
    """Recompute what engines reported of tokens sampled under `version`; those that differ most come first. Blocks: offload it."""
    completions = [unpack_i32(reply.tokens.ids) for _, reply in sampled]
    recomputed = logprobs([prompt + ids for (prompt, _), ids in zip(sampled, completions, strict=True)])
    found: list[Difference] = []
    for index, ((prompt, reply), ids) in enumerate(zip(sampled, completions, strict=True)):
        ours, theirs = recomputed[index][len(prompt) :], unpack_f32(reply.tokens.logprobs)
        for span in reply.tokens.spans:
            found += [
                Difference(index, at, ids[at], theirs[at], ours[at], reply.engine)
                for at in range(span.start, span.end)
                if span.version == version
            ]
    return sorted(found, key=lambda d: -d.gap if math.isfinite(d.gap) else -math.inf)


def _worst(found: Sequence[Difference]) -> tuple[float, str]:
    """Largest of the engines' mean |Δ log-prob|, and whose it is: one of many that is off must not be averaged away."""
    gaps: dict[str, list[float]] = {}
    for difference in found:
        gaps.setdefault(difference.name, []).append(difference.gap if math.isfinite(difference.gap) else math.inf)
    return max(((sum(each) / len(each), name) for name, each in gaps.items()), default=(0.0, ""))


def agree(found: Sequence[Difference], section: CheckSection, dtype: str) -> bool:
    """Whether every engine stays within the limit of `dtype`."""
    return _worst(found)[0] <= (section.limit_float32 if dtype == "float32" else section.limit_bfloat16)


def require_agreement(
    found: Sequence[Difference], at_1: Sequence[Difference], section: CheckSection, dtype: str, *, temperature: float, agreed_before: bool
) -> str:
    """A sentence for the user. Raises TrainError, with the likely cause and the tokens that differ most, where they see other policies.

    `at_1` is what `found` would be had the trainer taken temperature 1.
    """
    mean, name = _worst(found)
    measured = f"mean |Δlogp| {mean:.1e} over {len(found)} tokens"
    if agree(found, section, dtype):
        return f"trainer and engine agree: {measured}"
    limit = section.limit_float32 if dtype == "float32" else section.limit_bfloat16
    cause = why_apart(name, agreed_before=agreed_before, agrees_at_1=agree(at_1, section, dtype), temperature=temperature)
    worst = [f"{d.prompt:6d}  {d.position:8d}  {d.token:5d}  {d.engine:10.5f}  {d.trainer:10.5f}  {d.gap:.2e}" for d in found[:WORST_SHOWN]]
    lines = ["prompt  position  token   engine      trainer     |Δ|", *worst]
    raise TrainError(f"trainer and engine disagree: {measured}, limit {limit:.0e} ({dtype}). {cause}\n" + "\n".join(lines))


class MismatchWatch:
    """`policy/mismatch_kl` step by step, where both compute in `dtype` or finer."""

    def __init__(self, dtype: str) -> None:
        self._most = MOST_KL[dtype]
        self._seen = deque([0.0], maxlen=PATIENCE + 1)

    def alarms(self, mismatch_kl: float) -> bool:
        """Whether the newest `PATIENCE` values are all above what rounding explains, and the one before them was not."""
        self._seen.append(mismatch_kl)
        before, *newest = self._seen
        return len(newest) == PATIENCE and before <= self._most < min(newest)

    def why(self, *, compared: bool) -> str:
        """What the user is told then; `compared`: on prompts of their own, trainer and engines agreed just now."""
        told = (
            f"policy/mismatch_kl has been above {self._most:g} for {PATIENCE} steps, {self._seen[-1]:.1e} now: "
            "engines sample from another policy than is trained. "
        )
        if compared:
            return told + (
                "On fresh prompts they agree, so rollouts most likely go on with KV caches of older weights: "
                "set engine.kv_on_update=recompute"
            )
        return told + (
            "Most likely the engines' weights, dtype or temperature differ from the trainer's: check.enabled=true finds out which"
        )


def why_apart(engine: str, *, agreed_before: bool, agrees_at_1: bool, temperature: float) -> str:
    """The likely cause where `engine` and the trainer differ; `agrees_at_1`: not where the trainer takes temperature 1."""
    if agrees_at_1:
        return (
            f"{engine} gives log-probs of temperature 1: they must be of the distribution sampled from, "
            f"at rollout.temperature={temperature:g}."
        )
    if agreed_before:
        return f"They agreed before this update, so its weights most likely never reached {engine}, or not whole: see its log."
    return "Check that both load the same model folder, and compute in the same dtype."


# -- warnings to the user ---------------------------------------------------------------------------------------------

SPREADLESS_STEPS = 5
"""Steps in a row without any reward spread before the user hears of it: a batch or two may be so by chance."""

ANCHORS = ((0.5e6, 1e-3), (7e9, 1e-6))
"""(parameters, learning rate): this project's quickstart, and DeepSeekMath's GRPO on 7 B (arXiv 2402.03300, section 4.2)."""

FAR = 20.0
"""Times above or below the usual rate that is worth a word: published rates for one size differ by up to ten."""


def usual_lr(num_parameters: int) -> float:
    """Learning rate of AdamW at which models of this size are usually trained by RL, all parameters trained.

    A rule of thumb: the power law through `ANCHORS`, lr ∝ parameters^-0.72. DAPO's 1e-6 at 32 B (arXiv 2503.14476, section 4.1) and the
    1e-6 in use from 0.5 B on lie within a factor of ten of it.
    """
    (small, fast), (large, slow) = ANCHORS
    return fast * (num_parameters / small) ** (math.log(slow / fast) / math.log(large / small))


def lr_concern(lr: float, num_parameters: int) -> str:
    """A sentence where `lr` is more than `FAR` times off what suits the size; else empty."""
    usual = usual_lr(num_parameters)
    if usual / FAR <= lr <= usual * FAR:
        return ""
    risk = "training is likely to collapse" if lr > usual else "little may be learned"
    size = f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e8 else f"{num_parameters / 1e6:.1f} M"
    return (
        f"train.lr={lr:g} is {max(lr / usual, usual / lr):,.0f} times {'above' if lr > usual else 'below'} what a model of {size} "
        f"parameters is usually trained with: {risk}. Around {usual:.0e} is usual."
    )


def clip_concern(train: TrainSection) -> str:
    """A sentence where a clip is so far above that of the loss's paper that it holds nothing; else empty."""
    usual = LOSSES[train.loss].clip_high if train.loss in LOSSES else math.inf
    if train.clip_high <= usual * FAR:
        return ""
    return (
        f"train.clip_high={train.clip_high:g} is {train.clip_high / usual:,.0f} times what the paper of {train.loss} has ({usual:g}): it will "
        "clip nothing."
    )


def best_concern(*, keep_best: bool, every: int) -> str:
    """A sentence where `checkpoint.keep_best` has no figures to go by, with `eval.every` at 0."""
    if not keep_best or every:
        return ""
    return "checkpoint.keep_best keeps no checkpoint: eval.every is 0, and no version before the last is evaluated. Set eval.every."


class SpreadWatch:
    """Looks at each step's batch; says once that nothing can be learned from the rewards."""

    def __init__(self) -> None:
        self._flat = 0
        self._told = False

    def step(self, metrics: Mapping[str, float], groups: Sequence[Sequence[Trajectory]]) -> str:
        """A sentence after `SPREADLESS_STEPS` steps in a row whose advantages are all 0; else empty. `metrics`: those of the step."""
        self._flat = self._flat + 1 if is_flat(metrics) and groups else 0
        if self._told or self._flat < SPREADLESS_STEPS:
            return ""
        self._told = True
        return (
            f"nothing was learned from rewards in the last {self._flat} steps: in no group do they have any spread "
            f"(policy/taught_frac = 0). {spreadless_cause(groups)}"
        )


def is_flat(metrics: Mapping[str, float]) -> bool:
    """Whether the rewards of a step have no spread that its advantage could use. False where the trainer does not say."""
    return metrics.get("policy/taught_frac", 1.0) <= 0.0


def spreadless_cause(groups: Sequence[Sequence[Trajectory]]) -> str:
    """The likely cause, where the rewards of no group have spread, and what to look at."""
    rewards = [[t.reward for t in group] for group in groups]
    if (widest := max(max(rewards_G) - min(rewards_G) for rewards_G in rewards)) >= SPREAD:
        return "train.overlong_penalty evens out what rewards say: lower it, or set train.overlong=mask."
    every = [reward for rewards_G in rewards for reward in rewards_G]
    if widest > ROUNDING * max(1.0, *map(abs, every)):
        return f"Rewards of a group differ by {widest:.2g} at most, and less than {SPREAD:g} counts as equal: scale the reward up."
    same = all(len({_said(t) for t in group}) == 1 for group in groups)
    if same and all(t.temperature == 0 for group in groups for t in group):
        return "The rollouts of a group are the same, token by token, as their temperature is 0: set it above 0."
    if max(every) - min(every) >= SPREAD:
        return _differ_between(groups, same=same)
    reward = every[0]
    if same and reward <= 0:
        return f"Every rollout gets {reward:g}, and those of a group are the same, token by token: {COLLAPSED}."
    if reward > 0:
        return f"Every rollout gets {reward:g}: the task is solved, or the reward does not look at what the model does."
    return f"Every rollout gets {reward:g}: the task is too hard for this model, or the reward never sees success."


ROUNDING = 1e-12
"""Sums of the same numbers in another order may differ by this share."""

COLLAPSED = "the policy gives one answer all of its probability (policy/entropy), and a lower train.lr may keep it from that"


def _differ_between(groups: Sequence[Sequence[Trajectory]], *, same: bool) -> str:
    """The cause where each group has a reward of its own."""
    if same:
        return f"The rollouts of a group are the same, token by token: {COLLAPSED}."
    by_task: dict[str, list[float]] = {}
    for group in groups:
        by_task.setdefault(group[0].ticket.task, []).append(group[0].reward)
    what = "tasks" if all(max(rewards) - min(rewards) < SPREAD for rewards in by_task.values()) else "prompts"
    return f"Rewards differ between {what} only: each is solved always or never, or the reward does not look at what the model does."


def _said(trajectory: Trajectory) -> tuple[bytes, ...]:
    return tuple(segment.tokens for segment in trajectory.segments)


class InfoWatch:
    """Says once that the environment's info has more numbers than there are metrics for."""

    def __init__(self) -> None:
        self._told = False

    def step(self, groups: Sequence[Sequence[Trajectory]]) -> str:
        """The sentence, when it is to be told now."""
        gone = [] if self._told else left_out([t for group in groups for t in group])
        if not gone:
            return ""
        self._told = True
        shown = ", ".join(gone[:3]) + (", …" if len(gone) > 3 else "")
        return f"the environment's info has {SHOWN + len(gone)} numbers: env/… shows the first {SHOWN} by name, without {shown}"


IDLE_TOLD = 3
"""Steps in a row that change no weight before the user hears of it."""


class UpdateWatch:
    """Looks for steps that had something to teach and changed no weight. One without reward spread is neither idle nor an update.

    All figures that it goes by stand in the rows of metrics.jsonl: a restarted trainer goes through those that are kept.
    """

    def __init__(self, train: TrainSection, max_idle_steps: int) -> None:
        self._train, self._most = train, max_idle_steps
        self._steps = self._idle = self._skipped = 0
        self._tells_at_skips = 1
        self._told, self._always_idle = False, True
        self._why = ""

    def replay(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Go on after the steps of these rows."""
        for row in rows:
            self.step(row)
            if self.nothing_learned():  # the run ended with that: it was resumed for another try
                self._idle = 0

    def step(self, metrics: Mapping[str, float]) -> list[str]:
        """Warnings about the step with these metrics."""
        self._steps += 1
        if why := idle_cause(metrics, self._train):
            self._idle += 1
            self._why = why
        else:
            self._always_idle = False
            if metrics.get("optim/updates", 1.0) > 0:
                self._idle = 0
        said: list[str] = []
        self._skipped += int(metrics.get("optim/skipped", 0.0))
        if self._skipped >= self._tells_at_skips:  # the first, the tenth, the hundredth: it may be so at every step
            what = "1 optimiser step was" if self._skipped == 1 else f"{self._skipped} optimiser steps were"
            said.append(f"{what} left out so far, for a gradient that was not finite (optim/skipped)")
            self._tells_at_skips = 10 ** len(str(self._skipped))
        if self._idle >= IDLE_TOLD and not self._told:
            self._told = True
            end = f" After {self._most} such steps in a row the run ends (run.max_idle_steps)." if self._most else ""
            said.append(f"no weight has changed in {self._idle} steps: {self._why}{end}")
        return said

    def nothing_learned(self, *, ended: bool = False) -> str:
        """The sentence with which the run fails: after `max_idle_steps` idle steps in a row, or where it has `ended` and each step was one."""
        num = self._steps if ended and self._always_idle else self._idle if self._idle >= self._most else 0
        if not self._most or not num:
            return ""
        where = "1 step" if num == 1 else f"{num} steps in a row"
        return f"nothing was learned: no weight has changed in {where}. {self._why[:1].upper()}{self._why[1:]}"


def idle_cause(metrics: Mapping[str, float], train: TrainSection) -> str:
    """Why a step with these metrics changed no weight, and what to do; empty where it did, where no reward has spread, and where the
    trainer does not say."""
    if metrics.get("optim/updates", 1.0) > 0:
        return ""
    own = f"train.loss={train.loss}" if ":" in train.loss else ""
    if metrics.get("optim/skipped", 0.0) > 0:
        look = f"look for NaN and infinity in what {own} returns" if own else "lower train.lr, or try train.dtype=float32"
        return f"every optimiser step was left out, as its gradient was not finite (optim/skipped): {look}."
    if is_flat(metrics):
        return ""
    if not metrics.get("optim/minibatches", 0.0):
        if train.overlong == "mask":
            return (
                "every sample with something to teach was cut at its token limit (rollout/cut_frac), and train.overlong=mask leaves out "
                "such samples. Raise rollout.max_new_tokens, or set train.overlong=penalty or keep."
            )
        return "no sample has a sampled token to train on: look at what the environment sends (rubato samples)."
    if metrics.get("policy/clip_frac", 0.0) >= 1.0:
        return "every token is clipped (policy/clip_frac = 1), which leaves no gradient: lower train.lr, or raise train.clip_high."
    if train.importance.mode == "mask" and metrics.get("policy/is_capped_frac", 0.0) >= 1.0:
        return "every token weighs more than train.importance.cap, and mode mask leaves out such tokens: raise the cap, or lower staleness.alpha."
    return f"the gradient of the loss is 0: {f'look at what {own} returns' if own else 'see policy/ in metrics.jsonl'}."

"""Compares trainer and engines: do they give the same tokens the same log-probabilities? And names what most likely parts them."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import Field

from actors.config import ModelSection, TrainSection
from actors.messages.generation import Aborted, Completion, Generate, Sampling
from actors.model_folder import vocab_size_of
from actors.training.engine import TrainEngine, TrainError
from actors.training.permit import TrainingPermit, TurnGivenUp
from bus.errors import AskFailed
from bus.message import pack_i32, unpack_f32, unpack_i32
from runtime.actor import Actor
from runtime.config import Section
from runtime.courier import Ref

PROMPT_TOKENS = 8
FULL_ROWS = 2
"""Prompts of a check that are as long as trajectories may get: some thousand tokens of prefill, which a check can afford."""

WORST_SHOWN = 5

PATIENCE = 5
"""Steps in a row: one batch of rare tokens says nothing."""

MOST_KL = {"float32": 1e-3, "bfloat16": 1e-2}
"""Nats per token between two computations of the same weights; rounding alone stays a tenfold below."""


class CheckSection(Section):
    """Whether trainer and engines give the same tokens the same log-probabilities: a run where they don't ends with the likely cause."""

    enabled: bool = True
    """Compare before the first step, after the first update, then every so often, and after the last step. The next step waits for it."""
    every: int = Field(default=50, ge=0)
    """Steps between later comparisons; 0 leaves out all but the last."""
    num_prompts: int = Field(default=16, ge=1)
    """Random prompts to sample from."""
    num_tokens: int = Field(default=32, ge=1)
    """Tokens sampled after each."""
    limit_float32: float = Field(default=1e-3, gt=0)
    """Largest mean |Δ log-prob| in float32."""
    limit_bfloat16: float = Field(default=3e-2, gt=0)
    """Largest mean |Δ log-prob| in bfloat16, whose 8-bit mantissa makes two orders of summation differ by this much."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest the engines may take to answer; without an answer the comparison is left out, and told."""

    def due(self, num_published: int, step: int, last: int) -> bool:
        """Whether to compare, now that this launch has published so many versions, `step` the newest, of `last` steps."""
        return self.enabled and (num_published <= 2 or step == last or (self.every > 0 and step % self.every == 0))


class Agreement:
    """One trainer's comparisons with its engines."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._agreed = False
        """They were compared, and agreed."""

    async def check(self, step: int, engine: TrainEngine, permit: TrainingPermit, leaving: asyncio.Event) -> bool:
        """Compare with the engines under version `step`; False where they gave nothing to compare, or the trainer is `leaving`.

        Raises TrainError where they differ. The trainer's turn begins once the engines have answered: they may wait for one of their own.
        """
        try:
            return await self._compared(step, engine, permit, leaving)
        except (NotCompared, TurnGivenUp) as error:
            self._actor.notice(f"trainer and engines were not compared after step {step}: {error}")
            return False

    async def _compared(self, step: int, engine: TrainEngine, permit: TrainingPermit, leaving: asyncio.Event) -> bool:
        actor, config = self._actor, self._actor.config
        temperature = config.rollout.temperature
        vocab_size = await actor.offload(vocab_size_of, actor.run.folder / config.model.path)
        with actor.waits.on("agreement", stage="check", holder="llm_proxy", blocks_actor=True) as wait:
            async with permit.waiting(leaving):
                sampled = await sample_random_prompts(
                    actor.ref("llm_proxy"), config.check, vocab_size=vocab_size or 2, version=step,
                    key=f"{actor.incarnation}.{step}", seed=actor.run.seed, temperature=temperature,
                    max_len=config.rollout.max_len,
                )  # fmt: skip
            wait.update(holder="")
            dtype = coarser_dtype(config.model, config.train)
            async with permit.turn(engine, leaving) as turn:
                found = at_1 = await turn.compute(
                    compare_logprobs, sampled, step, partial(engine.logprobs, temperature=temperature)
                )
                if temperature not in (0.0, 1.0) and not agree(found, config.check, dtype):
                    at_1 = await turn.compute(compare_logprobs, sampled, step, engine.logprobs)
        told = require_agreement(found, at_1, config.check, dtype, temperature=temperature, agreed_before=self._agreed)
        if silent := {reply.engine for _, reply in sampled} - {difference.name for difference in found}:
            raise NotCompared(f"{', '.join(sorted(silent))} sampled no token under version {step}")
        actor.log.info("agreement", step=step, found=told)
        if not self._agreed:
            actor.notice(told, good=True)
        self._agreed = True
        return True


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
    proxy: Ref,
    section: CheckSection,
    *,
    vocab_size: int,
    version: int,
    key: str,
    seed: int,
    temperature: float = 1.0,
    max_len: int = 0,
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
        asked.append((prompt, Generate(name, name, pack_i32(prompt), sampling, min_version=version)))

    async def reply_to(request: Generate) -> Completion | str:
        try:
            reply = await proxy.ask(request, timeout=section.timeout_s)
        except AskFailed as error:
            return str(error)
        return reply.reason if isinstance(reply, Aborted) else reply

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
    sampled: Sequence[tuple[list[int], Completion]],
    version: int,
    logprobs: Callable[[list[list[int]]], list[list[float]]],
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
    found: Sequence[Difference],
    at_1: Sequence[Difference],
    section: CheckSection,
    dtype: str,
    *,
    temperature: float,
    agreed_before: bool,
) -> str:
    """A sentence for the user. Raises TrainError, with the likely cause and the tokens that differ most, where they see other policies.

    `at_1` is what `found` would be had the trainer taken temperature 1.
    """
    mean, name = _worst(found)
    measured = f"mean |Δlogp| {mean:.1e} over {len(found)} tokens"
    if agree(found, section, dtype):
        return f"trainer and engine agree: {measured}"
    limit = section.limit_float32 if dtype == "float32" else section.limit_bfloat16
    cause = why_apart(
        name, agreed_before=agreed_before, agrees_at_1=agree(at_1, section, dtype), temperature=temperature
    )
    worst = [
        f"{d.prompt:6d}  {d.position:8d}  {d.token:5d}  {d.engine:10.5f}  {d.trainer:10.5f}  {d.gap:.2e}"
        for d in found[:WORST_SHOWN]
    ]
    lines = ["prompt  position  token   engine      trainer     |Δ|", *worst]
    raise TrainError(
        f"trainer and engine disagree: {measured}, limit {limit:.0e} ({dtype}). {cause}\n" + "\n".join(lines)
    )


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

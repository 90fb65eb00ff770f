"""What the trainer does with weights beside training them: publishes them, checks once that engines see the same policy, and has them evaluated."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from actors.messages.fabric import Phase, PhaseIntent
from actors.messages.generation import Aborted, Completion, Generate, Sampling
from actors.messages.samples import Advance, EvalResult, Evaluate, PolicyState
from actors.messages.weights import WeightsPublished, WeightsTaken
from actors.training.engine import TrainEngine, TrainError
from actors.training.section import CheckSection, EvalSection
from bus.errors import AskFailed
from bus.message import pack_i32, unpack_f32, unpack_i32
from runtime.actor import Actor
from runtime.courier import Ref

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

ASK_S = 300.0
"""Longest the sample buffer may be away (its own restart and the Store's included) before training gives up."""

INTEND_S = 1.0
"""The fabric hears of phases ahead of time; a controller that takes longer hears of the next one."""

BUFFER, NODE, FABRIC = "sample_buffer", "node", "fabric_controller"
"""Roles that are told, or waited for."""

WEIGHTS = "weights"
"""Name of the weights' blob."""

PROMPT_TOKENS = 8
WORST_SHOWN = 5

FAILED_SHARE = 0.01
"""Above this share of tasks without a score the user is told: the reward says nothing about them."""

REPLY_S = 30.0
"""Beyond the time that the sample buffer may hold the ask back."""


class Publisher:
    """One trainer's outgoing side."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.published: WeightsPublished | None = None
        self._taken: set[str] = set()

    @property
    def size_bytes(self) -> int:
        """Of the weights published last."""
        return self.published.size_bytes if self.published else 0

    async def publish(self, step: int, epoch: int, export: Callable[[], list[memoryview | bytes]]) -> PolicyState:
        """Make version `step` available, tell everybody, and free the slots of its samples."""
        actor = self._actor
        started = asyncio.get_running_loop().time()
        await self.intend("weight_sync", step)
        with actor.waits.on(f"weights {step}", stage="publish", holder=NODE, blocks_actor=True) as wait:
            with actor.trace.span("publish", "weights", version=step):
                parts = await actor.offload(export)
                info = await actor.blobs.put(WEIGHTS, step, epoch, parts)
            self.published = WeightsPublished(step, epoch, WEIGHTS, info.digest, info.size_bytes)
            self._taken = set()
            actor.log.info("weights_published", version=step, epoch=epoch, size_bytes=info.size_bytes)
            for name in actor.peers("engine"):
                wait.update(holder=name)
                with suppress(AskFailed):
                    await actor.ref(name).tell(self.published)
            wait.update(holder=BUFFER)
            policy = await actor.ref(BUFFER).ask(Advance(step, epoch), timeout=ASK_S)
        actor.metrics.gauge("staleness/publish_lag", asyncio.get_running_loop().time() - started)
        actor.metrics.gauge("weights/version", step)
        return policy

    def taken(self, message: WeightsTaken) -> bool:
        """Note who has what was published last; True when all engines that are ready have it."""
        now = self.published
        if now is None or (message.version, message.epoch) != (now.version, now.epoch):
            return False
        self._taken.add(message.engine)
        return self._taken >= set(self._actor.peers("engine"))

    async def intend(self, phase: Phase, step: int, in_s: float = 0.0) -> None:
        """Tell the fabric what comes, `in_s` from now, or what begins; it may be away."""
        actor = self._actor
        engines = actor.peers("engine") if phase == "weight_sync" and self.size_bytes else ()
        traffic = tuple((actor.name, name, self.size_bytes) for name in engines)
        with suppress(AskFailed, TimeoutError):
            async with asyncio.timeout(INTEND_S):
                await actor.ref(FABRIC).tell(PhaseIntent(phase, step, in_s, traffic))

    async def check_agreement(self, step: int, engine: TrainEngine, section: CheckSection) -> None:
        """Stop the run where trainer and engine do not see the same policy."""
        actor = self._actor
        path = actor.run.folder / actor.config.model.path / "config.json"
        vocab_size = int(msgspec.json.decode(await actor.offload(path.read_bytes))["vocab_size"])
        proxy, key, seed = actor.ref("llm_proxy"), f"{actor.incarnation}", actor.run.seed
        with actor.waits.on("agreement", stage="check", holder="llm_proxy", blocks_actor=True) as wait:
            sampled = await sample_random_prompts(
                proxy, section, vocab_size=vocab_size, version=step, key=key, seed=seed
            )
            wait.update(holder="")
            found = await actor.offload(compare_logprobs, sampled, engine.logprobs)
        actor.log.info("agreement", mean_abs=found.mean_abs, tokens=found.num_tokens)
        actor.notice(require_agreement(found, section, actor.config.model.dtype), good=True)


# -- the start-up check: do trainer and engine give the same tokens the same log-probabilities? ------------------------


class Difference(NamedTuple):
    """One sampled token as both sides see it (log-probabilities, nats)."""

    prompt: int
    position: int
    token: int
    engine: float
    trainer: float


class Agreement(NamedTuple):
    """Mean |Δ log-prob| over `num_tokens` sampled tokens, and the tokens that differ most."""

    mean_abs: float
    num_tokens: int
    worst: list[Difference]


async def sample_random_prompts(
    proxy: Ref, section: CheckSection, *, vocab_size: int, version: int, key: str, seed: int
) -> list[tuple[list[int], Completion]]:
    """Completions of random prompts under weights no older than `version`: off any task, so every weight matters."""
    chance = random.Random(seed)
    found: list[tuple[list[int], Completion]] = []
    for index in range(section.num_prompts):
        prompt = [chance.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        name = f"check.{key}.{index}"
        sampling = Sampling(section.num_tokens, seed=chance.randrange(2**31))
        request = Generate(name, name, pack_i32(prompt), sampling, min_version=version)
        reply = await proxy.ask(request, timeout=section.timeout_s)
        if isinstance(reply, Aborted):
            raise TrainError(f"the engine aborted the start-up check ({reply.reason})")
        found.append((prompt, reply))
    return found


def compare_logprobs(
    sampled: Sequence[tuple[list[int], Completion]], logprobs: Callable[[list[list[int]]], list[list[float]]]
) -> Agreement:
    """Recompute what the engine reported. Blocks: offload it."""
    completions = [unpack_i32(reply.tokens.ids) for _, reply in sampled]
    recomputed = logprobs([prompt + ids for (prompt, _), ids in zip(sampled, completions, strict=True)])
    differences: list[Difference] = []
    for index, ((prompt, reply), ids) in enumerate(zip(sampled, completions, strict=True)):
        reported = unpack_f32(reply.tokens.logprobs)
        for position, (token, engine) in enumerate(zip(ids, reported, strict=True)):
            differences.append(Difference(index, position, token, engine, recomputed[index][len(prompt) + position]))
    gaps = [abs(d.engine - d.trainer) for d in differences]
    worst = sorted(differences, key=lambda d: -abs(d.engine - d.trainer))[:WORST_SHOWN]
    return Agreement(sum(gaps) / max(1, len(gaps)), len(gaps), worst)


def require_agreement(found: Agreement, section: CheckSection, dtype: str) -> str:
    """A sentence for the user. Raises TrainError, with the tokens that differ most, where the two do not see the same policy."""
    limit = section.limit_float32 if dtype == "float32" else section.limit_bfloat16
    measured = f"mean |Δlogp| {found.mean_abs:.1e} over {found.num_tokens} tokens"
    if not found.mean_abs <= limit:
        raise TrainError(
            f"trainer and engine disagree: {measured}, limit {limit:.0e} ({dtype}). "
            f"Check that both load the same model folder and dtype.\n{_worst_tokens(found)}"
        )
    return f"trainer and engine agree: {measured}"


def _worst_tokens(agreement: Agreement) -> str:
    """The worst tokens, one per line."""
    lines = ["prompt  position  token   engine      trainer     |Δ|"]
    lines += [
        f"{d.prompt:6d}  {d.position:8d}  {d.token:5d}  {d.engine:10.5f}  {d.trainer:10.5f}  {abs(d.engine - d.trainer):.2e}"
        for d in agreement.worst
    ]
    return "\n".join(lines)


# -- held-out evaluations ----------------------------------------------------------------------------------------------


class HeldOut:
    """Asks the sample buffer for evaluations and keeps the newest result until a row takes it."""

    def __init__(
        self,
        buffer: Ref,
        section: EvalSection,
        log: "FilteringBoundLogger",
        notice: Callable[[str], None],
        epoch: Callable[[], int],
    ) -> None:
        self._buffer = buffer
        self._section = section
        self._log = log
        self._epoch = epoch
        self._notice = notice
        self._result: dict[str, float] = {}

    def due(self, step: int, last: int) -> int:
        """Tasks to evaluate after `step`; 0 where none is due."""
        if step == last:
            return self._section.final_num_tasks
        return self._section.num_tasks if self._section.every and step % self._section.every == 0 else 0

    def take(self) -> dict[str, float]:
        """What was found since the last call, for the row that is written next."""
        result, self._result = self._result, {}
        return result

    async def evaluate_last(self, step: int, num: int, leaving: asyncio.Event) -> bool:
        """Like `evaluate`, but False at once when the actor is `leaving`: environments are drained by then, and the step is to be saved."""
        async with asyncio.TaskGroup() as tasks:
            waiting = (tasks.create_task(self.evaluate(step, num)), tasks.create_task(leaving.wait()))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return not leaving.is_set()

    async def evaluate(self, step: int, num: int) -> None:
        """Returns when there is a result, or none to be had in time; never raises for the latter."""
        deadline = asyncio.get_running_loop().time() + self._section.timeout_s
        request = Evaluate(f"{self._epoch()}.{step}", num)
        while asyncio.get_running_loop().time() < deadline:
            try:
                reply = await self._buffer.ask(request, timeout=request.wait_s + REPLY_S)
            except AskFailed as error:
                self._log.warning("evaluation_failed", step=step, error=str(error))
                return
            if isinstance(reply, EvalResult):
                self._keep(step, reply)
                self._log.info("evaluated", step=step, reward=reply.reward, num=reply.num, failed=reply.failed)
                return
        self._log.warning("evaluation_timed_out", step=step)

    def _keep(self, step: int, found: EvalResult) -> None:
        """For the next row. A failed task has no reward: it is counted beside, since 0 would mix broken with unsolved."""
        self._result = {"eval/num": found.num, "eval/failed": found.failed, "eval/version": found.version}
        if found.num:
            self._result["eval/reward"] = found.reward
        tasks = found.num + found.failed
        if found.failed > FAILED_SHARE * tasks:
            self._notice(
                f"evaluation after step {step}: {found.failed} of {tasks} tasks failed, and eval/reward leaves them out"
            )

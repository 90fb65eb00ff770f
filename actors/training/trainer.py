"""Trainer: claims batches, trains, publishes weights, and makes steps durable before their samples are let go."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from actors.config import ModelSection, StalenessSection, TrainSection
from actors.messages.fabric import Phase, PhaseIntent
from actors.messages.samples import (
    Advance,
    Batch,
    Claim,
    Close,
    Commit,
    DrawEpoch,
    EvalResult,
    Evaluate,
    Standing,
    Trajectory,
)
from actors.messages.weights import LatestWeights, NoWeights, WeightsPublished
from actors.model_folder import check_model_folder
from actors.training import checkpoint as checkpoints
from actors.training.agreement import compare, require, sample
from actors.training.engine import StepResult, TrainEngine, TrainError
from actors.training.progress import Rows, batch_metrics, others_metrics
from actors.training.section import CheckpointSection, CheckSection, EvalSection
from bus.errors import AskFailed
from runtime.actor import Actor, ActorConfig, Context, handler
from runtime.clock import wall_s
from runtime.registry import list_actors

if TYPE_CHECKING:
    from runtime.ref import Ref

ASK_S = 300.0
"""Longest the sample buffer may be away (its own restart and the Store's included) before training gives up."""

WEIGHTS = "weights"
"""Name of the weights' blob."""


class Trainer(Actor):
    """Control only: torch runs in offloaded calls of the TrainEngine, one at a time."""

    role = "trainer"
    drain_order = 20
    least = most = 1

    class Config(ActorConfig):
        model: ModelSection = Field(default_factory=ModelSection)
        train: TrainSection = Field(default_factory=TrainSection)
        staleness: StalenessSection = Field(default_factory=StalenessSection)
        eval: EvalSection = Field(default_factory=EvalSection)
        checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
        check: CheckSection = Field(default_factory=CheckSection)

    config: Config

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        """The model must be there before torch is even imported."""
        check_model_folder(folder / config.model.path)

    def __init__(self, config: Any, context: Context) -> None:
        super().__init__(config, context)
        self._engine: TrainEngine
        self._buffer: Ref = self.ref("sample_buffer")
        self._rows = Rows(self.run.folder / "metrics.jsonl")
        self._published: WeightsPublished | None = None
        self._standing = Standing(0, config.staleness.bound)
        self._step = self._saved = self._epoch = 0
        self._checked = False
        self._began = self._last_row = 0.0
        self._leaving, self._left = asyncio.Event(), asyncio.Event()
        self._held_out: dict[str, float] = {}

    async def on_start(self) -> None:
        """Load the newest complete checkpoint (or the base model), take a new epoch, and start to train."""
        newest, passed_over = await self.offload(checkpoints.newest, self.run.folder / "checkpoints")
        for sentence in passed_over:
            self.notice(sentence)
        self._engine = await self.offload(self._build)
        try:
            self._step, epoch = await self.offload(self._engine.load, self.run.folder / self.config.model.path, newest)
        except TrainError as error:
            self.finish(str(error), failed=True)
            return
        self._saved = self._step
        drawn = await self._buffer.ask(DrawEpoch(epoch + 1, self._step), timeout=ASK_S)
        self._epoch = drawn.epoch
        if drawn.committed > self._step and not self._fall_back(drawn.committed, newest, passed_over):
            return
        self._rows.truncate(self._step)
        self._standing = await self._buffer.ask(Advance(self._step, self._epoch), timeout=ASK_S)
        self.log.info("epoch", epoch=self._epoch, step=self._step, bound=drawn.bound, version=self._standing.version)
        self.spawn(self._train_to_the_end(), name="trainer.steps")

    def _fall_back(self, committed: int, newest: Path | None, passed_over: list[str]) -> bool:
        """Go on after step `committed` with older weights, where its checkpoint is damaged; else end the run. Its samples are spent."""
        folder = self.run.folder / "checkpoints"
        if newest is None or not passed_over:
            why = (
                f"{passed_over[0]}. No earlier one is intact"
                if passed_over
                else f"step {committed} has no checkpoint in {folder}"
            )
            self.finish(f"{why}. Put the checkpoint back, or start anew with --force.", failed=True)
            self._left.set()
            return False
        self.notice(
            f"going on after step {committed} with the weights of step {self._step}: the updates between are lost"
        )
        self._step = self._saved = committed
        return True

    async def on_drain(self) -> None:
        """Finish the step under way, save it and commit it."""
        self._leaving.set()
        if self._epoch:
            await self._left.wait()
            if self._step > self._saved:
                await self._save()

    @handler
    async def latest_weights(self, request: LatestWeights) -> WeightsPublished | NoWeights:
        return self._published or NoWeights()

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _train_to_the_end(self) -> None:
        try:
            await self._publish()
            await self._intend("rollout", self._step + 1)
            self._began = self._last_row = asyncio.get_running_loop().time()
            while self._step < self.run.steps and not self._leaving.is_set():
                await self._one_step(self._step + 1)
            if self._step >= self.run.steps and not self._leaving.is_set():
                await self._buffer.ask(Close(), timeout=ASK_S)
                self.finish(f"trained {self._step} steps")
        except TrainError as error:
            self.finish(str(error), failed=True)
        finally:
            self._left.set()

    async def _one_step(self, step: int) -> None:
        """Claim, train, publish, tell; then checkpoint where it is due. A row stands before the checkpoint that covers it."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        batch = await self._claim(step)
        if batch is None:
            return
        claimed = loop.time()
        groups = [[msgspec.msgpack.decode(t, type=Trajectory) for t in group] for group in batch.groups]
        await self._intend("train_step", step)
        with self.metrics.busy(), self.trace.span("train_step", "train", step=step):
            result = await self.offload(self._engine.train, step, groups)
        trained = loop.time()
        self._step = step
        await self._publish()
        times = {
            "time/wait_for_batch": claimed - asked,
            "time/train": trained - claimed,
            "time/publish": loop.time() - trained,
        }
        await self._evaluate_when_due(step)
        await self._append_row(step, result, groups, times)
        if step % self.config.checkpoint.every == 0 or step == self.run.steps:
            await self._save()
        await self._intend("rollout", step + 1)

    async def _evaluate_when_due(self, step: int) -> None:
        """Evaluations run beside training; only the final one is waited for."""
        section = self.config.eval
        if step == self.run.steps:
            if section.final_num_tasks:
                await self._evaluate(step, section.final_num_tasks)
        elif section.every and step % section.every == 0:
            self.spawn(self._evaluate(step, section.num_tasks), name="trainer.evaluate")

    async def _append_row(
        self, step: int, result: StepResult, groups: list[list[Trajectory]], times: dict[str, float]
    ) -> None:
        row = self._row(step, result, groups) | times | await self._others() | self._held_out
        self._held_out = {}
        now = asyncio.get_running_loop().time()
        seconds, self._last_row = now - self._last_row, now
        row |= {"time/step": seconds, "time/wall_s": self._rows.wall_s + now - self._began, "time/unix_s": wall_s()}
        row["perf/samples_s"] = sum(map(len, groups)) / seconds
        row["perf/train_tokens_s"] = result.num_tokens / max(1e-6, times["time/train"])
        await self.offload(self._rows.append, row)
        self.progress(step, row)

    async def _claim(self, step: int) -> Batch | None:
        """The batch of `step`, or None when the actor is to leave first."""
        request = Claim(step, self._epoch, self.config.train.batch_groups)
        with (
            self.waits.on(f"batch {step}", holder="sample_buffer") as wait,
            self.trace.span("claim", "wait", step=step),
        ):
            while not self._leaving.is_set():
                reply = await self._buffer.ask(request, timeout=ASK_S)
                if isinstance(reply, Batch):
                    return reply
                wait.update(detail=reply.why)
        return None

    async def _publish(self) -> None:
        """Make version `step` available and tell everybody. Steps that are only replayed are older than what engines hold."""
        if self._standing.version > self._step:
            return
        started = asyncio.get_running_loop().time()
        await self._intend("weight_sync", self._step)
        with self.trace.span("publish", "weights", version=self._step):
            parts = await self.offload(self._engine.export)
            info = await self.blobs.put(WEIGHTS, self._step, self._epoch, parts)
        self._published = WeightsPublished(self._step, self._epoch, WEIGHTS, info.digest, info.size_bytes)
        for name in (*self.peers("engine"), *self.peers("llm_proxy")):
            with suppress(AskFailed):
                await self.ref(name).tell(self._published)
        self._standing = await self._buffer.ask(Advance(self._step, self._epoch), timeout=ASK_S)
        self.metrics.gauge("staleness/publish_lag", asyncio.get_running_loop().time() - started)
        self.metrics.gauge("weights/version", self._step)
        if not self._checked and self.config.check.enabled:
            await self._check_agreement()
        self._checked = True

    async def _check_agreement(self) -> None:
        """Stop the run where trainer and engine do not see the same policy."""
        section = self.config.check
        path = self.run.folder / self.config.model.path / "config.json"
        vocab_size = int(msgspec.json.decode(await self.offload(path.read_bytes))["vocab_size"])
        sampled = await sample(
            self.ref("llm_proxy"), section, vocab_size=vocab_size, version=self._step, key=f"{self.incarnation}", seed=self.run.seed
        )  # fmt: skip
        found = await self.offload(compare, sampled, self._engine.logprobs)
        self.log.info("agreement", mean_abs=found.mean_abs, tokens=found.num_tokens)
        self.notice(require(found, section, self.config.model.dtype), good=True)

    async def _save(self) -> None:
        """Checkpoint, then COMMIT. When the disk refuses, the run ends and the earlier checkpoint is intact."""
        folder = self.run.folder / "checkpoints"
        try:
            with self.trace.span("checkpoint", "train", step=self._step):
                await self.offload(self._save_to, folder / f"step_{self._step}")
        except TrainError as error:
            self.finish(str(error), failed=True)
            self._leaving.set()
            return
        await self._buffer.ask(Commit(self._step, self._epoch), timeout=ASK_S)
        self._saved = self._step
        await self.offload(checkpoints.prune, folder, self.config.checkpoint.keep)

    async def _evaluate(self, step: int, num: int) -> None:
        """Held-out reward of the newest weights; it lands in the row that is written next."""
        deadline = asyncio.get_running_loop().time() + self.config.eval.timeout_s
        request = Evaluate(f"{self._epoch}.{step}", num)
        while asyncio.get_running_loop().time() < deadline:
            try:
                reply = await self._buffer.ask(request, timeout=request.wait_s + 30.0)
            except AskFailed as error:
                self.log.warning("evaluation_failed", step=step, error=str(error))
                return
            if isinstance(reply, EvalResult):
                self._held_out = {"eval/reward": reply.reward, "eval/num": reply.num, "eval/version": reply.version}
                self.log.info("evaluated", step=step, reward=reply.reward, num=reply.num, failed=reply.failed)
                return
        self.log.warning("evaluation_timed_out", step=step)

    async def _intend(self, phase: Phase, step: int) -> None:
        """Tell the fabric what comes; it may be away."""
        size = self._published.size_bytes if self._published else 0
        traffic = tuple((self.name, name, size) for name in self.peers("engine")) if phase == "weight_sync" else ()
        with suppress(AskFailed, TimeoutError):
            async with asyncio.timeout(1.0):
                await self.ref("fabric_controller").tell(PhaseIntent(phase, step, 0.0, traffic))

    # -- figures ------------------------------------------------------------------------------------------------

    def _row(self, step: int, result: StepResult, groups: list[list[Trajectory]]) -> dict[str, float]:
        published = self._published
        return {
            "step": step,
            **result.metrics,
            **batch_metrics(groups, step),
            "weights/version": step,
            "weights/bytes": published.size_bytes if published else 0,
        }

    async def _others(self) -> dict[str, float]:
        own = self.metrics.snapshot()
        row = others_metrics(await list_actors(self.store))
        row["loop/lag_p99"] = own.get("loop/lag_p99", 0.0)
        row["staleness/publish_lag"] = own.get("staleness/publish_lag", 0.0)
        return row

    def _build(self) -> TrainEngine:
        from actors.training.torch_train import TorchTrainEngine

        return TorchTrainEngine(self.config.model, self.config.train, steps=self.run.steps, seed=self.run.seed)

    def _save_to(self, folder: Path) -> None:
        self._engine.save(folder, epoch=self._epoch)

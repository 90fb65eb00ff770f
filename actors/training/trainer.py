"""Trainer: claims batches, trains, publishes weights, and makes steps durable before their samples are let go."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from rubato.actors import plugins
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.checkpoint import CheckpointError, Replaced
from rubato.actors.cluster.lease import TRAINING, GivenUp, GivenUpMidway, Held, lease_of
from rubato.actors.config import ModelSection, StalenessSection, TrainSection
from rubato.actors.messages.samples import Advance, Batch, Claim, Close, Commit, DrawTerm, PolicyState, StepRaised, Term, Trajectory
from rubato.actors.messages.weights import WeightsTaken
from rubato.actors.training.hooks import Hooks, HookSections, StepHook, TrainedStep
from rubato.actors.training.publishing import ASK_S, BUFFER, Publisher
from rubato.actors.training.rows import Rows, cpu_used, off_policy, own_metrics
from rubato.actors.training.train_engine import TRAIN_ENGINES, StepResult, TrainEngine, TrainError
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import RunSection, Section
from rubato.runtime.errors import ActorFailed, has_no_room
from rubato.runtime.importer import load_object
from rubato.runtime.kernel import Kernel
from rubato.runtime.observe.trace import wall_s
from rubato.runtime.registry import list_actors

if TYPE_CHECKING:
    from rubato.runtime.courier import Ref


REFUSED = (TrainError, CheckpointError)
"""Errors that end the run with their sentence; anything else that training raises may lie in the batch."""


class CheckpointSection(Section):
    """When the trainer makes its work durable; a step's samples are `trained` for good only then."""

    every: int = Field(default=5, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""
    milestones: int = Field(default=0, ge=0)
    """Checkpoints of each step that this divides stay too, for good; 0: none."""
    keep_best: bool = False
    """The checkpoint with the best held-out reward stays too: every version that is evaluated gets one. See evals.jsonl."""
    mirror: str = ""
    """Folder or URL (s3://, gs://, …) that checkpoints are copied to beside training; empty: none. See reliability.md, section 7."""


class Trainer(Actor):
    """Control only: torch runs in offloaded calls of the TrainEngine, one at a time."""

    role = "trainer"
    drain_order = 20
    least = most = 1
    needs = ("sample_buffer",)

    class Config(HookSections):
        run: RunSection = RunSection()
        model: ModelSection = Field(default_factory=ModelSection)
        train: TrainSection = Field(default_factory=TrainSection)
        staleness: StalenessSection = Field(default_factory=StalenessSection)
        checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)

    config: Config

    @classmethod
    def brings(cls, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        return plugins.roles_of_trainer(tree)

    @classmethod
    def check_host(cls, config: Any) -> None:
        plugins.load(plugins.TRAINER_HOST)(config)

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        plugins.load(plugins.TRAINER_FOLDER)(config, folder)

    @classmethod
    def keeps_copies(cls, config: Any) -> bool:
        return bool(config.checkpoint.mirror)

    @classmethod
    def bring_back(cls, config: Any, folder: Path) -> str:
        return plugins.load(plugins.MIRROR_BRINGER)(config, folder)

    @classmethod
    def preload(cls, config: Any) -> tuple[str, ...] | None:
        return plugins.load(plugins.TRAINER_PRELOAD)(config)

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self.engine: TrainEngine
        self.term = 0
        """Term of this trainer: one that takes over has a higher one."""
        self.out = Publisher(self, plugins.load(plugins.weights_sender(config))(self))
        self.leaving = asyncio.Event()
        self._hooks = Hooks(self)
        self._loop = asyncio.get_running_loop()
        self._buffer: Ref = self.ref(BUFFER)
        self._rows = Rows(self.run.folder / "metrics.jsonl")
        self._checkpoints = self.run.folder / "checkpoints"
        self.lease = lease_of(self)
        self._policy = PolicyState(0, config.staleness.bound)
        self._step = self._saved = 0
        self._torn = False
        self._began = self._last_row = 0.0
        self._off_policy: dict[str, float] = {}
        """Metrics of the newest step, as Claim carries them."""
        self._receipts: deque[tuple[int, float, bytes]] = deque()
        """(step, loop time of its binding, receipt) of the steps that the next checkpoint has to name."""
        self._writing: asyncio.Task[None] | None = None
        self._left = asyncio.Event()
        self._claiming: asyncio.Timeout | None = None
        """While a batch is asked for, what ends that."""

    async def on_start(self) -> None:
        """Load the newest complete checkpoint (or the base model), take a new term, and start to train."""
        try:
            await self.offload(self._hooks.load)
            self.engine = await self.offload(self._build)
            self.log.info("model_loads")
            newest, passed_over, drawn = await self._take_over()
            await self.lease.begin(self.engine, self.leaving)
        except REFUSED as error:
            self.finish(str(error), failed=True)
            return
        for sentence in passed_over:
            self.notice(sentence)
        self._saved, self.term = self._step, drawn.term
        # When these were bound is not known: the Store may still forget it.
        now = asyncio.get_running_loop().time()
        carried = await self.offload(checkpoints.newest_receipts, self._checkpoints)
        self._receipts.extend((self._step, now, receipt) for receipt in carried)
        if drawn.committed > self._step and not self._fall_back(drawn.committed, newest, passed_over):
            return
        self._policy = await self._buffer.ask(Advance(self._step, self.term), timeout=ASK_S)
        # One that was replaced leaves its successor's rows alone.
        await self.on_disk(self._checkpoints, checkpoints.take_over, self._checkpoints, self.term)
        if damaged := await self.on_disk(self.run.folder, self._rows.truncate, self._step):
            self.notice(f"{damaged} damaged lines of {self.run.folder}/metrics.jsonl were left out")
        try:
            await self._hooks.call(StepHook.begin, self._step, self._rows.read)
        except REFUSED as error:
            self.finish(str(error), failed=True)
            self._left.set()
            return
        self.log.info("term", term=self.term, step=self._step, bound=drawn.bound, version=self._policy.version)
        self.spawn(self._train_to_the_end(), name="trainer.steps")

    async def _take_over(self) -> tuple[Path | None, list[str], Term]:
        """Load the newest checkpoint and draw a term. Until then one that is replaced may name its last one: look again."""
        model, folder = self.run.folder / self.config.model.path, self._checkpoints
        while True:
            there = checkpoints.by_step(folder)
            newest, passed_over = await self.offload(checkpoints.newest, folder)
            self._step, term = await self.offload(self.engine.load, model, newest)
            term = max(term, await self.offload(checkpoints.newest_term, folder))
            drawn = await self._buffer.ask(DrawTerm(term + 1, self._step), timeout=ASK_S)
            await self.on_disk(folder, checkpoints.take_over, folder, drawn.term)
            await self.offload(checkpoints.drop_unnamed, folder, drawn.term)
            if checkpoints.by_step(folder) == there:
                return newest, passed_over, drawn

    def _fall_back(self, committed: int, newest: Path | None, passed_over: list[str]) -> bool:
        """Go on after step `committed` with older weights, where its checkpoint is damaged; else end the run. Its samples are spent."""
        if newest is None or not passed_over:
            why = (
                f"{passed_over[0]}. No earlier one is intact"
                if passed_over
                else f"step {committed} has no checkpoint in {self._checkpoints}"
            )
            self.finish(f"{why}. Put the checkpoint back, or start anew with --force.", failed=True)
            self._left.set()
            return False
        self.notice(f"going on after step {committed} with the weights of step {self._step}: the updates between are lost")
        self._step = self._saved = committed
        return True

    async def on_drain(self) -> None:
        """Finish the step under way, save it and commit it."""
        self.leaving.set()
        if self._claiming is not None:  # the environments may have left already: nothing would come of it
            self._claiming.reschedule(asyncio.get_running_loop().time())
        if self.term:
            await self._left.wait()
            began = asyncio.get_running_loop().time()
            await self._written()
            if self._step > self._saved and not self._torn:
                await self._save()
                await self._written()
            await self.saved(asyncio.get_running_loop().time() - began)
        await self._hooks.close()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        await self._hooks.on_peers(joined, left)

    @handler
    async def weights_taken(self, message: WeightsTaken) -> None:
        """An engine has swapped weights in. Where it computes with others than were published, the run ends."""
        if said := self.out.disagreement(message):
            self.finish(said, failed=True)
            self.leaving.set()
        if self.out.taken(message):
            await self._hooks.call_beside(StepHook.after_swap, message.version)

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _train_to_the_end(self) -> None:
        try:
            await self._publish()
            self._began = self._last_row = asyncio.get_running_loop().time()
            await self._hooks.figures(self._step, {})
            while self._step < self.run.steps and not self.leaving.is_set():
                await self._one_step(self._step + 1)
            await self.out.announced()
            await self._written()
            if not self.leaving.is_set():
                await self._hooks.call(StepHook.before_end)
            if not self.leaving.is_set():  # a hook may have waited meanwhile
                await self._buffer.ask(Close(), timeout=ASK_S)
                self.finish(f"trained {self._step} steps")
        except REFUSED as error:
            self.finish(str(error), failed=True)
        except OSError as error:
            if not (has_no_room(error) and self.leaving.is_set()):
                raise
            self.log.warning("left_without_room", step=self._step)
            self._torn = True  # a row is missing: the step is trained again
        except GivenUp as error:
            self.log.info("lease_given_up", why=str(error))
            self._torn = isinstance(error, GivenUpMidway)
        finally:
            self._left.set()

    async def _one_step(self, step: int) -> None:
        """Claim and train; publish and checkpoint as far as the next step has to wait. A row stands before the checkpoint that covers it."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        batch = await self._claim(step)
        if batch is None:
            return
        claimed = loop.time()
        await self._hooks.call(StepHook.before_step, step)
        began = loop.time()
        async with self.lease(TRAINING) as held:
            waiting, cpu_s = self.waits.on(f"step {step}", stage="train", blocks_actor=True), process_time()
            with waiting, self.metrics.busy(), self.trace.span("train_step", "train", step=step):
                groups, result = await self._trained(step, batch, held)
        trained, cpu_s = loop.time(), process_time() - cpu_s
        self._step = step
        await self._hooks.call(StepHook.after_step, TrainedStep(step, groups, result.metrics))
        self._off_policy = off_policy(result.metrics)
        await self._publish()
        times = {
            "time/wait_for_batch": claimed - asked,
            "time/train": trained - began - held.waited_s,
            "time/publish": loop.time() - trained,
            **held.figures,
        }
        if not _virtual():
            times["time/train_cpu"] = cpu_s
        times |= await self._hooks.figures(step, result.metrics)
        row = await self._append_row(step, result, groups, times)
        await self._hooks.call(StepHook.after_row, row)
        if await self._save_due(step):
            await self._save()

    async def _append_row(self, step: int, result: StepResult, groups: list[list[Trajectory]], times: dict[str, float]) -> dict[str, float]:
        now = asyncio.get_running_loop().time()
        seconds, self._last_row = now - self._last_row, now
        times |= {"time/step": seconds, "time/wall_s": self._rows.wall_s + now - self._began, "time/unix_s": wall_s()}
        own = {**own_metrics(self.metrics.snapshot()), **self.out.sizes}
        if self._policy.alpha >= 0:
            own["staleness/alpha"] = self._policy.alpha
        others = await list_actors(self.store)
        used = {} if _virtual() else await self.offload(cpu_used, others, self.node)
        told = (step, result, groups, times, own, others, used)
        row = await self.on_disk(self.run.folder, self._rows.append_step, *told)
        self.progress(step, row)
        return row

    async def _claim(self, step: int) -> Batch | None:
        """The batch of `step`, or None when the actor is to leave first."""
        request = Claim(step, self.term, self.config.train.batch_groups, **self._off_policy)
        wait = self.waits.on(f"batch {step}", stage="batch", holder=BUFFER, blocks_actor=True, idle=True)
        with wait, self.trace.span("claim", "wait", step=step):
            while not self.leaving.is_set():
                scope = self._claiming = asyncio.timeout(None)
                try:
                    async with scope:
                        reply = await self._buffer.ask(request, timeout=ASK_S)
                except TimeoutError:
                    if scope.expired():
                        return None
                    raise
                finally:
                    self._claiming = None
                if isinstance(reply, Batch):
                    self._receipts.append((step, asyncio.get_running_loop().time(), reply.receipt))
                    return reply
                wait.update(detail=reply.why)
                if reply.version < self._policy.version:  # it forgot them with the Store, and refuses what they sample
                    await self._publish()
        return None

    async def _publish(self) -> None:
        """Publish version `step`, unless the buffer knows a newer one: after a restart steps are replayed that engines are past. The buffer is
        asked anew, since it may have lost its newest step with the Store."""
        self._policy = await self.out.announced() or self._policy
        if self._policy.version > self._step:
            self._policy = await self._buffer.ask(Advance(self._step, self.term), timeout=ASK_S)
        if self._policy.version > self._step:
            return
        await self._hooks.call(StepHook.before_publish, self._step)
        await self.out.publish(self._step, self.term, self.engine)

    async def _save_due(self, step: int) -> bool:
        section = self.config.checkpoint
        if step % section.every == 0 or step == self.run.steps or _divides(section.milestones, step):
            return True
        return step in await self.offload(self._hooks.keep, (step,))

    async def _save(self) -> None:
        """Take a checkpoint down; it is written beside training, one at a time."""
        step, term = self._step, self.term
        await self._written()
        receipts = [receipt for number, _, receipt in self._receipts if number <= step]
        with self.waits.on(f"checkpoint {step}", stage="checkpoint", blocks_actor=True), self.trace.span("snapshot", "train", step=step):
            write = await self.offload(partial(self.engine.snapshot, term=term, receipts=receipts))
        self._writing = self.spawn(self._write(step, term, write), name=f"{self.name}.checkpoint")

    async def _written(self) -> None:
        """Return once the checkpoint that was taken down last counts, or can't be had."""
        if self._writing is not None:
            with self.waits.on("checkpoint", stage="checkpoint", detail="the one before", blocks_actor=True):
                await asyncio.shield(self._writing)

    async def _write(self, step: int, term: int, write: Callable[[Path], None]) -> None:
        """Write a checkpoint, give it its name, and commit its steps.

        Where the disk is full it waits for room; when the disk refuses, the run ends. The earlier checkpoint is intact. A trainer that was replaced names nothing any more, and its
        successor removes what it wrote.
        """
        waiting = self._checkpoints / f"waiting_{step}.{term}"
        try:
            with self.waits.on(f"checkpoint {step}", stage="checkpoint"), self.trace.span("checkpoint", "train", step=step):
                await self.on_disk(self._checkpoints, write, waiting)
                await self.on_disk(self._checkpoints, checkpoints.name, waiting, self._checkpoints / f"step_{step}", term)
        except CheckpointError as error:
            self.finish(str(error), failed=True)
            self.leaving.set()
            return
        except OSError as error:
            if not (has_no_room(error) and self.leaving.is_set()):
                raise
            self._torn = True
            again = f"steps {self._saved + 1} to {step} are trained again when the run is resumed"
            self.notice(f"step {step} could not be saved ({error.strerror}): {again}")
            return
        except Replaced as error:
            raise ActorFailed(str(error)) from None
        with self.waits.on(f"commit {step}", stage="checkpoint", holder=BUFFER):
            await self._buffer.ask(Commit(step, term), timeout=ASK_S)
        self._saved = step
        await self._hooks.call_beside(StepHook.after_checkpoint, step)
        await self.offload(self._prune, term)
        self._forget_receipts()

    def _prune(self, term: int) -> None:
        steps = [checkpoints.step_of(path) for path in checkpoints.by_step(self._checkpoints)]
        checkpoints.prune(self._checkpoints, self.config.checkpoint.keep, term, self.stays(steps))

    def stays(self, steps: Collection[int]) -> set[int]:
        """Which of `steps` have a checkpoint that stays, however old it is. Blocks."""
        return {step for step in steps if _divides(self.config.checkpoint.milestones, step)} | self._hooks.keep(steps)

    def _forget_receipts(self) -> None:
        """A saved step is named again for as long as the Store may forget that it was bound."""
        sure_until = asyncio.get_running_loop().time() - self.run.window_s
        while self._receipts and self._receipts[0][0] <= self._saved and self._receipts[0][1] <= sure_until:
            self._receipts.popleft()

    def _build(self) -> TrainEngine:
        config = self.config
        train = config.train.resolved(alpha=self._policy.alpha, folder=self.run.folder)
        if of_ranks := plugins.ranked_engine(config):
            return plugins.load(of_ranks)(self, train, self._loop)
        build = load_object(plugins.train_engine(config.train) or TRAIN_ENGINES[config.train.kind])
        return build(config.model, train, steps=self.run.steps, seed=self.run.seed)

    async def _trained(self, step: int, batch: Batch, held: Held) -> tuple[list[list[Trajectory]], StepResult]:
        """Train on a batch. What raises twice in the same step is held to lie in the batch, and its groups end as `poisoned`.

        The weights may be half updated then: the trainer begins again with its checkpoint.
        """
        try:
            return await held.run(self._parts(step, batch))
        except (*REFUSED, GivenUp, ActorFailed):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            await self._buffer.ask(StepRaised(step, self.term, what), timeout=ASK_S)
            raise ActorFailed(f"training on step {step} raised {what}: it begins again with its checkpoint") from error

    def _parts(self, step: int, batch: Batch) -> Generator[None, None, tuple[list[list[Trajectory]], StepResult]]:
        """Run off the loop, decoding included: a batch is some MB of MessagePack."""
        groups = [[msgspec.msgpack.decode(t, type=Trajectory) for t in group] for group in batch.groups]
        metrics, num_tokens = yield from self.engine.parts(step, groups)
        return groups, StepResult({**metrics, **batch.figures}, num_tokens)


def _divides(num: int, step: int) -> bool:
    return num > 0 and step % num == 0


def _virtual() -> bool:
    """On a virtual loop nothing may depend on what the machine took."""
    return getattr(asyncio.get_running_loop(), "virtual", False)

"""TinkerTrainer: carries out operations on models, each once and in the order of its model, and publishes what engines sample under."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from rubato.actors.adapters.publishing import AdapterPublisher
from rubato.actors.adapters.shapes import AdapterError, require_name
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.checkpoint import CheckpointError, Replaced
from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.gateway.tinker.section import TinkerSection
from rubato.actors.gateway.tinker.state import TORCH_MODELS, Saved, State, StateFolder, TunedModels, read_saved, save
from rubato.actors.messages.tinker import (
    Begin,
    Behind,
    Follow,
    ForgetModel,
    ForwardBackward,
    Load,
    Operate,
    Operated,
    OperationFailed,
    OptimStep,
    Outcome,
    PrepareSampler,
    SamplerReady,
    SamplerRefused,
    Save,
    Score,
    Scored,
    Stands,
    Stepped,
    WithdrawSampler,
    changes,
)
from rubato.actors.training.train_engine import TrainError
from rubato.actors.training.trainer import CheckpointSection
from rubato.actors.weights.transport import BlobSender, blob_of
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig, RunSection
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ActorFailed
from rubato.runtime.importer import load_object
from rubato.runtime.kernel import Kernel

ResultT = TypeVar("ResultT")

FOLDER = "trainer"
"""Of its own files, within RUN/tinker."""

LOG_BYTES = 64 * 2**20
"""Operations since the newest checkpoint, after which there is one whether or not a step is due: so the log stays bounded."""

OUTCOMES_KEPT = 2
"""Of each model: a server that asks again asks for the newest one."""


class HeldModel:
    """What is known of a model beside its weights. One operation at a time, under `turn`."""

    def __init__(self, name: str, files: StateFolder) -> None:
        self.name, self.files = name, files
        self.turn = asyncio.Lock()
        self.is_held = False
        """The adapter is there, in memory or put aside."""
        self.begin = Begin("", 1)
        self.applied = self.covered = -1
        self.version = self.saved_version = 0
        self.follows = False
        self.log_bytes = 0
        self.outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self.writing: asyncio.Task[None] | None = None

    def begin_anew(self) -> None:
        """Its file, if there is one, says where it stands."""
        self.is_held, self.applied, self.covered = False, -1, -1
        self.outcomes.clear()

    def begin_from(self, state: State) -> None:
        """It was brought back as that says."""
        self.begin, self.version, self.follows = state.begin, state.version, state.follows
        self.covered, self.saved_version, self.log_bytes = state.applied, state.version, 0
        self.note(state.applied, state.outcome)

    def note(self, seq: int, outcome: Outcome) -> None:
        self.applied = seq
        self.outcomes[seq] = outcome
        while len(self.outcomes) > OUTCOMES_KEPT:
            self.outcomes.popitem(last=False)

    @property
    def state(self) -> State:
        return State(self.begin, self.version, self.applied, self.follows, self.outcomes[self.applied])


class TinkerTrainer(Actor):
    """Control only: what moves models runs in offloaded calls, one at a time, in the order in which they were asked for."""

    role = "trainer"
    drain_order = 20
    least = most = 1

    class Config(ActorConfig):
        run: RunSection = RunSection()
        model: ModelSection = Field(default_factory=ModelSection)
        train: TrainSection = Field(default_factory=TrainSection)
        checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
        tinker: TinkerSection = TinkerSection()

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        if job.section("train").kind != "torch":
            raise ValueError("train.kind=scripted learns nothing, and Tinker's clients would train by it: leave it out")
        if job.section("train").mesh.size > 1:
            raise ValueError("train.mesh shares one model out among ranks, and Tinker's models are adapters in one process: leave it out")

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._folder = self.run.folder / "tinker" / FOLDER
        self._models: OrderedDict[str, HeldModel] = OrderedDict()
        """Those that were asked for, least recently first."""
        self._tuned: TunedModels
        self._publisher: AdapterPublisher
        self._turn, self._placing = asyncio.Lock(), asyncio.Lock()
        self._term = 0

    async def on_start(self) -> None:
        """Load the base model. Models come with the first operation that names them."""
        try:
            self._tuned = await self.offload(self._build)
            await self.offload(self._tuned.load)
        except TrainError as error:
            self.finish(str(error), failed=True)
            return
        self._term = await self.offload(checkpoints.newest_term, self._folder) + 1
        await self.on_disk(self.run.folder, checkpoints.take_over, self._folder, self._term)
        self._publisher = AdapterPublisher(self, BlobSender(self), self._term)
        self.log.info("tinker_trainer_started", term=self._term)

    def _build(self) -> TunedModels:
        config = self.config
        build = load_object(TORCH_MODELS)
        return build(
            config.model, config.train, self.run.folder / config.model.path, self._folder / "aside", config.tinker.adapters_mb * 2**20
        )

    async def on_drain(self) -> None:
        """What the newest checkpoints don't cover is written, so that nothing has to be sent again."""
        for model in list(self._models.values()):
            async with model.turn:
                await self._checkpoint(model)
                await self._written(model)

    # -- operations ---------------------------------------------------------------------------------------------------

    @handler(concurrency=256, outlives_asker=True)
    async def operate(self, request: Operate) -> Operated | Behind | OperationFailed:
        """Nothing of it is lost once it is answered: what a checkpoint does not cover, Behind asks for again."""
        try:
            require_name(request.model)
        except AdapterError as error:
            return OperationFailed(request.seq, str(error), "user")
        model = self._known(request.model)
        async with model.turn:
            try:
                await self._bring(model)
                if request.seq <= model.applied:
                    return self._again(model, request)
                if request.after > model.applied:
                    return Behind(model.applied)
                outcome = await self._carried_out(model, request)
            except TrainError as error:
                return OperationFailed(request.seq, str(error), "server" if isinstance(error.__cause__, OSError) else "user")
            except (CheckpointError, MemoryError, OSError) as error:
                self.log.warning("operation_failed", model=request.model, seq=request.seq, error=str(error))
                return OperationFailed(request.seq, f"{type(request.operation).__name__}: {error}", "server")
            except Exception as error:
                await self._let_go(model, error)
                raise
            model.note(request.seq, outcome)
            await self._settled(model, request)
            return Operated(request.seq, outcome, model.covered)

    def _again(self, model: HeldModel, request: Operate) -> Operated | OperationFailed:
        outcome = model.outcomes.get(request.seq)
        if outcome is None:
            why = f"what came of operation {request.seq} is not known any more: the model is at {model.applied}"
            return OperationFailed(request.seq, why, "server")
        return Operated(request.seq, outcome, model.covered)

    async def _let_go(self, model: HeldModel, error: Exception) -> None:
        """The model is in doubt: it comes back from its file, and asks for what came after that. So does all, where the device is lost."""
        self.log.warning("model_in_doubt", model=model.name, error=f"{type(error).__name__}: {error}")
        if "CUDA error" in str(error):
            self.spawn(_fail(f"the device is lost: {error}"), name=f"{self.name}.device")
        await self._written(model)
        if model.is_held:
            await self._work(self._tuned.drop, model.name)
        model.begin_anew()

    async def _carried_out(self, model: HeldModel, request: Operate) -> Outcome:
        operation, tuned, name = request.operation, self._tuned, model.name
        if isinstance(operation, Begin) == model.is_held:
            raise TrainError(f"there is a model {name} already" if model.is_held else f"there is no model {name}")
        match operation:
            case Begin():
                await self._begin(model, operation)
            case ForwardBackward():
                return await self._work(tuned.forward_backward, name, operation)
            case OptimStep():
                metrics = await self._work(tuned.optim_step, name, operation)
                model.version += 1
                return Stepped(model.version, dict(metrics))
            case Save():
                await self._save(model, operation)
            case Load():
                await self._load(model, operation)
            case Follow():
                model.follows = True
        return Stands(model.version)

    async def _begin(self, model: HeldModel, begin: Begin) -> None:
        if begin.start:
            await self.offload(_require, Path(begin.start), begin.optimizer)
        async with self._placing:
            await self._make_place()
            await self._work(self._tuned.begin, model.name, begin)
            model.is_held, model.begin = True, begin

    async def _save(self, model: HeldModel, operation: Save) -> None:
        files = await self._work(lambda: self._tuned.files(model.name, optimizer=operation.optimizer))
        saved = Saved(model.begin, model.version, operation.optimizer)
        await self.on_disk(self.run.folder, save, Path(operation.folder), files, saved)

    async def _load(self, model: HeldModel, operation: Load) -> None:
        folder = Path(operation.folder)
        await self.offload(_require, folder, operation.optimizer)
        await self._work(lambda: self._tuned.set_to(model.name, folder, optimizer=operation.optimizer))
        model.version += 1

    async def _settled(self, model: HeldModel, request: Operate) -> None:
        """After an operation: publish, and write a checkpoint where one is due."""
        operation = request.operation
        if model.follows and isinstance(operation, OptimStep | Load | Follow):
            await self._publish(model)
        if not changes(operation):
            return
        if isinstance(operation, ForwardBackward):
            model.log_bytes += sum(len(d.tokens) + sum(len(t.data) for t in d.inputs.values()) for d in operation.data)
        stepped = isinstance(operation, OptimStep) and model.version - model.saved_version >= self.config.checkpoint.every
        from_file = isinstance(operation, Load) or (isinstance(operation, Begin) and operation.start)
        if stepped or from_file or model.log_bytes > LOG_BYTES:
            await self._checkpoint(model)
        if from_file:  # which may be gone when the operation is sent again
            await self._written(model)

    async def _work(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        async with self._turn:
            with self.metrics.busy():
                return await self.offload(function, *args)

    async def _publish(self, model: HeldModel) -> None:
        async with self._turn:
            try:
                await self._publisher.publish(model.name, model.version, self._tuned.source(model.name))
            except TrainError as error:
                self.log.warning("model_not_published", model=model.name, version=model.version, error=str(error))

    # -- models ---------------------------------------------------------------------------------------------------------

    def _known(self, name: str) -> HeldModel:
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = HeldModel(name, StateFolder(self._folder / name, self._term))
        self._models.move_to_end(name)
        return found

    async def _bring(self, model: HeldModel) -> None:
        """Where it was written and is not held, it is after this. Raises OSError where what was written is damaged."""
        if model.is_held:
            return
        newest = await self.on_disk(self.run.folder, model.files.newest)
        if newest is None:
            return
        folder, state = newest
        async with self._placing:
            await self._make_place()
            await self._work(self._restore, model.name, folder, state)
            model.is_held = True
        model.begin_from(state)
        self.log.info("model_brought_back", model=model.name, applied=state.applied, version=state.version)
        if model.follows:
            await self._publish(model)

    def _restore(self, name: str, folder: Path, state: State) -> None:
        begin = state.begin
        self._tuned.begin(name, Begin(begin.base, begin.rank, begin.seed, begin.train_attn, begin.train_mlp, begin.train_unembed))
        with ExitStack() as undo:
            undo.callback(self._tuned.drop, name)
            self._tuned.set_to(name, folder, optimizer=True, gradient=True)
            undo.pop_all()

    async def _make_place(self) -> None:
        """Where as many are held as can be, the one that was asked for longest ago is written, and comes back when it is asked for. Raises
        MemoryError where all are at work."""
        while sum(each.is_held for each in self._models.values()) >= self._tuned.most:
            idle = next((each for each in self._models.values() if each.is_held and not each.turn.locked()), None)
            if idle is None:
                raise MemoryError(f"{self._tuned.most} models are at work already, the most of one base model: ask again")
            async with idle.turn:
                await self._checkpoint(idle)
                await self._written(idle)
                await self._work(self._tuned.drop, idle.name)
                idle.begin_anew()

    async def _checkpoint(self, model: HeldModel) -> None:
        """Begin to write where the model stands; what was being written of it is there first."""
        await self._written(model)
        if model.is_held and model.applied > model.covered:
            files = await self._work(lambda: self._tuned.files(model.name, optimizer=True, gradient=True))
            model.saved_version, model.log_bytes = model.version, 0
            model.writing = self.spawn(self._write(model, files, model.state), name=f"{self.name}.{model.name}")

    async def _write(self, model: HeldModel, files: Any, state: State) -> None:
        try:
            await self.on_disk(self.run.folder, model.files.write, files, state)
        except Replaced as error:
            raise ActorFailed(str(error)) from error
        model.covered = state.applied

    async def _written(self, model: HeldModel) -> None:
        if model.writing is not None:
            await asyncio.wait([model.writing])
            model.writing = None

    @handler(concurrency=64, outlives_asker=True)
    async def forget_model(self, request: ForgetModel) -> Ack:
        require_name(request.model)
        model = self._known(request.model)
        async with model.turn:
            await self._written(model)
            if model.is_held:
                await self._work(self._tuned.drop, model.name)
            await self._publisher.withdraw(model.name)
            await self.offload(model.files.remove)
            model.begin_anew()
            if self._models.get(model.name) is model:
                del self._models[model.name]
        return Ack()

    # -- out of order ---------------------------------------------------------------------------------------------------

    @handler(concurrency=64, outlives_asker=True)
    async def prepare_sampler(self, request: PrepareSampler) -> SamplerReady | SamplerRefused:
        """What is published under the name already stays: a name belongs to one folder."""
        try:
            require_name(request.adapter)
            there = await self.blobs.newest(blob_of(request.adapter))
            if there is not None:
                return SamplerReady(there.version)
            await self.offload(_require, Path(request.folder), False)
            source = await self.offload(self._tuned.source_of, Path(request.folder))
            published = await self._publisher.publish(request.adapter, 0, source)
        except (AdapterError, TrainError) as error:
            return SamplerRefused(str(error))
        return SamplerReady(published.version)

    @handler(concurrency=64, outlives_asker=True)
    async def withdraw_sampler(self, request: WithdrawSampler) -> Ack:
        await self._publisher.withdraw(request.adapter)
        return Ack()

    @handler(concurrency=64)
    async def score(self, request: Score) -> Scored | SamplerRefused:
        try:
            if request.model:
                return await self._score_model(request)
            folder = Path(request.folder) if request.folder else None
            if folder is not None:
                await self.offload(_require, folder, False)
            return await self._work(lambda: self._tuned.score(request.tokens, folder=folder, top=request.top))
        except (AdapterError, TrainError, MemoryError, OSError) as error:
            return SamplerRefused(str(error))

    async def _score_model(self, request: Score) -> Scored | SamplerRefused:
        require_name(request.model)
        model = self._known(request.model)
        async with model.turn:
            await self._bring(model)
            if not model.is_held:
                return SamplerRefused(f"there is no model {request.model}", behind=True)
            if model.version < request.version:
                return SamplerRefused(f"the model stands at version {model.version}, not {request.version}", behind=True)
            return await self._work(lambda: self._tuned.score(request.tokens, model=model.name, top=request.top))


def _require(folder: Path, optimizer: bool) -> None:
    """Raises TrainError for what Save did not write there, or not whole. Blocks."""
    try:
        saved = read_saved(folder)
    except CheckpointError as error:
        raise TrainError(str(error)) from None
    if optimizer and not saved.optimizer:
        raise TrainError(f"{folder} holds no optimiser: it was saved to sample from")


async def _fail(why: str) -> None:
    raise ActorFailed(why)

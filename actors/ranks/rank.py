"""TrainRank: the actor around one rank. Control only: it computes in offloaded calls, and lives as long as the term that it serves."""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec
from pydantic import Field

from rubato.actors.checkpoints.checkpoint import CheckpointError
from rubato.actors.checkpoints.devices import check_device, may_use_cuda
from rubato.actors.config import ClusterSection, ModelSection, TrainSection
from rubato.actors.messages.ranks import (
    CheckpointFound,
    ComputeLogprobs,
    DraftPart,
    FindCheckpoint,
    JoinTerm,
    LoadRank,
    OpenTerm,
    PartDrafted,
    PartShown,
    PutFile,
    RangesRead,
    RankFailed,
    RankLoaded,
    RankSpent,
    ReadRanges,
    ReadRows,
    RowsPart,
    RowsTaken,
    ShareLogprobs,
    ShowPart,
    StepTrained,
    TakeRows,
    TermJoined,
    TermOpened,
    TrainShare,
    WriteRows,
    WriteSection,
    WriteWeights,
)
from rubato.actors.messages.samples import Trajectory
from rubato.actors.ranks import meeting
from rubato.actors.ranks.copies import CheckpointCopy, CopiedRows
from rubato.actors.ranks.parts import HostPart
from rubato.actors.training.train_engine import TrainEngine, TrainError
from rubato.bus.message import Ack, Buffer
from rubato.runtime.actor import Actor, handler
from rubato.runtime.blobs import parts
from rubato.runtime.config import ActorConfig, BusSection, RunSection
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ConfigError, ExitCode, has_no_room
from rubato.runtime.importer import load_object
from rubato.runtime.kernel import Kernel
from rubato.runtime.places import this_host
from rubato.runtime.registry import ActorRecord
from rubato.runtime.store.store import StoreUnavailable

ResultT = TypeVar("ResultT")

RANK_ENGINES: Mapping[str, str] = {
    "torch": "rubato.actors.ranks.torch_rank:TorchRank",
    "scripted": "rubato.actors.scripted.rank:ScriptedRank",
}
"""`train.kind` → class, built as `Class(ModelSection, TrainSection, steps=…, seed=…, rank=…, meet=Meeting)`; imported only when it is chosen."""

MOST = 8
"""Requests at once: checkpoints and weights are written, and read by another host, beside a step."""


class Rows(Protocol):
    """Copies of a rank's rows of an image."""

    @property
    def size_bytes(self) -> int:
        """Of the whole image."""
        ...

    def pieces(self) -> Sequence[tuple[int, memoryview]]:
        """Where each piece belongs, and its bytes."""
        ...


class RowsSaved(Protocol):
    """One rank's part of a checkpoint."""

    @property
    def rows(self) -> Mapping[str, Rows]:
        """By file."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]: ...
    def write(self, folder: Path) -> None: ...


class RankEngine(TrainEngine, Protocol):
    """A TrainEngine of which every rank has one. What it returns of a step is the same at each; the rest is its own share."""

    @property
    def device(self) -> str: ...
    def pieces(self) -> Sequence[tuple[int, int]]:
        """Where each piece of the rows that this rank publishes begins in the image, and its bytes."""
        ...

    def pack(self, memory: memoryview) -> None:
        """Write these pieces, one after another. Raises TrainError where a tensor holds NaN or infinity."""
        ...

    def saved(self, term: int) -> RowsSaved: ...
    def exchanged(self) -> tuple[int, int]:
        """Bytes sent to the next rank since the last call, as StepTrained has them."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether `error` tells of another rank that is away."""
        ...


class _Term(NamedTuple):
    number: int
    members: frozenset[str]
    """The other ranks, and the trainer."""


class TrainRank(Actor):
    """It serves one term. With any of the others its process ends, and the next one is free."""

    role = "trainer_rank"
    drain_order = 30
    drains_across = True
    needs = ("trainer",)

    class Config(ActorConfig):
        run: RunSection = RunSection()
        model: ModelSection = Field(default_factory=ModelSection)
        train: TrainSection = Field(default_factory=TrainSection)
        cluster: ClusterSection = Field(default_factory=ClusterSection)
        bus: BusSection = BusSection()

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        mesh, role = job.section("train").mesh, cls.role
        cluster = job.section("cluster")
        if mesh.size == 1:
            return
        if cluster.dir or cluster.lease:
            key = "cluster.dir" if cluster.dir else "cluster.lease"
            raise ValueError(f"train.mesh has {mesh.size} ranks, and {key} has one trainer's process take turns: set train.mesh.shard=1")
        if job.section("train").lora is not None:
            raise ValueError(f"train.mesh has {mesh.size} ranks, and train.lora trains an adapter in one process: set train.mesh.shard=1")
        count = sum(spec.count for name, spec in job.actors.items() if name == role)
        if count != mesh.size and not (job.bus.host and count < mesh.size):
            raise ValueError(
                f"train.mesh has {mesh.replicate} x {mesh.shard} = {mesh.size} ranks, and actors.{role} has {count} processes. "
                "Let them be as many, or leave that role out: it comes with the mesh"
            )

    @classmethod
    def starts(cls, config: Any) -> bool:
        return config.train.mesh.size > 1

    @classmethod
    def check_host(cls, config: Any) -> None:
        check_device(config.model.device)
        mesh, gpus = config.train.mesh, this_host(()).devices
        # Where other hosts may have some of them, the pool's processes are held against this host's GPUs.
        if may_use_cuda(config.model.device) and not config.bus.host and mesh.size > len(gpus):
            raise ConfigError(
                f"train.mesh has {mesh.replicate} x {mesh.shard} = {mesh.size} ranks, and this host has {len(gpus)} GPUs, one for each: take a "
                "smaller mesh, or set model.device=cpu."
            )

    @classmethod
    def preload(cls, config: Any) -> tuple[str, ...] | None:
        if config.train.kind != "torch":
            return ()
        if may_use_cuda(config.model.device):
            return None
        return ("torch", RANK_ENGINES["torch"].partition(":")[0], "transformers.models.auto.modeling_auto")

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._term: _Term | None = None
        self._engine: RankEngine | None = None
        self._rows: RowsSaved | None = None
        """Taken last."""
        self._copied: CopiedRows | None = None
        """What a trainer of another host reads of its checkpoint."""
        self._pieces: Sequence[tuple[int, int]] = ()
        """Of the weights, where each begins in their image, and its bytes."""
        self._parts: dict[str, HostPart] = {}
        """Of its host, by name, drafted last."""
        self._listener: socket.socket | None = None
        """Where the others of the term are to come."""
        self._num_calls = 0
        self._has_trained = False

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        if self._term is None:
            return
        for gone in sorted(self._term.members.intersection(left)):
            if not await self._drains(gone):
                self.leave_term(f"{self.name}: {gone} left the term {self._term.number}, which ends for all its ranks")

    async def _drains(self, name: str) -> bool:
        """Whether that one is to end, and has not yet: a trainer that drains trains its step to the end, and saves it, with its ranks."""
        try:
            lease = await self.store.held(f"actor/{name}")
        except StoreUnavailable:  # then it is its link that broke
            return False
        return lease is not None and msgspec.msgpack.decode(lease.value, type=ActorRecord).state == "draining"

    async def on_stop(self) -> None:
        if self._num_calls:  # a thread may wait for a rank that is gone already
            self.end_process(ExitCode.DONE)

    def leave_term(self, why: str) -> None:
        """End this process, whatever it computes: a collective that waits for a rank that is gone can't be taken back."""
        self.log.warning("term_ends", why=why)
        print(why, file=sys.stderr, flush=True)  # noqa: T201 - the launcher quotes it
        self.end_process(ExitCode.FAILED)

    def end_process(self, code: int) -> NoReturn:
        os._exit(code)

    # -- what the trainer asks ------------------------------------------------------------------------------------

    @handler(concurrency=MOST)
    async def open_term(self, request: OpenTerm) -> TermOpened | RankSpent | RankFailed:
        if self._term is not None:
            return RankSpent()
        if not request.listen:
            return TermOpened()
        if self._listener is not None:
            self._listener.close()
        try:
            self._listener, at = meeting.listen(request.listen)
        except OSError as error:
            return RankFailed("refused", f"{self.name} can't listen at {request.listen} for ranks of other hosts: {error.strerror}")
        return TermOpened(at)

    @handler(concurrency=MOST)
    async def join_term(self, request: JoinTerm) -> TermJoined | RankFailed:
        self._term = _Term(request.term, frozenset({*request.members, request.head}) - {self.name})
        train = TrainSection.model_validate_json(request.train)

        def join() -> RankEngine:
            build = load_object(RANK_ENGINES[train.kind])
            run = self.config.run
            meet = meeting.Meeting.at(request.store, self._listener if request.rank == 0 else None, request.address)
            return build(self.config.model, train, steps=run.steps, seed=run.seed, rank=request.rank, meet=meet)

        made = await self._done(request.term, join)
        if isinstance(made, RankFailed):
            return made
        self._engine = made
        self.log.info("term_joined", term=request.term, rank=request.rank, ranks=len(request.members), device=made.device)
        return TermJoined(made.device)

    @handler(concurrency=MOST)
    async def load(self, request: LoadRank) -> RankLoaded | RankFailed:
        checkpoint = Path(request.checkpoint) if request.checkpoint else None
        model = Path(request.model) if request.model else self.run.folder / self.config.model.path

        def load(engine: RankEngine) -> RankLoaded:
            step, term = engine.load(model, checkpoint)
            self._pieces = parts.joined(engine.pieces())
            num_bytes = sum(num for _, num in self._pieces)
            return RankLoaded(step, term, engine.image_bytes(), num_bytes, parts.section_bytes(self._pieces) if num_bytes else 0)

        return await self._called(request.term, load)

    @handler(concurrency=MOST)
    async def train(self, request: TrainShare) -> StepTrained | RankFailed:
        def train(engine: RankEngine) -> StepTrained:
            groups = msgspec.msgpack.decode(request.groups.data, type=list[list[Trajectory]])
            metrics, num_tokens = engine.train(request.step, groups)
            return StepTrained(dict(metrics), num_tokens, engine.exchanged())

        if not self._has_trained:
            self.log.info("first_share", term=request.term, step=request.step)
        self._has_trained = True
        with self.metrics.busy(), self.trace.span("train_share", "train", step=request.step):
            return await self._called(request.term, train)

    @handler(concurrency=MOST)
    async def logprobs(self, request: ComputeLogprobs) -> ShareLogprobs | RankFailed:
        def compute(engine: RankEngine) -> ShareLogprobs:
            sequences = msgspec.msgpack.decode(request.sequences.data, type=list[list[int]])
            return ShareLogprobs(Buffer(msgspec.msgpack.encode(engine.logprobs(sequences, request.temperature))))

        return await self._called(request.term, compute)

    @handler(concurrency=MOST)
    async def write_weights(self, request: WriteWeights) -> Ack | RankFailed:
        memory = await self.blobs.shared(request.segment, request.size_bytes)

        def write(engine: RankEngine) -> Ack:
            engine.export(memory)()
            return Ack()

        return await self._called(request.term, write)

    @handler(concurrency=MOST)
    async def take_rows(self, request: TakeRows) -> RowsTaken | RankFailed:
        def take(engine: RankEngine) -> RowsTaken:
            self._rows = None  # those of before are written: there is memory for one copy
            self._copied = None
            self._rows = rows = engine.saved(request.trainer_term)
            self._copied = copied = CopiedRows.of({file: of.pieces() for file, of in rows.rows.items()})
            return RowsTaken({file: of.size_bytes for file, of in rows.rows.items()}, dict(rows.files), copied.num_bytes)

        return await self._called(request.term, take)

    @handler(concurrency=MOST)
    async def write_rows(self, request: WriteRows) -> Ack | RankFailed:
        def write(engine: RankEngine) -> Ack:
            if self._rows is not None:
                self._rows.write(Path(request.folder))
            return Ack()

        return await self._called(request.term, write)

    # -- where ranks are on several hosts --------------------------------------------------------------------------

    @handler(concurrency=MOST)
    async def draft_part(self, request: DraftPart) -> PartDrafted | RankFailed:
        if (failed := self._other_term(request.term)) is not None:
            return failed
        self._parts.pop(request.name, None)  # it is shown, or was given up
        part = self._parts[request.name] = await HostPart.drafted(self, request)
        return PartDrafted(part.draft.segment)

    @handler(concurrency=MOST)
    async def write_section(self, request: WriteSection) -> Ack | RankFailed:
        memory = (await self.blobs.shared(request.segment, request.size_bytes))[request.begin :]

        def write(engine: RankEngine) -> Ack:
            head = parts.section_head(self._pieces)
            memory[: len(head)] = head
            engine.pack(memory[len(head) : len(head) + sum(num for _, num in self._pieces)])
            return Ack()

        return await self._called(request.term, write)

    @handler(concurrency=MOST)
    async def read_ranges(self, request: ReadRanges) -> RangesRead | RankFailed:
        def read(engine: RankEngine) -> RangesRead:
            return RangesRead(Buffer(self._parts[request.name].ranges(request.ranges.data)))

        return await self._called(request.term, read)

    @handler(concurrency=MOST)
    async def show_part(self, request: ShowPart) -> PartShown | RankFailed:
        if (failed := self._other_term(request.term)) is not None:
            return failed
        return await self._parts[request.name].shown(self.blobs, leaves=request.leaves)

    @handler(concurrency=MOST)
    async def read_rows(self, request: ReadRows) -> RowsPart | RankFailed:
        def read(engine: RankEngine) -> RowsPart:
            part = self._parts.get(request.of)
            rows = part.rows if part else self._copied
            assert rows is not None  # copied by the trainer's order
            places, data = rows.part(request.begin, request.num_bytes)
            return RowsPart(places, Buffer(data))

        return await self._called(request.term, read)

    @handler(concurrency=MOST)
    async def find_checkpoint(self, request: FindCheckpoint) -> CheckpointFound | RankFailed:
        def find() -> CheckpointFound:
            return CheckpointFound(CheckpointCopy(self.run.folder, request.folder).found(request.manifest))

        return await self._done(request.term, find)

    @handler(concurrency=MOST)
    async def put_file(self, request: PutFile) -> Ack | RankFailed:
        def put() -> Ack:
            CheckpointCopy(self.run.folder, request.folder).put(request.name, request.begin, request.data.data)
            return Ack()

        return await self._done(request.term, put)

    async def _called(self, term: int, call: Callable[[RankEngine], ResultT]) -> ResultT | RankFailed:
        engine = self._engine
        if engine is None:
            return RankFailed("lost", f"{self.name} has not joined the term {term}")
        return await self._done(term, lambda: call(engine))

    def _other_term(self, term: int) -> RankFailed | None:
        served = self._term is not None and self._term.number == term
        return None if served else RankFailed("lost", f"{self.name} does not serve the term {term}")

    async def _done(self, term: int, call: Callable[[], ResultT]) -> ResultT | RankFailed:
        """What `call`, offloaded, gives, or how it failed."""
        if (failed := self._other_term(term)) is not None:
            return failed
        self._num_calls += 1
        try:
            return await self.offload(call)
        except (TrainError, CheckpointError) as error:
            return RankFailed("refused", str(error))
        except Exception as error:  # noqa: BLE001 - whatever training raises is told to the trainer, which decides
            if isinstance(error, OSError) and has_no_room(error):
                return RankFailed("no_room", error.strerror or str(error), error.errno or 0)
            lost = self._engine is None or self._engine.is_lost(error)
            self.log.warning("rank_failed", lost=lost, error=repr(error))
            return RankFailed("lost" if lost else "raised", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        finally:
            self._num_calls -= 1


def roles_of_mesh(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The roles that `train.mesh` of a config brings: none without one."""
    train, actors = tree.get("train"), tree.get("actors", {})
    try:
        section = TrainSection.model_validate({"mesh": (train or {}).get("mesh") or {}})
        device = ModelSection.model_validate({"device": (tree.get("model") or {}).get("device", "auto")}).device
    except (ValueError, AttributeError):  # told when the whole is checked
        return {}
    size = section.mesh.size
    if size == 1:
        return {}
    trainer = next((spec for role, spec in actors.items() if role == "trainer" and isinstance(spec, dict)), {})
    # Each end of another member of the unit is one of its own.
    restarts = trainer.get("restarts", 5)
    spec: dict[str, Any] = {
        "class": f"{TrainRank.__module__}:{TrainRank.__name__}",
        "restarts": restarts * (size + 1) if isinstance(restarts, int) else 5,
    }
    return {TrainRank.role: spec | ({"pools": {"ranks": {"count": size, "gpus": 1}}} if may_use_cuda(device) else {"count": size})}

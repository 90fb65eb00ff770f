"""The trainer's side of its ranks: a TrainEngine whose every call is all ranks', and the way of its weights into the host's blobs."""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.config import TrainSection
from rubato.actors.messages.ranks import (
    ComputeLogprobs,
    DraftPart,
    JoinTerm,
    LoadRank,
    OpenTerm,
    RankFailed,
    RankSpent,
    ReadRanges,
    ShowPart,
    TakeRows,
    TrainShare,
    WriteRows,
    WriteSection,
    WriteWeights,
)
from rubato.actors.messages.samples import Trajectory
from rubato.actors.messages.weights import WeightsPublished
from rubato.actors.ranks import far
from rubato.actors.ranks.copies import FOLDER
from rubato.actors.ranks.parts import HostShare, Sampler, SparseImage, shares_of
from rubato.actors.training.train_engine import StepResult, TrainError
from rubato.actors.weights.transport import Announce, BlobSender, WeightsSource, WeightsVersion, blob_of
from rubato.bus.errors import AskFailed
from rubato.bus.message import Buffer, Request
from rubato.runtime.blobs.blob import Draft
from rubato.runtime.blobs.parts import Index, part_name
from rubato.runtime.errors import ActorFailed, NotRunning, first_cause
from rubato.runtime.kernel import NODE
from rubato.runtime.launch.agent_messages import RestartActors
from rubato.runtime.launch.children import is_stopped
from rubato.runtime.registry import ActorRecord, RankRecord

if TYPE_CHECKING:
    from rubato.runtime.actor import Actor

ResultT = TypeVar("ResultT")

ROLE = "trainer_rank"

CALL_S = 24 * 3600.0
"""Longest a call may take: what ends it sooner is the end or the silence of a rank."""

CAUSE_S = 2.0
"""How long a rank that waited in vain is kept from ending the term: which other one was the cause is told meanwhile."""

RESTART_S = 5.0
"""Longest the trainer waits to hear that a rank is started again."""


class RanksLost(ActorFailed):
    """A rank of the term is gone: the trainer begins again, and so do all ranks, with the newest checkpoint."""


class RankedEngine:
    """A `TrainEngine` on ranks that are actors of their own. Its calls block, in any thread but the event loop's."""

    def __init__(self, actor: "Actor", train: TrainSection, loop: asyncio.AbstractEventLoop) -> None:
        self._actor, self._train, self._loop = actor, train, loop
        self._over: Future[Any] = Future()
        """Done once the actor ends, whose loop answers no thread after that."""
        loop.call_soon_threadsafe(lambda: actor.spawn(self._end_with_actor(), name=f"{actor.name}.ranks"))
        self.num_ranks = train.mesh.size
        self._term = 0
        self._members: dict[str, ActorRecord] = {}
        """By name, in the order of ranks."""
        self._far: frozenset[str] = frozenset()
        """Those on other hosts than the trainer's."""
        self._step = 0
        self._exchanged = (0, 0)
        self._image_bytes = 0
        self.shares: list[HostShare] = []
        """Of the hosts whose ranks write rows of a version."""

    def load(self, model_dir: Path, checkpoint: Path | None) -> tuple[int, int]:
        if not self._members:
            self._run(self._begin_term())
        saved = str(checkpoint) if checkpoint else ""
        brought = self._run(self._brought(checkpoint)) if checkpoint and self._far else {}

        def request(name: str) -> LoadRank:
            return LoadRank(self._term, "" if name in self._far else str(model_dir), brought.get(name, saved))

        told = self._all(request)
        loaded = told[0]
        self._step, self._image_bytes = loaded.step, loaded.image_bytes
        self.shares = shares_of(
            self._members, {name: (reply.num_bytes, reply.section_bytes) for name, reply in zip(self._members, told, strict=True)}
        )
        return loaded.step, loaded.trainer_term

    def train(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> StepResult:
        request = TrainShare(self._term, step, Buffer(msgspec.msgpack.encode(groups)))
        trained = self._all(lambda name: request)[0]
        self._step, self._exchanged = step, trained.exchanged
        return StepResult(trained.metrics, trained.num_tokens)

    @property
    def exchanged(self) -> list[tuple[str, str, int]]:
        """Bytes from rank to rank in the step trained last: around the ring of each copy's shares, and around those of the copies."""
        names, size, shard = tuple(self._members), self.num_ranks, self._train.mesh.shard
        found: list[tuple[str, str, int]] = []
        for rank, name in enumerate(names):
            copy, place = divmod(rank, shard)
            found.append((name, names[copy * shard + (place + 1) % shard], self._exchanged[0]))
            found.append((name, names[(rank + shard) % size], self._exchanged[1]))
        return [each for each in found if each[0] != each[1] and each[2]]

    def parts(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> Generator[None, None, StepResult]:
        """One part: what could come in between, a lease that is asked back, is refused beside ranks."""
        yield
        return self.train(step, groups)

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        request = ComputeLogprobs(self._term, Buffer(msgspec.msgpack.encode([list(tokens) for tokens in sequences])), temperature)
        told = [msgspec.msgpack.decode(reply.logprobs.data, type=list[list[float]]) for reply in self._all(lambda name: request)]
        return [next(filter(None, of_ranks), []) for of_ranks in zip(*told, strict=True)]

    def image_bytes(self) -> int:
        return self._image_bytes

    def export(self, memory: memoryview) -> Callable[[], None]:
        """By way of a draft of the host, into which ranks can write."""
        memory[:] = self._run(self._exported()).memory
        return _nothing

    async def _exported(self) -> Draft:
        name = "ranks.export"
        draft = await self._actor.blobs.draft(name, 0, self._term, self._image_bytes)
        if not self.is_apart:
            await self.write_into(draft)
            return draft
        await self.write_parts(name, 0, self._term)

        async def read(share: HostShare) -> None:
            sizes, put = {share.first: share.num_bytes}, far.put_into(draft.memory)
            await far.read_rows(self._one, self._actor.offload, self._term, part_name(name, share.number), sizes, put)

        await self._watched(_together(read(share) for share in self.shares))
        return draft

    @property
    def is_apart(self) -> bool:
        """Whether some rows of a version are written on another host than this one: then it is in parts."""
        return any(share.node != self._actor.node for share in self.shares)

    async def write_into(self, draft: Draft) -> None:
        """Have each rank write its rows, all of which are on this host; `train` may follow."""
        writing = [name for share in self.shares for name in share.begins]
        await self._ask(lambda name: WriteWeights(self._term, draft.segment, len(draft.memory)), writing)

    async def write_parts(self, name: str, version: int, term: int) -> None:
        """Have each rank write its rows into a part that is drafted on its host; `train` may follow."""
        shares = self.shares
        drafted = await self._of_shares(lambda of: DraftPart(self._term, part_name(name, of.number), version, term, of.size_bytes))
        requests = {
            rank: WriteSection(self._term, reply.segment, share.size_bytes, begin)
            for share, reply in zip(shares, drafted, strict=True)
            for rank, begin in share.begins.items()
        }
        await self._ask(requests.__getitem__, [*requests])

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> SparseImage:
        """Of the image whose parts were written last."""
        packed = Buffer(msgspec.msgpack.encode(ranges))
        told = await self._of_shares(lambda of: ReadRanges(self._term, part_name(name, of.number), packed))
        pieces = [piece for reply in told for piece in msgspec.msgpack.decode(reply.pieces.data, type=list[tuple[int, bytes]])]
        return SparseImage(self._image_bytes, pieces)

    async def show_parts(self, name: str, leave: Callable[[str], bool]) -> Index:
        """Let engines have the parts that were written last. `leave`: of a host, whether its part is read on others."""
        told = await self._of_shares(lambda of: ShowPart(self._term, part_name(name, of.number), leave(of.node)))
        return Index(self._image_bytes, tuple(share.part(name, reply) for share, reply in zip(self.shares, told, strict=True)))

    async def _of_shares(self, request_of: Callable[[HostShare], Request[Any]]) -> list[Any]:
        """The reply of each host's first rank."""
        requests = {share.first: request_of(share) for share in self.shares}
        return await self._ask(requests.__getitem__, [*requests])

    def snapshot(self, *, term: int, receipts: Sequence[bytes] = ()) -> Callable[[Path], None]:
        taken = self._all(lambda name: TakeRows(self._term, term))
        copied = {name: of.num_bytes for name, of in zip(self._members, taken, strict=True) if name in self._far}
        fill = partial(self._write_rows, taken[0].sizes, copied)
        return partial(checkpoints.write, files=taken[0].files, step=self._step, term=term, receipts=receipts, fill=fill)

    def _write_rows(self, sizes: Mapping[str, int], copied: Mapping[str, int], folder: Path) -> dict[str, str]:
        near = [name for name in self._members if name not in self._far]
        self._run(self._ask(lambda name: WriteRows(self._term, str(folder)), near))
        if copied:
            handles = far.open_files(folder, sizes)
            try:
                reading = far.read_rows(self._one, self._actor.offload, self._term, "checkpoint", copied, far.write_into(handles))
                self._run(self._watched(reading))
            finally:
                far.close_files(handles)
        return {name: checkpoints.digest_of_file(folder / name) for name in sizes}

    async def _brought(self, checkpoint: Path) -> dict[str, str]:
        """Where ranks of other hosts have the checkpoint."""
        first = {self._members[name].node: name for name in reversed(self._members) if name in self._far}
        found = await self._watched(far.bring_checkpoint(self._one, self._actor.offload, self._term, checkpoint, [*first.values()]))
        by_node = dict(zip(first, found, strict=True))
        return {name: by_node[self._members[name].node] for name in self._far}

    def sleep(self) -> None:
        """Ranks keep what they have: no lease is asked back beside them."""

    def wake(self) -> None:
        """Nothing was moved."""

    # -- a term ---------------------------------------------------------------------------------------------------------

    async def _begin_term(self) -> None:
        actor, size = self._actor, self.num_ranks
        self._term = actor.incarnation
        while True:
            records = await self._ready(size)
            self._members = {record.name: record for record in records}
            self._far = frozenset(record.name for record in records if record.node != actor.node)
            listens = {records[0].name: _host_of(records[0])} if self._far else {}
            opened = await self._ask(partial(self._open_request, listens))
            spent = [name for name, reply in zip(self._members, opened, strict=True) if isinstance(reply, RankSpent)]
            if not spent:
                break
            await self._restart(spent)
        folder = actor.run.folder / FOLDER
        await actor.offload(_emptied, folder)
        store = opened[0].meet or str(folder / f"term_{self._term}")
        ranks, train = tuple(self._members), self._train.model_dump_json()
        numbers = {name: number for number, name in enumerate(ranks)}

        def request(name: str) -> JoinTerm:
            address = _host_of(self._members[name]) if self._far else ""
            return JoinTerm(self._term, numbers[name], ranks, actor.name, store, train, address)

        joined = await self._ask(request)
        actor.show_ranks([
            RankRecord(rank, record.pid, record.host, reply.device)
            for rank, (record, reply) in enumerate(zip(records, joined, strict=True))
        ])  # fmt: skip
        actor.log.info("term_begun", term=self._term, ranks=list(ranks), hosts=len({record.node for record in records}))

    def _open_request(self, listens: Mapping[str, str], name: str) -> OpenTerm:
        return OpenTerm(self._term, listens.get(name, ""))

    async def _ready(self, size: int) -> list[ActorRecord]:
        """The ranks of the term, once they are all there."""
        actor = self._actor
        asked: set[str] = set()
        while True:
            names = sorted(actor.peers(ROLE), key=lambda name: int(name.rpartition("-")[2]))[:size]
            records = [record for name in names if (record := actor.directory.find(name)) is not None]
            if len(records) == size:
                # Those of one host one after another: shares of a copy of the model are gathered between neighbours.
                return sorted(records, key=lambda record: (record.node != actor.node, record.node))
            missing = [name for number in range(1, size + 1) if (name := f"{ROLE}-{number}") not in names]
            if not asked.issuperset(missing):  # one that was held still when its term ended could not end by itself
                asked = set(missing)
                for name in missing:  # one by one: of those of a host that has not joined yet the node agent knows nothing
                    await self._restart([name], held=True)
                continue
            asked.intersection_update(missing)
            with actor.waits.on("ranks", stage="ranks", holder=missing[0], blocks_actor=True):
                await actor.directory.change()

    async def _restart(self, names: Sequence[str], *, held: bool = False) -> None:
        with suppress(AskFailed):
            await self._actor.ref(NODE).ask(RestartActors(tuple(names), held), timeout=RESTART_S)

    # -- calls ----------------------------------------------------------------------------------------------------------

    def _all(self, request_of: Callable[[str], Request[Any]]) -> list[Any]:
        return self._run(self._ask(request_of))

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What `work` gives. Raises NotRunning once the actor ends: its process waits for its threads."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        wait([running, self._over], return_when=FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            raise NotRunning(f"{self._actor.name} ended before its ranks answered")
        return running.result()

    async def _end_with_actor(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._over.set_result(None)

    async def _ask(self, request_of: Callable[[str], Request[Any]], names: Sequence[str] | None = None) -> list[Any]:
        """The reply of each rank, or of these. Raises what the first of them tells that fails, and RanksLost once one is gone."""

        async def ask() -> list[Any]:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._one(name, request_of(name))) for name in (self._members if names is None else names)]
            return [task.result() for task in asked]

        return await self._watched(ask())

    async def _watched(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What `work` with ranks gives. Raises what it raises first, and RanksLost once a rank is gone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(work)
                watching = tasks.create_task(self._watch())
                await asyncio.wait([working])
                watching.cancel()
        except ExceptionGroup as group:
            error = first_cause(group)
            if isinstance(error, RanksLost):
                if held := [name for name, record in self._members.items() if name not in self._far and is_stopped(record.pid)]:
                    await self._restart(held)
                for name in self._far:
                    await self._restart([name], held=True)
            raise error from None
        return working.result()

    async def _one(self, name: str, request: Request[Any]) -> Any:
        try:
            reply = await self._actor.ref(name).ask(request, timeout=CALL_S)
        except AskFailed as error:
            await asyncio.sleep(CAUSE_S)
            raise RanksLost(f"the rank {name} can't be asked: {error}") from error
        if isinstance(reply, RankFailed):
            await self._failed(name, reply)
        return reply

    async def _failed(self, name: str, reply: RankFailed) -> NoReturn:
        if reply.kind == "refused":
            raise TrainError(reply.why)
        if reply.kind == "no_room":
            raise OSError(reply.errno, reply.why)
        if reply.kind == "lost":
            await asyncio.sleep(CAUSE_S)
            raise RanksLost(f"the rank {name} waited for another in vain: {reply.why}")
        raise RankRaised(f"{name}: {reply.why}")

    async def _watch(self) -> NoReturn:
        directory = self._actor.directory
        while True:
            for name, member in self._members.items():
                record = directory.find(name)
                if record is None or record.incarnation != member.incarnation:
                    raise RanksLost(f"the rank {name} is gone: all begin again with the newest checkpoint")
            await directory.change()


class RankRaised(Exception):
    """What a rank raised in a step, which may lie in the batch."""


class RankedSender(BlobSender):
    """The WeightsSender of a trainer with ranks: each writes its rows into the one blob of a version, or into the part of its host."""

    def __init__(self, actor: "Actor") -> None:
        super().__init__(actor)
        self._host = actor
        self._sampler: Sampler | None = None

    async def send(self, version: WeightsVersion, source: WeightsSource) -> Announce:
        assert isinstance(source, RankedEngine)
        name = blob_of(version.adapter)
        if source.is_apart:
            await source.write_parts(name, version.version, version.term)
            return partial(self._announce_parts, version, source)
        draft = await self._host.blobs.draft(name, version.version, version.term, source.image_bytes())
        await source.write_into(draft)
        return partial(self._announce, version, draft, _nothing)

    async def _announce_parts(self, sent: WeightsVersion, source: RankedEngine) -> WeightsPublished:
        """Engines find the index where they find an image else: all its parts are there by then."""
        (adapter, version, term), name = sent, blob_of(sent.adapter)
        if self._sampler is None:
            self._sampler = Sampler(partial(source.read_ranges, name), self._host.run.seed)
        self._keep(sent, await self._sampler.sample(version))
        index = await source.show_parts(name, self._leave_host)
        info = await self._host.blobs.put(name, version, term, [index.encoded()])
        return WeightsPublished(version, term, info.digest, index.size_bytes, adapter, delta_bytes=index.delta_bytes)


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


def _emptied(folder: Path) -> None:
    """Of the files by which ranks of earlier terms met."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("term_*"):
        path.unlink(missing_ok=True)


def _host_of(record: ActorRecord) -> str:
    """Address by which other hosts reach an actor's."""
    return urlsplit(record.public).hostname or ""


def _nothing() -> None:
    pass

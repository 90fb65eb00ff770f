"""Carries blobs between hosts: each node agent serves its host's blobs in pieces and pulls others' once, however many ask."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from rubato.bus.errors import AskFailed
from rubato.bus.message import Buffer
from rubato.runtime.actor import Actor, handler
from rubato.runtime.blobs.blob import (
    DIGEST_BYTES,
    MAX_BLOB_BYTES,
    PIECE_BYTES,
    BlobCorrupt,
    BlobError,
    BlobInfo,
    BlobMissing,
    BlobStore,
    Draft,
    join_digests,
    piece_digest,
    piece_digests_beside,
)
from rubato.runtime.blobs.blob_messages import (
    BlobPiece,
    BlobPieces,
    FindNewest,
    GetPiece,
    GetPieces,
    Newest,
    NotHere,
    NotPulled,
    PullBlob,
    Pulled,
)
from rubato.runtime.blobs.parts import JoinParts, Joins
from rubato.runtime.blobs.patches import delta_name, has_before, patch
from rubato.runtime.kernel import Kernel

PIECE_S = 10.0
"""A source that gives nothing for so long is left for the next: longer than one piece takes on a slow link (4 MiB at 4 Mbit/s),
and than the heartbeats that notice a dead one."""

GRACE_S = 2.0
"""Hosts hear of a new version at about the same time; a relay that is asked before it has begun is given this long to begin."""

KEPT_S = 10.0
"""A blob that other hosts pull stays mapped here this long after they last asked."""

MAX_SERVED = 4
"""Blobs mapped for other hosts at once; the one asked for longest ago is let go of first."""

SERVED_AT_ONCE = 64


Key = tuple[str, int, int]
"""Name, version and term: what of a blob never changes."""

WINDOW = 8
"""Pieces asked for at once: enough to fill a link while one is checked, and all that a pull holds beside the blob itself."""

SOON_S = 5.0
"""No more are asked for than should come within this, by the first one: an agent gives up a source that owes a piece for twice as long."""


Ask = Callable[[str, Any], Awaitable[Any]]
"""Asks a source."""


class Pull:
    """One blob on its way here. `memory` fills up in no particular order; relays read it meanwhile."""

    def __init__(self, info: BlobInfo, draft: Draft, ask: Ask, offload: Callable[..., Awaitable[Any]], *, check: bool = True) -> None:
        self.info = info
        self.digests: bytes | None = None
        """Of the pieces, once a source told them and they were found to be this blob's."""
        self.sources: list[str] = []
        """Who gave pieces, in the order in which they first did."""
        self._draft, self._ask, self._offload, self._check = draft, ask, offload, check
        self._num_pieces = -(-info.size_bytes // PIECE_BYTES)
        self._missing = deque(range(self._num_pieces))
        self._there: set[int] = set()
        self._news = asyncio.Event()
        self._failed = ""

    async def run(self, sources: Sequence[str], ways: int = 1) -> BlobInfo:
        """Pull from the first source that answers, and from the next where it fails; publish when all is here.

        With `ways` above 1, so many sources give a part of the pieces each first, of which every relay has the same. A source whose piece does not have its digest is not asked again. Raises BlobError, naming what went wrong with each
        source, when all of them together gave nothing new.
        """
        trusted, failures = list(sources), dict[str, str]()
        if min(ways, len(trusted)) > 1:
            await self._pull_apart(trusted[:ways])
        while True:
            before = len(self._there)
            for source in tuple(trusted):
                try:
                    await self._pull_from(source, self._missing)
                except (AskFailed, BlobError) as error:
                    failures[source] = f"{source}: {error}"
                    if isinstance(error, BlobCorrupt):
                        trusted.remove(source)
                if not self._missing and (self.digests is not None or not self._check):
                    return await self._draft.publish(self.info.digest)
            if len(self._there) == before:
                what = f"blob {self.info.name} version {self.info.version} could not be pulled"
                self._failed = f"{what}: {'; '.join(failures.values()) or 'no host has it'}"
                self._tell()
                raise BlobError(self._failed)

    async def patch(self, blobs: BlobStore, delta: memoryview) -> None:
        """Make it of the version before, which is in `blobs`, and what changed, in place of `run`. Raises BlobError where that is not this
        blob: it is still to be pulled."""
        digests = await patch(blobs, self.info, delta, self._draft.memory)
        if join_digests(digests) != self.info.digest:
            raise BlobCorrupt(f"the delta of blob {self.info.name} version {self.info.version} makes another blob")
        self.digests, self._there = b"".join(digests), set(range(self._num_pieces))
        self._missing.clear()
        self._tell()
        await self._draft.publish(self.info.digest)

    async def piece(self, index: int) -> memoryview:
        """Piece `index`, once it is here. Raises BlobMissing where there is no such piece."""
        if not 0 <= index * PIECE_BYTES < max(1, self.info.size_bytes):
            raise BlobMissing(f"blob {self.info.name} has no piece {index}")
        while index not in self._there:
            await self._changed()
        return self._slice(index).toreadonly()

    async def pieces(self) -> bytes:
        """The digests of all pieces, once they are known."""
        while self.digests is None:
            await self._changed()
        return self.digests

    async def _pull_apart(self, sources: Sequence[str]) -> None:
        """Piece i from source i mod n. What one of them does not give stays missing, for the next source."""
        parts = [deque(i for i in self._missing if i % len(sources) == n) for n in range(len(sources))]
        self._missing.clear()

        async def part(source: str, missing: deque[int]) -> None:
            with suppress(AskFailed, BlobError):
                await self._pull_from(source, missing)
            self._missing.extend(missing)

        async with asyncio.TaskGroup() as tasks:
            for source, missing in zip(sources, parts, strict=True):
                tasks.create_task(part(source, missing))

    async def _pull_from(self, source: str, missing: deque[int]) -> None:
        """Everything in `missing`; a first piece alone tells how many may be asked for at once."""
        if self._check and self.digests is None:
            self.digests = await self._manifest(source)
            self._tell()
        failures: list[AskFailed | BlobError] = []
        began = asyncio.get_running_loop().time()
        await self._work(source, missing, failures, most=1)
        took_s = asyncio.get_running_loop().time() - began
        at_once = min(WINDOW, len(missing), max(1, int(SOON_S / max(took_s, 1e-6))))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(0 if failures else at_once):
                tasks.create_task(self._work(source, missing, failures))
        if failures:
            raise failures[0]

    async def _manifest(self, source: str) -> bytes:
        reply = await self._ask(source, GetPieces(*self.info[:3]))
        if isinstance(reply, NotHere):
            raise BlobMissing(reply.why)
        assert isinstance(reply, BlobPieces)
        digests = bytes(reply.digests)
        if join_digests(digests) != self.info.digest:
            raise BlobCorrupt(f"the digests that {source} gives are not those of blob {self.info.name} {self.info.version}")
        if len(digests) != DIGEST_BYTES * self._num_pieces:
            raise BlobCorrupt(f"blob {self.info.name} {self.info.version} does not have {self.info.size_bytes} bytes")
        return digests

    async def _work(self, source: str, missing: deque[int], failures: list[AskFailed | BlobError], *, most: int = -1) -> None:
        """Fetch pieces until one fails; those under way then are not cancelled: a piece that arrives is still checked and kept."""
        while missing and not failures and most:
            index, most = missing.popleft(), most - 1
            try:
                await self._fetch(source, index)
            except (AskFailed, BlobError) as error:
                failures.append(error)
            finally:
                if index not in self._there:
                    missing.appendleft(index)

    async def _fetch(self, source: str, index: int) -> None:
        reply = await self._ask(source, GetPiece(*self.info[:3], index))
        if isinstance(reply, NotHere):
            raise BlobMissing(reply.why)
        target, data = self._slice(index), reply.data.data
        wanted = (self.digests or b"")[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if len(data) != len(target) or (self._check and await self._offload(piece_digest, data) != wanted):
            what = f"piece {index} of blob {self.info.name} version {self.info.version}"
            raise BlobCorrupt(f"{what} does not have its digest")
        target[:] = data
        self._there.add(index)
        if source not in self.sources:
            self.sources.append(source)
        self._tell()

    def _slice(self, index: int) -> memoryview:
        return self._draft.memory[index * PIECE_BYTES : min((index + 1) * PIECE_BYTES, self.info.size_bytes)]

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _changed(self) -> None:
        if self._failed:
            raise BlobMissing(self._failed)
        news = self._news
        await news.wait()


class _Served:
    """A blob of this host that others pull, mapped for as long as they do."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._digests: bytes | None = None
        self._hashing = asyncio.Lock()
        self.end: asyncio.TimerHandle | None = None

    async def piece(self, index: int) -> memoryview:
        piece = self._content[index * PIECE_BYTES : (index + 1) * PIECE_BYTES] if index >= 0 else b""
        if not piece:
            raise BlobMissing(f"there is no piece {index}")
        return memoryview(piece)

    async def pieces(self) -> bytes:
        """The digests of all pieces, computed at the first call."""
        async with self._hashing:
            if self._digests is None:
                self._digests = b"".join(await piece_digests_beside(self._content))
        return self._digests


class HostBlobs(Actor):
    """Base of the node agent: the part of it that other hosts see of this host's blobs."""

    role: ClassVar[str] = "node"

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._pulls: dict[Key, tuple[Pull, asyncio.Future[Pulled | NotPulled]]] = {}
        self._served: dict[Key, _Served] = {}
        self._begun = asyncio.Event()
        self._joins = Joins(self.blobs)

    async def on_stop(self) -> None:
        for key in list(self._served):
            self._forget(key)

    @handler(concurrency=16)
    async def find_newest(self, request: FindNewest) -> Newest | NotHere:
        info = await self.blobs.newest(request.name)
        if info is None:
            return NotHere(f"{self.name} has no blob {request.name}")
        delta = await self.blobs.newest(delta_name(request.name))
        if delta is None or (delta.version, delta.term) != (info.version, info.term):
            return Newest(info.version, info.term, info.digest, info.size_bytes)
        return Newest(info.version, info.term, info.digest, info.size_bytes, delta.digest, delta.size_bytes)

    @handler(concurrency=SERVED_AT_ONCE)
    async def get_pieces(self, request: GetPieces) -> BlobPieces | NotHere:
        try:
            found = await self._find((request.name, request.version, request.term))
            return BlobPieces(Buffer(await found.pieces()))
        except BlobError as error:
            return NotHere(f"{self.name}: {error}")

    @handler(concurrency=SERVED_AT_ONCE)
    async def get_piece(self, request: GetPiece) -> BlobPiece | NotHere:
        try:
            found = await self._find((request.name, request.version, request.term))
            return BlobPiece(Buffer(await found.piece(request.index)))
        except BlobError as error:
            return NotHere(f"{self.name}: {error}")

    @handler(concurrency=64, outlives_asker=True)
    async def pull_blob(self, request: PullBlob) -> Pulled | NotPulled:
        info = BlobInfo(request.name, request.version, request.term, request.digest, request.size_bytes)
        if not info.digest or not 0 <= info.size_bytes <= MAX_BLOB_BYTES:
            return NotPulled(f"{info} can't be pulled: only blobs with a digest leave their host")
        key = (info.name, info.version, info.term)
        if key not in self._pulls:
            if await self._has(info):
                return Pulled(())
            await self._begin(key, info, request)
        return await asyncio.shield(self._pulls[key][1])

    @handler(concurrency=64, outlives_asker=True)
    async def join_parts(self, request: JoinParts) -> Pulled | NotPulled:
        return await self._joins.join(request)

    async def _begin(self, key: Key, info: BlobInfo, request: PullBlob) -> None:
        draft = await self.blobs.draft(info.name, info.version, info.term, info.size_bytes)
        if key in self._pulls:  # another request began it meanwhile
            return
        pull = Pull(info, draft, self._ask, self.offload)
        done: asyncio.Future[Pulled | NotPulled] = asyncio.get_running_loop().create_future()
        self._pulls[key] = (pull, done)
        self._begun.set()
        self._begun = asyncio.Event()
        self.spawn(self._run(key, pull, request, done), name=f"{self.name}.pull")

    async def _run(self, key: Key, pull: Pull, request: PullBlob, done: "asyncio.Future[Pulled | NotPulled]") -> None:
        began = asyncio.get_running_loop().time()
        try:
            if not await self._patched(pull, request):
                await pull.run(request.sources, request.ways)
        except BlobError as error:
            self.log.warning("blob_not_pulled", blob=key[0], version=key[1], error=str(error))
            done.set_result(NotPulled(str(error)))
        else:
            took_s = asyncio.get_running_loop().time() - began
            self.metrics.observe("blobs/pull_s", took_s)
            self.log.info("blob_pulled", blob=key[0], version=key[1], sources=pull.sources, took_s=round(took_s, 3))
            done.set_result(Pulled(tuple(pull.sources)))
        finally:
            del self._pulls[key]

    async def _patched(self, pull: Pull, request: PullBlob) -> bool:
        """Whether it could be made of the version before and what changed, which is pulled as any other blob, relays included."""
        if not request.delta or not await has_before(self.blobs, pull.info):
            return False
        name, version, term, *_ = pull.info
        delta = BlobInfo(delta_name(name), version, term, request.delta, request.delta_bytes)
        try:
            if isinstance(await self.pull_blob(PullBlob(*delta, request.sources, request.ways)), NotPulled):
                return False
            _, changes = await self.blobs.get(delta.name, version, check=False)
            await pull.patch(self.blobs, changes)
        except BlobError as error:
            self.log.warning("blob_not_patched", blob=name, version=version, error=str(error))
            return False
        return True

    async def _ask(self, source: str, request: Any) -> Any:
        if self.directory.find(source) is None:
            raise BlobMissing("it is not there")
        return await self.ref(source).ask(request, timeout=PIECE_S, retry=False)

    async def _has(self, info: BlobInfo) -> bool:
        try:
            found, _ = await self.blobs.get(info.name, info.version, check=False)
        except BlobMissing:
            return False
        return found.term >= info.term

    async def _find(self, key: Key) -> "Pull | _Served":
        """Where the pieces of `key` come from. Raises BlobMissing when it is neither here nor on its way."""
        try:
            async with asyncio.timeout(GRACE_S):
                while True:
                    begun = self._begun
                    if key in self._pulls:
                        return self._pulls[key][0]
                    served = await self._open(key)
                    if served is not None:
                        return served
                    await begun.wait()
        except TimeoutError:
            raise BlobMissing(f"blob {key[0]} version {key[1]} is not here") from None

    async def _open(self, key: Key) -> _Served | None:
        served = self._served.get(key)
        if served is None:
            try:
                info, content = await self.blobs.get(key[0], key[1], check=False)
            except BlobMissing:
                return None
            if info.term != key[2] or not info.digest:
                return None
            served = self._served.setdefault(key, _Served(content))
            for old in list(self._served)[:-MAX_SERVED]:
                self._forget(old)
        if served.end is not None:
            served.end.cancel()
        served.end = asyncio.get_running_loop().call_later(KEPT_S, self._forget, key)
        return served

    def _forget(self, key: Key) -> None:
        served = self._served.pop(key, None)
        if served is not None and served.end is not None:
            served.end.cancel()

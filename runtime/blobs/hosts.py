"""Carries blobs between hosts: each node agent serves its host's blobs in pieces and pulls others' once, however many ask."""

import asyncio
from typing import Any, ClassVar

from bus.tensor import Buffer
from runtime.actor import Actor, ActorConfig, Context, handler
from runtime.blobs.blob import BlobError, BlobInfo, BlobMissing
from runtime.blobs.digest import PIECE_BYTES, piece_digests_beside
from runtime.blobs.messages import (
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
from runtime.blobs.pull import MAX_BLOB_BYTES, Pull

PIECE_S = 10.0
"""A source that gives nothing for so long is left for the next: longer than one piece takes on a slow link (4 MiB at 4 Mbit/s),
and than the heartbeats that notice a dead one."""

GRACE_S = 2.0
"""Hosts hear of a new version at about the same time; a relay that is asked before it has begun is given this long to begin."""

KEPT_S = 10.0
"""A blob that other hosts pull stays mapped here this long after they last asked."""

KEPT = 4
SERVED_AT_ONCE = 64


Key = tuple[str, int, int]
"""Name, version and epoch: what of a blob never changes."""


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
        """Hashed once, whoever asks."""
        async with self._hashing:
            if self._digests is None:
                self._digests = b"".join(await piece_digests_beside(self._content))
        return self._digests


class HostBlobs(Actor):
    """Base of the node agent: the part of it that other hosts see of this host's blobs."""

    role: ClassVar[str] = "node"

    def __init__(self, config: ActorConfig, context: Context) -> None:
        super().__init__(config, context)
        self._pulls: dict[Key, tuple[Pull, asyncio.Future[Pulled | NotPulled]]] = {}
        self._served: dict[Key, _Served] = {}
        self._begun = asyncio.Event()

    async def on_stop(self) -> None:
        for key in list(self._served):
            self._forget(key)

    @handler(concurrency=16)
    async def find_newest(self, request: FindNewest) -> Newest | NotHere:
        info = await self.blobs.newest(request.name)
        if info is None:
            return NotHere(f"{self.name} has no blob {request.name}")
        return Newest(info.version, info.epoch, info.digest, info.size_bytes)

    @handler(concurrency=SERVED_AT_ONCE)
    async def get_pieces(self, request: GetPieces) -> BlobPieces | NotHere:
        try:
            found = await self._find((request.name, request.version, request.epoch))
            return BlobPieces(Buffer(await found.pieces()))
        except BlobError as error:
            return NotHere(f"{self.name}: {error}")

    @handler(concurrency=SERVED_AT_ONCE)
    async def get_piece(self, request: GetPiece) -> BlobPiece | NotHere:
        try:
            found = await self._find((request.name, request.version, request.epoch))
            return BlobPiece(Buffer(await found.piece(request.index)))
        except BlobError as error:
            return NotHere(f"{self.name}: {error}")

    @handler(concurrency=64, outlives_asker=True)
    async def pull_blob(self, request: PullBlob) -> Pulled | NotPulled:
        info = BlobInfo(request.name, request.version, request.epoch, request.digest, request.size_bytes)
        if not info.digest or not 0 <= info.size_bytes <= MAX_BLOB_BYTES:
            return NotPulled(f"{info} can't be pulled: only blobs with a digest leave their host")
        key = (info.name, info.version, info.epoch)
        if key not in self._pulls:
            if await self._has(info):
                return Pulled(())
            await self._begin(key, info, request.sources, request.ways)
        return await asyncio.shield(self._pulls[key][1])

    async def _begin(self, key: Key, info: BlobInfo, sources: tuple[str, ...], ways: int) -> None:
        draft = await self.blobs.draft(info.name, info.version, info.epoch, info.size_bytes)
        if key in self._pulls:  # somebody else began meanwhile
            return
        pull = Pull(info, draft, self._ask, self.offload)
        done: asyncio.Future[Pulled | NotPulled] = asyncio.get_running_loop().create_future()
        self._pulls[key] = (pull, done)
        self._begun.set()
        self._begun = asyncio.Event()
        self.spawn(self._run(key, pull, sources, ways, done), name=f"{self.name}.pull")

    async def _run(
        self, key: Key, pull: Pull, sources: tuple[str, ...], ways: int, done: "asyncio.Future[Pulled | NotPulled]"
    ) -> None:
        began = asyncio.get_running_loop().time()
        try:
            await pull.run(sources, ways)
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

    async def _ask(self, source: str, request: Any) -> Any:
        if self._context.find(source) is None:
            raise BlobMissing("it is not there")
        return await self.ref(source).ask(request, timeout=PIECE_S, retry=False)

    async def _has(self, info: BlobInfo) -> bool:
        try:
            found, _ = await self.blobs.get(info.name, info.version, check=False)
        except BlobMissing:
            return False
        return found.epoch >= info.epoch

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
            if info.epoch != key[2] or not info.digest:
                return None
            served = self._served.setdefault(key, _Served(content))
            for old in list(self._served)[:-KEPT]:
                self._forget(old)
        if served.end is not None:
            served.end.cancel()
        served.end = asyncio.get_running_loop().call_later(KEPT_S, self._forget, key)
        return served

    def _forget(self, key: Key) -> None:
        served = self._served.pop(key, None)
        if served is not None and served.end is not None:
            served.end.cancel()

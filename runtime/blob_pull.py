"""Pulls one blob from other hosts, piece by piece: a piece that is here and has its digest is never pulled again, whoever gave it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from bus.errors import AskFailed
from runtime.blob_digest import DIGEST_BYTES, PIECE_BYTES, join_digests, piece_digest
from runtime.blob_messages import BlobPieces, GetPiece, GetPieces, NotHere
from runtime.blobs import BlobCorrupt, BlobError, BlobInfo, BlobMissing, Draft

WINDOW = 8
"""Pieces asked for at once: enough to fill a link while one is checked, and all that a pull holds beside the blob itself."""

MAX_BLOB_BYTES = 1 << 40


class Ask(Protocol):
    def __call__(self, source: str, request: Any) -> Awaitable[Any]: ...


class Pull:
    """One blob on its way here. `memory` fills up in no particular order; relays read it meanwhile."""

    def __init__(
        self, info: BlobInfo, draft: Draft, ask: Ask, offload: Callable[..., Awaitable[Any]], *, check: bool = True
    ) -> None:
        self.info = info
        self.digests: bytes | None = None
        """Of the pieces, once a source told them and they were found to be this blob's."""
        self.sources: list[str] = []
        """Who gave pieces, in the order in which they first did."""
        self._draft, self._ask, self._offload, self._check = draft, ask, offload, check
        self._missing = deque(range(-(-info.size_bytes // PIECE_BYTES)))
        self._there: set[int] = set()
        self._news = asyncio.Event()
        self._failed = ""

    async def run(self, sources: Sequence[str]) -> BlobInfo:
        """Pull from the first source that answers, and from the next where it fails; publish when all is here.

        A source whose piece does not have its digest is not asked again. Raises BlobError, naming what went wrong with each
        source, when all of them together gave nothing new.
        """
        trusted, failures = list(sources), dict[str, str]()
        while True:
            before = len(self._there)
            for source in tuple(trusted):
                try:
                    await self._pull_from(source)
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

    async def _pull_from(self, source: str) -> None:
        if self._check and self.digests is None:
            self.digests = await self._manifest(source)
            self._tell()
        failures: list[AskFailed | BlobError] = []
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(WINDOW, len(self._missing))):
                tasks.create_task(self._work(source, failures))
        if failures:
            raise failures[0]

    async def _manifest(self, source: str) -> bytes:
        reply = await self._ask(source, GetPieces(*self.info[:3]))
        if isinstance(reply, NotHere):
            raise BlobMissing(reply.why)
        assert isinstance(reply, BlobPieces)
        digests = bytes(reply.digests)
        if join_digests(digests) != self.info.digest:
            raise BlobCorrupt(
                f"the digests that {source} gives are not those of blob {self.info.name} {self.info.version}"
            )
        if len(digests) != DIGEST_BYTES * (len(self._missing) + len(self._there)):
            raise BlobCorrupt(f"blob {self.info.name} {self.info.version} does not have {self.info.size_bytes} bytes")
        return digests

    async def _work(self, source: str, failures: list[AskFailed | BlobError]) -> None:
        """Nobody is cancelled when another fails: a piece that has arrived is still checked and kept."""
        while self._missing and not failures:
            index = self._missing.popleft()
            try:
                await self._fetch(source, index)
            except (AskFailed, BlobError) as error:
                failures.append(error)
            finally:
                if index not in self._there:
                    self._missing.appendleft(index)

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

"""Pulls one blob from other hosts, piece by piece: a piece that is here and has its digest is never pulled again, whoever gave it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from bus.errors import AskFailed
from runtime.blobs.blob import BlobCorrupt, BlobError, BlobInfo, BlobMissing, Draft
from runtime.blobs.digest import DIGEST_BYTES, PIECE_BYTES, join_digests, piece_digest
from runtime.blobs.messages import BlobPieces, GetPiece, GetPieces, NotHere

WINDOW = 8
"""Pieces asked for at once: enough to fill a link while one is checked, and all that a pull holds beside the blob itself."""

SOON_S = 5.0
"""No more are asked for than should come within this, by the first one: an agent gives up a source that owes a piece for twice as long."""

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
        """Piece i from source i mod n. What one of them does not give stays missing, for whoever comes next."""
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
            raise BlobCorrupt(
                f"the digests that {source} gives are not those of blob {self.info.name} {self.info.version}"
            )
        if len(digests) != DIGEST_BYTES * self._num_pieces:
            raise BlobCorrupt(f"blob {self.info.name} {self.info.version} does not have {self.info.size_bytes} bytes")
        return digests

    async def _work(
        self, source: str, missing: deque[int], failures: list[AskFailed | BlobError], *, most: int = -1
    ) -> None:
        """Nobody is cancelled when another fails: a piece that has arrived is still checked and kept."""
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

"""Weights as one process receives them: late, damaged or cut short, as a host's agent may hand them over."""

import asyncio
import random
from collections.abc import Sequence

from runtime.blob_memory import MemoryBlobStore, MemoryDraft
from runtime.blobs import BlobCorrupt, BlobInfo
from sim.simtest.process import Process


class BlobServer:
    """The host's blobs and what goes wrong with the next reads."""

    def __init__(self, seed: int) -> None:
        self.blobs = MemoryBlobStore()
        self.rng = random.Random(f"{seed}/blobs")
        self.spoiled: list[str] = []
        """Why the next reads fail."""


class BlobClient:
    """A `BlobStore` for one process."""

    def __init__(self, server: BlobServer, process: Process) -> None:
        self._server, self._process = server, process

    async def draft(self, name: str, version: int, epoch: int, size_bytes: int) -> MemoryDraft:
        return await self._server.blobs.draft(name, version, epoch, size_bytes)

    async def put(
        self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes], *, checked: bool = True
    ) -> BlobInfo:
        await asyncio.sleep(self._server.rng.uniform(0.0, 0.05))
        self._process.check_alive()
        return await self._server.blobs.put(name, version, epoch, parts, checked=checked)

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        await asyncio.sleep(self._server.rng.uniform(0.0, 0.05))
        if self._server.spoiled:
            raise BlobCorrupt(f"blob {name} version {version}: {self._server.spoiled.pop()}")
        return await self._server.blobs.get(name, version, check=check)

    async def newest(self, name: str) -> BlobInfo | None:
        return await self._server.blobs.newest(name)

    async def close(self) -> None:
        """Nothing is held."""

"""Weights as one process receives them: late, damaged or cut short, as a host's agent may hand them over.

What is read is checked by the product's own `BlobInfo.check`; what passes it damaged is a violation.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from rubato.runtime.blobs.blob import BlobInfo, Draft
from rubato.runtime.memory import MemoryBlobStore
from rubato.sim.simtest.process import ActorProcess


class SimBlobServer:
    """The host's blobs and what goes wrong with the next reads."""

    def __init__(self, seed: int, unnoticed: Callable[[str], None]) -> None:
        self.blobs = MemoryBlobStore()
        self.rng = random.Random(f"{seed}/blobs")
        self.unnoticed = unnoticed
        """Called for weights that were handed out damaged."""
        self.spoiled: dict[str, Callable[[memoryview], memoryview]] = {}
        """Process → what becomes of the bytes that it reads next."""


class SimBlobClient:
    """A `BlobStore` for one process."""

    def __init__(self, server: SimBlobServer, process: ActorProcess) -> None:
        self._server, self._process = server, process

    async def draft(self, name: str, version: int, term: int, size_bytes: int) -> Draft:
        return await self._server.blobs.draft(name, version, term, size_bytes)

    async def shared(self, segment: int, size_bytes: int) -> memoryview:
        return await self._server.blobs.shared(segment, size_bytes)

    async def put(self, name: str, version: int, term: int, parts: Sequence[memoryview | bytes], *, checked: bool = True) -> BlobInfo:
        await asyncio.sleep(self._server.rng.uniform(0.0, 0.05))
        self._process.check_alive()
        return await self._server.blobs.put(name, version, term, parts, checked=checked)

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        await asyncio.sleep(self._server.rng.uniform(0.0, 0.05))
        info, content = await self._server.blobs.get(name, version)
        spoil = self._server.spoiled.pop(self._process.name, None)
        if spoil is not None:
            content = spoil(content)
        if check:
            await info.check(content)
        if spoil is not None:
            self._server.unnoticed(f"{self._process.name} took {name} version {version} although its bytes were damaged")
        return info, content

    async def newest(self, name: str) -> BlobInfo | None:
        return await self._server.blobs.newest(name)

    async def forget(self, name: str) -> None:
        await self._server.blobs.forget(name)

    async def close(self) -> None:
        """Nothing is held."""


def corrupted(content: memoryview) -> memoryview:
    """One bit of it is another."""
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    return memoryview(bytes(damaged))


def half(content: memoryview) -> memoryview:
    """The first half of it."""
    return content[: len(content) // 2]

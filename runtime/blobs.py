"""Blobs: immutable, named, versioned, checksummed buffers; written once, pulled by whoever needs them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runtime.errors import RubatoError


class BlobError(RubatoError):
    """The boundary between an actor and the blobs of its host."""


class BlobMissing(BlobError):
    """That version was never put, or is freed already: ask for the newest."""


class BlobCorrupt(BlobError):
    """The content does not have its digest; it must not be used."""


class BlobInfo(NamedTuple):
    """What a reader checks: `digest` is the hex BLAKE2b-256 of the whole buffer."""

    name: str
    version: int
    epoch: int
    digest: str
    size_bytes: int


class BlobStore(Protocol):
    """Owned by the node agent, so a blob outlives the process that wrote it. Keeps the newest two versions of a name.

    Raises `BlobMissing` for what was never put or is already freed, `BlobCorrupt` when the digest does not match.
    """

    async def put(self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes]) -> BlobInfo:
        """Concatenate `parts` into version `version`. The same version under a higher epoch replaces it; under a lower one is
        ignored, and the standing one is returned."""
        ...

    async def get(self, name: str, version: int) -> tuple[BlobInfo, memoryview]:
        """Map a version read-only, digest checked. The mapping lives as long as the memoryview, whatever is freed meanwhile."""
        ...

    async def newest(self, name: str) -> BlobInfo | None: ...

    async def close(self) -> None: ...

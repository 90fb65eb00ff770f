"""Blobs in this process's memory: for actors that share one event loop."""

import hashlib
from collections.abc import Sequence

from runtime.blobs import BlobError, BlobInfo, BlobMissing

KEPT = 2
"""Current and previous version: a reader that was told of one is never too late by a single publish."""


def digest_of(content: bytes | memoryview) -> str:
    """Hex BLAKE2b-256."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def missing(name: str, version: int) -> BlobMissing:
    """The same sentence from every implementation, as for the check below."""
    return BlobMissing(f"blob {name} version {version} was never put, or is freed already")


def check_blob(name: str, version: int) -> None:
    """Raises BlobError for what no blob is called."""
    if not name or version < 0:
        raise BlobError(f"a blob needs a name and a version from 0, got {name!r} and {version}")


class MemoryBlobStore:
    """Keeps the newest two versions of each name."""

    def __init__(self) -> None:
        self._blobs: dict[str, dict[int, tuple[BlobInfo, bytes]]] = {}

    async def put(self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes]) -> BlobInfo:
        check_blob(name, version)
        content = b"".join(parts)
        versions = self._blobs.setdefault(name, {})
        known = versions.get(version)
        if known is not None and known[0].epoch > epoch:
            return known[0]
        info = BlobInfo(name, version, epoch, digest_of(content), len(content))
        versions[version] = (info, content)
        for old in sorted(versions)[:-KEPT]:
            del versions[old]
        return info

    async def get(self, name: str, version: int) -> tuple[BlobInfo, memoryview]:
        try:
            info, content = self._blobs[name][version]
        except KeyError:
            raise missing(name, version) from None
        return info, memoryview(content)

    async def newest(self, name: str) -> BlobInfo | None:
        versions = self._blobs.get(name)
        return versions[max(versions)][0] if versions else None

    async def close(self) -> None:
        """Nothing to let go of: what was put stays, for the others that hold this store."""

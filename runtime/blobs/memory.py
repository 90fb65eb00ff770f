"""Blobs in this process's memory: for actors that share one event loop."""

from collections.abc import Sequence

from runtime.blobs.blob import BlobError, BlobInfo, BlobMissing
from runtime.blobs.digest import digest_of

KEPT = 2
"""Current and previous version: a reader that was told of one is never too late by a single publish."""


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
        self._blobs: dict[str, dict[int, tuple[BlobInfo, memoryview]]] = {}

    async def draft(self, name: str, version: int, epoch: int, size_bytes: int) -> "MemoryDraft":
        check_blob(name, version)
        return MemoryDraft(self, BlobInfo(name, version, epoch, "", size_bytes))

    async def put(
        self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes], *, checked: bool = True
    ) -> BlobInfo:
        check_blob(name, version)
        content = b"".join(parts)
        info = BlobInfo(name, version, epoch, digest_of(content) if checked else "", len(content))
        return self.show(info, memoryview(content))

    def show(self, info: BlobInfo, content: memoryview) -> BlobInfo:
        versions = self._blobs.setdefault(info.name, {})
        known = versions.get(info.version)
        if known is not None and known[0].epoch > info.epoch:
            return known[0]
        versions[info.version] = (info, content)
        for old in sorted(versions)[:-KEPT]:
            del versions[old]
        return info

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        """`check` changes nothing: what lies in one's own memory was never anywhere else."""
        try:
            return self._blobs[name][version]
        except KeyError:
            raise missing(name, version) from None

    async def newest(self, name: str) -> BlobInfo | None:
        versions = self._blobs.get(name)
        return versions[max(versions)][0] if versions else None

    async def close(self) -> None:
        """Nothing to let go of: what was put stays, for the others that hold this store."""


class MemoryDraft:
    """See Draft."""

    def __init__(self, store: MemoryBlobStore, info: BlobInfo) -> None:
        self.memory = memoryview(bytearray(info.size_bytes))
        self._store, self._info = store, info

    async def publish(self, digest: str) -> BlobInfo:
        return self._store.show(self._info._replace(digest=digest), self.memory.toreadonly())

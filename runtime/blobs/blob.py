"""Blobs: immutable, named, versioned, checksummed buffers; written once, mapped or pulled by whoever needs them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runtime.blobs.digest import join_digests, piece_digests_beside
from runtime.errors import RubatoError


class BlobError(RubatoError):
    """The boundary between an actor and the blobs of its host."""


class BlobMissing(BlobError):
    """That version was never put, or is freed already: ask for the newest."""


class BlobCorrupt(BlobError):
    """The content does not have its digest; it must not be used."""


class BlobInfo(NamedTuple):
    """What a reader checks: `digest` as runtime/blobs/digest.py makes it; empty for a blob put without, which stays on its host."""

    name: str
    version: int
    epoch: int
    digest: str
    size_bytes: int

    async def check(self, content: memoryview) -> None:
        """Raises BlobCorrupt where `content` does not have the digest; passes what has none. Hashed off the event loop."""
        if self.digest and join_digests(await piece_digests_beside(content)) != self.digest:
            raise BlobCorrupt(f"blob {self.name} version {self.version} does not have its digest {self.digest[:12]}…")


class Draft(Protocol):
    """A blob that is being written, in the memory in which it will be read."""

    memory: memoryview
    """Writable. Whoever holds it, or a slice of it, keeps the memory from being used for anything else."""

    async def publish(self, digest: str) -> BlobInfo:
        """Show it; nothing may be written any more. Returns the standing blob where that has a higher epoch."""
        ...


class BlobStore(Protocol):
    """Owned by the node agent, so a blob outlives the process that wrote it. Keeps the newest two versions of a name.

    Raises `BlobMissing` for what was never put or is already freed, `BlobCorrupt` when the digest does not match.
    """

    async def draft(self, name: str, version: int, epoch: int, size_bytes: int) -> Draft:
        """Room for a blob of this size. A draft that is let go of without `publish` leaves nothing."""
        ...

    async def put(
        self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes], *, checked: bool = True
    ) -> BlobInfo:
        """Concatenate `parts` into version `version`. The same version under a higher epoch replaces it; under a lower one is
        ignored, and the standing one is returned. Without `checked` it gets no digest: readers on this host alone can use it."""
        ...

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        """A version, read-only and not copied; its digest, if it has one, is checked unless `check` is off.

        The content stays as it is for as long as the memoryview, or anything made from it without a copy, lives: only then is
        the memory used again, whatever is put or freed meanwhile.
        """
        ...

    async def newest(self, name: str) -> BlobInfo | None: ...

    async def close(self) -> None:
        """Let go of everything; what `get` returned must not be used any more."""
        ...

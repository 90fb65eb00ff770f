"""The blobs of an engine's host, into which weights are brought first when the trainer lives on another: by a relay tree, once per host."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bus.errors import AskFailed
from planning.relay import plan, ring_sources, sources
from runtime.blobs.blob import BlobInfo, BlobMissing, BlobStore, Draft
from runtime.blobs.messages import FindNewest, Newest, NotPulled, PullBlob
from runtime.kernel import NODE

if TYPE_CHECKING:
    from runtime.ref import Ref
    from runtime.registry import ActorRecord

FIND_S = 10.0
PULL_S = 1800.0
"""Longer than the largest weights take on a slow link; dead sources are left after seconds."""


class WeightsHosts:
    """A BlobStore. `node` is the agent of this host; where the others are is read from the registry: nobody hands out the tree."""

    def __init__(
        self,
        blobs: BlobStore,
        node: str,
        find: "Callable[[str], ActorRecord | None]",
        peers: Callable[[str], tuple[str, ...]],
        ref: "Callable[[str], Ref]",
        *,
        by_rings: bool = False,
    ) -> None:
        self._blobs, self._node = blobs, node
        self._find, self._peers, self._ref = find, peers, ref
        self._by_rings = by_rings

    async def newest(self, name: str) -> BlobInfo | None:
        """What the trainer's host has; where that is ours, or does not answer, what we have."""
        home = self._home()
        if home != self._node and self._find(home) is not None:
            try:
                reply = await self._ref(home).ask(FindNewest(name), timeout=FIND_S)
            except AskFailed:
                reply = None
            if isinstance(reply, Newest):
                return BlobInfo(name, reply.version, reply.epoch, reply.digest, reply.size_bytes)
        return await self._blobs.newest(name)

    async def get(self, name: str, version: int, *, check: bool = True) -> tuple[BlobInfo, memoryview]:
        """Brings it here first, where the trainer's host has it and ours has not. Raises BlobMissing when no host gave it."""
        home = self._home()
        if home != self._node:
            newest = await self.newest(name)
            if newest is not None and newest.version == version:
                await self._bring(newest, home)
        return await self._blobs.get(name, version, check=check)

    async def draft(self, name: str, version: int, epoch: int, size_bytes: int) -> Draft:
        return await self._blobs.draft(name, version, epoch, size_bytes)

    async def put(
        self, name: str, version: int, epoch: int, parts: Sequence[memoryview | bytes], *, checked: bool = True
    ) -> BlobInfo:
        return await self._blobs.put(name, version, epoch, parts, checked=checked)

    async def close(self) -> None:
        await self._blobs.close()

    async def _bring(self, info: BlobInfo, home: str) -> None:
        readers = {record.node for name in self._peers("engine") if (record := self._find(name)) is not None}
        hosts = {self._node} | (readers & set(self._peers("node")))
        where = ring_sources(home, hosts, self._node) if self._by_rings else sources(plan(home, hosts), self._node)
        ways = 2 if self._by_rings and len(where) > 1 else 1
        try:
            reply = await self._ref(self._node).ask(PullBlob(*info, where, ways), timeout=PULL_S)
        except AskFailed as error:
            raise BlobMissing(str(error)) from error
        if isinstance(reply, NotPulled):
            raise BlobMissing(reply.why)

    def _home(self) -> str:
        """The agent of the trainer's host; while the trainer is away, the launcher's."""
        for name in self._peers("trainer"):
            record = self._find(name)
            if record is not None:
                return record.node
        return NODE

"""Weights of a trainer on another host: its blobs are brought to this one by a relay tree or a ring, which every host finds for itself."""

from rubato.actors.messages.generation import GENERATION
from rubato.bus.errors import AskFailed
from rubato.planning.relay import plan, pod_of, ring_sources, sources
from rubato.runtime.actor import Actor
from rubato.runtime.blobs.blob import BlobInfo, BlobMissing
from rubato.runtime.blobs.blob_messages import FindNewest, Newest, NotPulled, PullBlob

FIND_S = 10.0
PULL_S = 1800.0
"""Longer than the largest weights take on a slow link; dead sources are left after seconds."""


class Relayed:
    """Blobs that the node agent `home` has."""

    def __init__(self, actor: Actor, home: str, *, by_rings: bool) -> None:
        self._actor, self._home, self._by_rings = actor, home, by_rings

    async def newest(self, blob: str) -> Newest | None:
        """What that host has; None where it has none, or does not answer."""
        if self._actor.directory.find(self._home) is None:
            return None
        try:
            reply = await self._actor.ref(self._home).ask(FindNewest(blob), timeout=FIND_S)
        except AskFailed:
            return None
        return reply if isinstance(reply, Newest) else None

    async def bring(self, blob: str, version: int) -> None:
        """Bring this version, where it is the newest there; as what changed, where it may be had so. Raises BlobMissing."""
        found = await self.newest(blob)
        if found is None or found.version != version:
            return
        await self.pull(BlobInfo(blob, version, found.term, found.digest, found.size_bytes), found.delta, found.delta_bytes)

    async def pull(self, blob: BlobInfo, delta: str = "", delta_bytes: int = 0) -> None:
        """Bring this blob, which that host has. Raises BlobMissing."""
        actor, find = self._actor, self._actor.directory.find
        readers = {record.node for name in actor.peers(GENERATION) if (record := find(name)) is not None}
        hosts = {actor.node} | (readers & set(actor.peers("node")))
        pods = {host: pod_of(record.provides) for host in hosts | {self._home} if (record := find(host)) is not None}
        if self._by_rings:
            where = ring_sources(self._home, hosts, actor.node, pods)
        else:
            where = sources(plan(self._home, hosts, pods, delta_bytes or blob.size_bytes), actor.node, pods)
        ways = 2 if self._by_rings and len(where) > 1 else 1
        try:
            reply = await actor.ref(actor.node).ask(PullBlob(*blob, where, ways, delta, delta_bytes), timeout=PULL_S)
        except AskFailed as error:
            raise BlobMissing(str(error)) from error
        if isinstance(reply, NotPulled):
            raise BlobMissing(reply.why)

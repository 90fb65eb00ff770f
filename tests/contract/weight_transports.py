"""A collective WeightTransport of one process: what the contract allows beside blobs. No image of a version exists anywhere in it."""

import asyncio
from collections import deque

from rubato.actors.messages.weights import WeightsPublished
from rubato.actors.weights.transport import WeightsMissing, WeightsPart


class Group:
    """The ranks of a trainer and its engines, which meet at each version."""

    def __init__(self, num_ranks, num_engines):
        self.num_ranks = num_ranks
        self.newest = {}
        self.lanes = [deque() for _ in range(num_engines)]
        """To each engine: (version, rank, shard) in the order in which they were sent."""
        self._meeting = {}

    async def meet(self, version):
        """Return once all ranks have come to `version`."""
        came, all_came = self._meeting.setdefault(version, (set(), asyncio.Event()))
        came.add(asyncio.current_task())
        if len(came) == self.num_ranks:
            del self._meeting[version]
            all_came.set()
        await all_came.wait()

    def broadcast(self, version, rank, shard):
        for lane in self.lanes:
            lane.append((version, rank, shard))


class CollectiveSender:
    """A rank's end."""

    def __init__(self, group, rank):
        self._group, self._rank = group, rank

    async def send(self, version, source):
        shard = memoryview(bytearray(source.image_bytes()))
        whole = source.export(shard)

        async def announce():
            whole()
            await self._group.meet(version)
            self._group.broadcast(version, self._rank, shard)
            await self._group.meet(version)
            published = WeightsPublished(version.version, version.term, "", len(shard), version.adapter)
            if self._rank:
                return None
            self._group.newest[version.adapter] = published
            return published

        return announce

    def disagreement(self, taken):
        return ""


class CollectiveReceiver:
    """An engine's end: it takes part in every version, in the order in which they were sent."""

    def __init__(self, group, number):
        self._group, self._lane = group, group.lanes[number]

    async def newest(self, adapter):
        return self._group.newest.get(adapter)

    async def receive(self, wanted):
        left = self._group.num_ranks
        while left and self._lane:
            version, _, shard = self._lane.popleft()
            if (version.adapter, version.version, version.term) == (wanted.adapter, wanted.version, wanted.term):
                left -= 1
                yield WeightsPart(wanted, shard)
        if left:
            raise WeightsMissing(f"version {wanted.version} of adapter {wanted.adapter!r} was broadcast and is over")

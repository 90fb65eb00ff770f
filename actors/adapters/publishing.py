"""Publication of adapters beside the run's own: each has a name, and versions of its own."""

import asyncio
from contextlib import suppress

from rubato.actors.adapters import shapes
from rubato.actors.messages.adapters import WithdrawWeights
from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.weights import WeightsPublished
from rubato.actors.weights.transport import WeightsSender, WeightsSource, WeightsVersion, blob_of
from rubato.bus.errors import AskFailed, Failed
from rubato.runtime.actor import Actor
from rubato.runtime.blobs.patches import forget

ASK_S = 60.0
"""Limit of one ask of an engine, which ends requests before it answers; it is asked again while it is there."""


class AdapterPublisher:
    """The outgoing side of an actor on the trainer's host, where engines look for weights. A name's versions go up within a `term`."""

    def __init__(self, actor: Actor, sender: WeightsSender, term: int) -> None:
        self._actor, self._sender, self._term = actor, sender, term
        self._turn = asyncio.Lock()

    async def publish(self, adapter: str, version: int, source: WeightsSource) -> WeightsPublished:
        """Engines can have it once this returns, and take it when a request asks for it; those that hold the adapter take it at once.

        Raises AdapterError for what no adapter can be called.
        """
        shapes.require_name(adapter)
        async with self._turn:
            announce = await self._sender.send(WeightsVersion(adapter, version, self._term), source)
            published = await announce()
        assert published is not None  # of the first rank
        self._actor.log.info("adapter_published", adapter=adapter, version=version, size_bytes=published.size_bytes)
        for name in self._actor.peers(GENERATION):
            with suppress(AskFailed):
                await self._actor.ref(name).tell(published)
        return published

    async def withdraw(self, adapter: str) -> None:
        """Let engines and hosts forget it: requests under it end as Aborted, and later ones are refused. Its name is free once this returns."""
        shapes.require_name(adapter)
        async with self._turn:
            await forget(self._actor.blobs, blob_of(adapter))
        async with asyncio.TaskGroup() as tasks:
            for name in self._actor.peers(GENERATION):
                tasks.create_task(self._withdraw_at(name, adapter))

    async def _withdraw_at(self, engine: str, adapter: str) -> None:
        while engine in self._actor.peers(GENERATION):
            try:
                await self._actor.ref(engine).ask(WithdrawWeights(adapter), timeout=ASK_S)
                return
            except Failed as error:
                self._actor.log.warning("adapter_not_withdrawn", engine=engine, adapter=adapter, error=str(error))
                return
            except AskFailed as error:
                self._actor.log.warning("adapter_not_withdrawn", engine=engine, adapter=adapter, error=str(error))

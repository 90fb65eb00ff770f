"""An engine worker whose prompts are prefilled on another host, as far as the network sees it: for test-beds with engines that have no model.

The cache is zeros, the way that it takes is real: before a request decodes here, as many bytes as its prompt's KV cache would have come
over the bus from the engine of another host.
"""

from contextlib import suppress
from typing import ClassVar

from pydantic import Field

from rubato.actors.engines.worker import EngineRequest, EngineWorker
from rubato.actors.messages.generation import GENERATION, GenerateReply
from rubato.actors.messages.weights import WeightsPublished
from rubato.bus.errors import AskFailed
from rubato.bus.message import Buffer, Message, Request
from rubato.runtime.actor import handler
from rubato.runtime.config import Section
from rubato.runtime.kernel import NODE

FETCH_S = 60.0
"""A cache that does not come within this is computed here, which a scripted engine does for nothing."""


class KvCache(Message, frozen=True):
    """The bytes of one request's cache."""

    data: Buffer


class FetchKv(Request[KvCache], frozen=True):
    """Give me the cache that a prompt of `num_tokens` tokens leaves under this weight version, or a newer one."""

    idempotent: ClassVar[bool] = True
    num_tokens: int
    version: int


class PrefillSection(Section):
    """What a prompt's cache weighs."""

    kv_bytes_per_token: int = Field(default=16384, ge=1)
    """KV cache of one token, which travels to the engine."""


class RemotePrefillWorker(EngineWorker):
    """Engines on the launcher's host prefill for themselves; each of the others has the next one's host prefill for it."""

    class Config(EngineWorker.Config):
        prefill: PrefillSection = PrefillSection()

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride] - the base class only reads its own sections

    _fetched_bytes = 0

    async def _run(self, shared: EngineRequest) -> GenerateReply:
        request = shared.request
        await self.started()[1].wait_for(request.weights.version, request.request_id)
        await self._fetch(FetchKv(len(request.prompt) // 4, request.weights.version))
        return await super()._run(shared)

    @handler(concurrency=64)
    async def fetch_kv(self, request: FetchKv) -> KvCache:
        await self.started()[1].wait_for(request.version, f"prefill for version {request.version}")
        return KvCache(Buffer(bytes(request.num_tokens * self.config.prefill.kv_bytes_per_token)))

    async def _fetch(self, request: FetchKv) -> None:
        source = self._source()
        if not source:
            return
        with suppress(AskFailed), self.waits.on("kv", stage="kv", holder=source):
            cache = await self.ref(source).ask(request, timeout=FETCH_S)
            self._fetched_bytes += len(cache.data.data)

    def _source(self) -> str:
        """The next engine by name on another host; empty on the launcher's host, and where there is no other."""
        nodes = {name: r.node for name in self.peers(GENERATION) if (r := self.directory.find(name)) is not None}
        others = sorted(name for name, node in nodes.items() if node not in (NODE, self.node))
        if self.node == NODE or not others:
            return ""
        return next((name for name in others if name > self.name), others[0])

    def _swapped(self, info: WeightsPublished) -> None:
        """What was fetched under one version is what a rollout sends."""
        super()._swapped(info)
        size_bytes, self._fetched_bytes = self._fetched_bytes, 0
        if size_bytes and (source := self._source()):
            self.log.info("kv_fetched", source=source, size_bytes=size_bytes, version=info.version - 1)

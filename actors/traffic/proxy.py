"""Rollout phases, as the fabric hears of them from a proxy: when one begins, and what was sent between proxy and engines in the last one."""

from collections import Counter

from rubato.actors.messages.fabric import PhaseIntent
from rubato.actors.messages.generation import Generate, GenerateReply
from rubato.actors.proxy.picker import ProxyHook
from rubato.actors.proxy.placement import EngineSeat
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.errors import NotSent


class RolloutPhases(ProxyHook):
    """The first token under a new version, on any engine, begins its rollout phase."""

    def __init__(self, proxy: LLMProxy) -> None:
        super().__init__(proxy)
        self._bytes: Counter[tuple[str, str]] = Counter()
        """Prompts and tokens since the last phase began, by source and target."""

    def asked(self, engine: EngineSeat, request: Generate) -> None:
        self._bytes[self.proxy.name, engine.name] += len(request.prompt) + len(request.resumed.ids)

    def answered(self, engine: EngineSeat, reply: GenerateReply) -> None:
        self._bytes[engine.name, self.proxy.name] += len(reply.tokens.ids) + len(reply.tokens.logprobs)

    def version_began(self, version: int) -> None:
        sent, self._bytes = self._bytes, Counter()
        if self.proxy.peers("fabric_controller"):
            me, engines = self.proxy.name, self.proxy.placement.seats
            ways = [way for engine in engines for way in ((me, engine), (engine, me))]
            traffic = tuple((*way, sent[way]) for way in ways if sent[way])
            self.proxy.spawn(self._tell(PhaseIntent("rollout", version, 0.0, traffic)), name=f"{self.proxy.name}.phase")

    async def _tell(self, intent: PhaseIntent) -> None:
        try:
            await self.proxy.ref("fabric_controller").tell(intent)
        except NotSent:
            self.proxy.log.debug("not_told", target="fabric_controller", message=type(intent).__name__)

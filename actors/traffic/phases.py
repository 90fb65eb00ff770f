"""Rollout phases, as the fabric hears of them from a proxy: when one begins. What is sent in them is counted."""

from contextlib import suppress

from rubato.actors.messages.phases import PhaseIntent
from rubato.actors.proxy.picker import ProxyHook
from rubato.bus.errors import NotSent


class RolloutPhases(ProxyHook):
    """The first token under a new version, on any engine, begins its rollout phase."""

    def version_began(self, version: int) -> None:
        if self.proxy.peers("fabric_controller"):
            self.proxy.spawn(self._tell(PhaseIntent("rollout", version, 0.0)), name=f"{self.proxy.name}.phase")

    async def _tell(self, intent: PhaseIntent) -> None:
        with suppress(NotSent):
            await self.proxy.ref("fabric_controller").tell(intent)

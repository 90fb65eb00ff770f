"""EmulatedSwitch: an optical switch as a process of its own, which speaks SONiC's RESTCONF dialect over HTTP and over the bus."""

import asyncio
import secrets
from contextlib import suppress

from actors.fabric.device import OcsDevice
from actors.fabric.dialect import Dialect
from actors.fabric.driver import Login
from actors.fabric.http_front import HttpFront, encoded
from actors.fabric.links import links
from actors.fabric.section import FabricSection
from actors.messages.fabric import FindSwitch, SwitchAddress, SwitchReply, SwitchRequest
from runtime.actor import Actor, handler
from runtime.config import ActorConfig
from runtime.kernel import Kernel


class EmulatedSwitch(Actor):
    """Comes back empty after a restart, like mirrors. Only who knows the password of this incarnation may use it."""

    role = "optical_switch"
    drain_order = 95

    class Config(ActorConfig):
        fabric: FabricSection = FabricSection()

    config: Config

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        section = config.fabric
        self._login = Login("rubato", secrets.token_urlsafe(24))
        self.device = OcsDevice(section.ports, section.reconfiguration_s)
        self._dialect = Dialect(self.device, self._login)
        self._front: HttpFront | None = None

    async def on_start(self) -> None:
        if self.config.fabric.listen:
            self._front = HttpFront(self._dialect, self.config.fabric.listen)
            self.spawn(self._front.serve(), name=f"{self.name}.http")

        if self.config.fabric.testbed:
            self.spawn(self._light_links(), name=f"{self.name}.links")

    async def on_stop(self) -> None:
        if self._front is not None:
            self._front.stop()

    @handler
    async def find_switch(self, request: FindSwitch) -> SwitchAddress:
        return SwitchAddress(self._front.url if self._front else "", *self._login)

    @handler
    async def switch_request(self, request: SwitchRequest) -> SwitchReply:
        """Answered at once, also while mirrors move."""
        answer = self._dialect.answer(request.method, request.path, request.authorization, request.body)
        status = self.device.status().values()
        self.metrics.gauge("switch/lit", sum(each == "tuned" for each in status))
        self.metrics.gauge("switch/changes", self.device.num_changes)
        return SwitchReply(answer.status, encoded(answer))

    async def _light_links(self) -> None:
        """Follow the light, until cancelled. Raises LinksError, in a group, where the test-bed is gone."""
        async with links(self.config.fabric) as rates:
            while True:
                self.device.changed.clear()
                await rates.follow(self.device.lit())
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self.device.next_light_at()):
                        await self.device.changed.wait()

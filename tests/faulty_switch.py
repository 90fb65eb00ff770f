"""An emulated optical switch in memory that lies, stalls, does half of it, answers too late, or comes back empty, as told."""

from math import inf

import httpx

from rubato.actors.fabric.driver import Login, SwitchCapabilities
from rubato.actors.fabric.emulated import Dialect, OcsDevice, encoded
from rubato.actors.fabric.restconf import Restconf, SonicDriver

LOGIN = Login("rubato", "secret")


class FaultySwitch(OcsDevice):
    """Does as it is told, except for the faults that a test sets."""

    def __init__(self, num_ports=8, delay_s=0.010):
        super().__init__(num_ports, delay_s)
        self.lies = 0
        self.stalled = False
        self.halves = 0
        self.breaks = 0
        self.requests = 0

    def update(self, delete, add):
        self.requests += 1
        if self.lies:
            self.lies -= 1
            return len(delete), len(add)
        if self.halves:
            self.halves -= 1
            return super().update(delete, add[: len(add) // 2])
        counts = super().update(delete, add)
        if self.stalled:
            self._tuned_at.update(dict.fromkeys(add, inf))
        return counts

    def empty(self):
        self._tuned_at.clear()

    def answer(self, request):
        if self.breaks and request.method == "POST":
            self.breaks -= 1
            raise httpx.ReadTimeout("gone")
        authorization = request.headers["authorization"].encode()
        found = Dialect(self, LOGIN).answer(request.method, request.url.path, authorization, request.content)
        return httpx.Response(found.status, content=encoded(found))

    def driver(self):
        client = Restconf("http://switch", LOGIN, timeout_s=1, transport=httpx.MockTransport(self.answer))
        return SonicDriver(client, SwitchCapabilities(self.num_ports, self.delay_s))

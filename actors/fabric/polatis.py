"""Driver for Polatis optical switches, over their RESTCONF API (port 8008).

The whole list of pairs is put at once: single pairs that are posted have been reported to vanish, being only a candidate. The list is the
switch's intent; it has no word for mirrors that move, so a pair that it lists counts as tuned.
"""

from typing import Any

from actors.fabric.driver import SwitchCapabilities, SwitchState, check
from actors.fabric.errors import BadAnswer, PartlyApplied
from actors.fabric.restconf import Restconf
from planning.circuits import Cross

PAIRS = "/api/data/optical-switch:cross-connects"


class PolatisDriver:
    """Inputs are the switch's ports 1 to N, outputs N+1 to 2N. What it lists is read again after every put, since it may keep less."""

    def __init__(self, client: Restconf, capabilities: SwitchCapabilities) -> None:
        self.capabilities = capabilities
        self._client = client

    async def read(self) -> SwitchState:
        body = await self._client.get(PAIRS)
        return SwitchState(dict.fromkeys(pairs(body, self.capabilities.num_ports), "tuned"))

    async def apply(self, delete: tuple[Cross, ...], add: tuple[Cross, ...]) -> None:
        held = (await self.read()).circuits
        wanted = (set(held) - set(delete)) | set(add)
        check(wanted, self.capabilities.num_ports)
        num_ports = self.capabilities.num_ports
        listed = [{"ingress": c.ingress + 1, "egress": c.egress + 1 + num_ports} for c in sorted(wanted)]
        await self._client.send("PUT", PAIRS, {"optical-switch:cross-connects": {"pair": listed}})
        kept = set((await self.read()).circuits)
        if kept != wanted:
            raise PartlyApplied(
                f"of {len(wanted)} pairs the switch lists {len(kept & wanted)}, and {len(kept - wanted)} others"
            )

    async def close(self) -> None:
        await self._client.close()


def pairs(body: Any, num_ports: int) -> list[Cross]:
    """The circuits in an answer. Raises BadAnswer."""
    if not body:
        return []
    try:
        listed = body["optical-switch:cross-connects"].get("pair", [])
        return [Cross(int(each["ingress"]) - 1, int(each["egress"]) - 1 - num_ports) for each in listed]
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise BadAnswer(f"the cross-connects were answered as {str(body)[:200]}") from error

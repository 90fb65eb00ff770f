"""Driver for switches of Polatis over RESTCONF: `fabric.driver=polatis`."""

from typing import Any

from rubato.actors.fabric.connect import restconf
from rubato.actors.fabric.driver import BadAnswer, OcsDriver, PartlyApplied, SwitchCapabilities, SwitchState, check
from rubato.actors.fabric.restconf import Restconf
from rubato.actors.fabric.section import FabricSection
from rubato.planning.circuits import Cross


def driver(section: FabricSection) -> OcsDriver:
    """Raises BadCredentials where the password or the certificate can't be read."""
    return PolatisDriver(restconf(section), section.capabilities)


PAIRS = "/api/data/optical-switch:cross-connects"


class PolatisDriver:
    """Inputs are the switch's ports 1 to N, outputs N+1 to 2N. What it lists is read again after every put, since it may keep less."""

    def __init__(self, client: Restconf, capabilities: SwitchCapabilities) -> None:
        self.capabilities, self._client = capabilities, client

    async def close(self) -> None:
        await self._client.close()

    async def read(self) -> SwitchState:
        body = await self._client.send("GET", PAIRS)
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
            raise PartlyApplied(f"of {len(wanted)} pairs the switch lists {len(kept & wanted)}, and {len(kept - wanted)} others")


def pairs(body: Any, num_ports: int) -> list[Cross]:
    """The circuits in an answer. Raises BadAnswer."""
    if not body:
        return []
    try:
        listed = body["optical-switch:cross-connects"].get("pair", [])
        return [Cross(int(each["ingress"]) - 1, int(each["egress"]) - 1 - num_ports) for each in listed]
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise BadAnswer(f"the cross-connects were answered as {str(body)[:200]}") from error

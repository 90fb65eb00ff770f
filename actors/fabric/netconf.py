"""Driver for switches with the optical-switch model of Polatis, over NETCONF."""

from xml.etree import ElementTree as ET

from actors.fabric.driver import SwitchCapabilities, SwitchState, check
from actors.fabric.errors import BadAnswer, FabricError
from actors.fabric.netconf_session import BASE, CANDIDATE, NetconfSession
from planning.circuits import Cross

OCS = "http://www.polatis.com/yang/optical-switch"


class NetconfDriver:
    """A change is one edit, all or nothing. Inputs are the switch's ports 1 to N, outputs N+1 to 2N; a pair that it lists counts as tuned."""

    def __init__(self, session: NetconfSession, capabilities: SwitchCapabilities) -> None:
        self.capabilities = capabilities
        self._session = session

    async def read(self) -> SwitchState:
        reply = await self._session.rpc(
            f'<get-config><source><running/></source><filter type="subtree"><cross-connects xmlns="{OCS}"/></filter></get-config>'
        )
        return SwitchState(dict.fromkeys((self._cross(pair) for pair in reply.iter(f"{{{OCS}}}pair")), "tuned"))

    async def apply(self, delete: tuple[Cross, ...], add: tuple[Cross, ...]) -> None:
        held = (await self.read()).circuits
        check((set(held) - set(delete)) | set(add), self.capabilities.num_ports)
        pairs = [self._pair(cross, "delete") for cross in delete if cross.ingress not in {c.ingress for c in add}]
        pairs += [self._pair(cross, "replace") for cross in add]
        candidate = CANDIDATE in self._session.capabilities
        target = "candidate" if candidate else "running"
        edit = (
            f"<edit-config><target><{target}/></target><error-option>stop-on-error</error-option>"
            f'<config><cross-connects xmlns="{OCS}" xmlns:nc="{BASE}">{"".join(pairs)}</cross-connects></config></edit-config>'
        )
        try:
            await self._session.rpc(edit)
            if candidate:
                await self._session.rpc("<commit/>")
        except FabricError:
            # The candidate goes with the session: what was edited and not committed never happened.
            await self._session.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    def _pair(self, cross: Cross, operation: str) -> str:
        ends = (
            f"<ingress>{cross.ingress + 1}</ingress><egress>{cross.egress + 1 + self.capabilities.num_ports}</egress>"
        )
        return f'<pair nc:operation="{operation}">{ends}</pair>'

    def _cross(self, pair: ET.Element) -> Cross:
        ends = tuple(pair.findtext(f"{{{OCS}}}{name}") or "" for name in ("ingress", "egress"))
        try:
            return Cross(int(ends[0]) - 1, int(ends[1]) - 1 - self.capabilities.num_ports)
        except ValueError as error:
            raise BadAnswer(f"a pair was answered as {ends[0][:40]!r} → {ends[1][:40]!r}") from error

"""The OcsDriver seam: what the controller needs of an optical switch, whatever protocol it speaks."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

from actors.fabric.errors import NoSuchPort, PortConflict
from planning.circuits import Cross

Status = Literal["tuned", "tuning", "failed", "invalid"]
"""A circuit that carries light; one whose mirrors move; one that a dead port keeps dark; one that lost its port to another."""


YANG_JSON = "application/yang-data+json"
"""Media type of RESTCONF (RFC 8040)."""


class Login(NamedTuple):
    """HTTP Basic; empty for a switch that asks for none."""

    user: str = ""
    password: str = ""


class SwitchCapabilities(NamedTuple):
    """What the switch can do."""

    num_ports: int
    reconfiguration_s: float
    """Time that changed circuits are dark."""


class SwitchState(NamedTuple):
    """What the switch says it has."""

    circuits: Mapping[Cross, Status]

    @property
    def lit(self) -> tuple[Cross, ...]:
        """The circuits that carry light, sorted."""
        return tuple(sorted(cross for cross, status in self.circuits.items() if status == "tuned"))


class OcsDriver(Protocol):
    """One switch. Every method raises a FabricError, of which SwitchUnreachable leaves open what took effect."""

    capabilities: SwitchCapabilities

    async def read(self) -> SwitchState:
        """Every circuit that the switch holds, and how each one is."""
        ...

    async def apply(self, delete: tuple[Cross, ...], add: tuple[Cross, ...]) -> None:
        """Delete, then add, in one request. Returns once the switch has taken it, which says nothing of its mirrors: read until tuned."""
        ...

    async def close(self) -> None:
        """Release connections and processes."""
        ...


def check(circuits: Iterable[Cross], num_ports: int) -> None:
    """Raise NoSuchPort or PortConflict for circuits that one switch can't hold together."""
    inputs: dict[int, Cross] = {}
    outputs: dict[int, Cross] = {}
    for cross in sorted(circuits):
        for port, side, used in ((cross.ingress, "input", inputs), (cross.egress, "output", outputs)):
            if not 0 <= port < num_ports:
                raise NoSuchPort(f"the switch has ports 0 to {num_ports - 1}, not {port}")
            other = used.setdefault(port, cross)
            if other is not cross:
                raise PortConflict(f"{side} port {port} is wanted by {text(other)} and {text(cross)}")


def text(cross: Cross) -> str:
    return f"{cross.ingress}→{cross.egress}"

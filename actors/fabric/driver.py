"""The OcsDriver seam: what the controller needs of an optical switch, whatever protocol it speaks, and what can go wrong with it."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

from rubato.planning.circuits import Cross

Status = Literal["tuned", "tuning", "failed", "invalid"]
"""A circuit that carries light; one whose mirrors move; one that a dead port keeps dark; one that lost its port to another."""


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


class FabricError(Exception):
    """Base of every error of the fabric."""


class PortConflict(FabricError):
    """A port is used twice, in a plan or by what the switch already has; the switch changed nothing."""


class NoSuchPort(FabricError):
    """A circuit names a port that the switch does not have; nothing was changed."""


class SwitchRefused(FabricError):
    """The switch answered no, by status or inside a 200; what it holds must be read."""


class BadCredentials(FabricError):
    """The switch does not accept our user and password, or a file of the section that proves us or the switch can't be read; nothing was changed."""


class PartlyApplied(FabricError):
    """The switch acknowledged fewer changes than it was asked for; what it holds must be read."""


class BadAnswer(FabricError):
    """The switch answered something that is not its dialect; what it holds must be read."""


class SwitchUnreachable(FabricError):
    """The switch can't be reached. A change that was under way may or may not have taken effect."""


class SwitchTimedOut(SwitchUnreachable):
    """The switch did not answer in time. A change that was asked for may or may not have taken effect."""


class NotTuned(FabricError):
    """The switch acknowledged the circuits, but they did not carry light in time."""


class NotTheWriter(FabricError):
    """Another controller holds the lease of this switch; nothing was changed."""

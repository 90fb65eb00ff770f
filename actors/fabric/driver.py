"""The OcsDriver seam: what the controller needs of an optical switch, whatever protocol it speaks."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from actors.fabric.errors import SwitchRefused, SwitchUnreachable
from actors.messages.fabric import Circuit, CircuitState, GetCircuits, SetCircuits
from bus.errors import AskFailed, Failed

if TYPE_CHECKING:
    from runtime.ref import Ref


class Capabilities(NamedTuple):
    """What the switch can do."""

    num_ports: int
    reconfiguration_s: float
    """Time that changed circuits are dark."""


class OcsDriver(Protocol):
    """One switch. Both methods raise SwitchUnreachable without an answer, and then may or may not have taken effect."""

    capabilities: Capabilities

    async def read(self) -> CircuitState:
        """The circuits that carry light now."""
        ...

    async def apply(self, circuits: tuple[Circuit, ...]) -> CircuitState:
        """Make the switch hold exactly `circuits`; returns once they are tuned. Those it holds already stay lit.

        Raises SwitchRefused when the switch says no, or holds something else afterwards.
        """
        ...


class BusDriver:
    """Speaks our own messages, to a switch that is an actor."""

    def __init__(self, switch: "Ref", capabilities: Capabilities, *, timeout_s: float) -> None:
        self.capabilities = capabilities
        self._switch = switch
        self._timeout_s = timeout_s

    async def read(self) -> CircuitState:
        return await self._ask(GetCircuits())

    async def apply(self, circuits: tuple[Circuit, ...]) -> CircuitState:
        state = await self._ask(SetCircuits(circuits))
        if set(state.circuits) != set(circuits):
            missing = len(set(circuits) - set(state.circuits))
            raise SwitchRefused(
                f"{self._switch.name} holds {len(state.circuits)} circuits, {missing} of the wanted are missing"
            )
        return state

    async def _ask(self, request: GetCircuits | SetCircuits) -> CircuitState:
        timeout = self._timeout_s + self.capabilities.reconfiguration_s
        try:
            return await self._switch.ask(request, timeout=timeout)
        except Failed as error:
            raise SwitchRefused(str(error)) from error
        except AskFailed as error:
            raise SwitchUnreachable(f"{self._switch.name}: {error}") from error

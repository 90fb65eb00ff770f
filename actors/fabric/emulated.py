"""EmulatedSwitch: an optical circuit switch as a process of its own; circuits that change are dark while its mirrors move."""

import asyncio

from actors.fabric.errors import NoSuchPort, PortConflict
from actors.fabric.section import FabricSection
from actors.messages.fabric import Circuit, CircuitState, GetCircuits, SetCircuits
from runtime.actor import Actor, ActorConfig, Context, handler


class EmulatedSwitch(Actor):
    """Holds cross-connects, each from one input port to one output port. Comes back empty after a restart, like its mirrors."""

    role = "optical_switch"
    drain_order = 95

    class Config(ActorConfig):
        fabric: FabricSection = FabricSection()

    config: Config

    def __init__(self, config: Config, context: Context) -> None:
        super().__init__(config, context)
        self._num_ports = config.fabric.ports
        self._delay_s = config.fabric.reconfiguration_s
        self._lit: frozenset[Circuit] = frozenset()
        self._reconfigurations = 0
        self._mirrors = asyncio.Lock()

    @handler(concurrency=16)
    async def set_circuits(self, request: SetCircuits) -> CircuitState:
        """One change after another. Raises PortConflict or NoSuchPort, and changes nothing."""
        wanted = frozenset(request.circuits)
        self._check(wanted)
        # A change that began is carried out, whatever becomes of its asker: mirrors can't be called back.
        await asyncio.shield(self.spawn(self._tune(wanted), name=f"{self.name}.tune"))
        return self._state()

    @handler
    async def get_circuits(self, request: GetCircuits) -> CircuitState:
        """Answered at once, also while mirrors move."""
        return self._state()

    async def _tune(self, wanted: frozenset[Circuit]) -> None:
        async with self._mirrors:
            if wanted == self._lit:
                return
            self._lit &= wanted
            self.metrics.gauge("switch/lit", len(self._lit))
            await asyncio.sleep(self._delay_s)
            self._lit = wanted
            self._reconfigurations += 1
            self.metrics.gauge("switch/lit", len(wanted))
            self.metrics.count("switch/reconfigurations")

    def _check(self, wanted: frozenset[Circuit]) -> None:
        inputs: dict[int, Circuit] = {}
        outputs: dict[int, Circuit] = {}
        for circuit in sorted(wanted, key=_ports):
            for port, side, used in ((circuit.ingress, "input", inputs), (circuit.egress, "output", outputs)):
                if not 0 <= port < self._num_ports:
                    raise NoSuchPort(f"{self.name} has ports 0 to {self._num_ports - 1}, not {port}")
                other = used.setdefault(port, circuit)
                if other is not circuit:
                    raise PortConflict(
                        f"{side} port {port} of {self.name} is wanted by {_text(other)} and {_text(circuit)}"
                    )

    def _state(self) -> CircuitState:
        return CircuitState(tuple(sorted(self._lit, key=_ports)), self._reconfigurations, self._delay_s)


def _ports(circuit: Circuit) -> tuple[int, int]:
    return circuit.ingress, circuit.egress


def _text(circuit: Circuit) -> str:
    return f"{circuit.ingress}→{circuit.egress}"

"""Fabric: phases of the job, circuits, and the optical switch that makes them."""

from typing import ClassVar, Literal

import msgspec

from bus.message import Ack, Message, Request

Phase = Literal["rollout", "train_step", "weight_sync"]


class PhaseIntent(Message, frozen=True):
    """The job is about to enter `phase` (or is in it, when `in_s` is 0); `traffic` is bytes between named endpoints."""

    phase: Phase
    epoch: int
    in_s: float
    traffic: tuple[tuple[str, str, int], ...] = ()


class Circuit(msgspec.Struct, frozen=True, array_like=True):
    """A cross-connect from input port to output port."""

    ingress: int
    egress: int


class CircuitState(Message, frozen=True):
    """What the switch has: tuned circuits, and how many reconfigurations it made."""

    circuits: tuple[Circuit, ...]
    reconfigurations: int
    delay_s: float


class SetCircuits(Request[CircuitState], frozen=True):
    """Replace the switch's circuits; answered when all are tuned. The same set is a no-op."""

    idempotent: ClassVar[bool] = True
    circuits: tuple[Circuit, ...]


class GetCircuits(Request[CircuitState], frozen=True):
    """Read the switch."""

    idempotent: ClassVar[bool] = True


class FabricReport(Message, frozen=True):
    """Totals since start. Hidden delay passed before its phase began; exposed delay is what the phase waited for."""

    phase: str
    reconfigurations: int
    hidden_s: float
    exposed_s: float
    circuits: tuple[Circuit, ...]


class InspectFabric(Request[FabricReport], frozen=True):
    """Read the controller's totals."""

    idempotent: ClassVar[bool] = True


__all__ = [
    "Ack",
    "Circuit",
    "CircuitState",
    "FabricReport",
    "GetCircuits",
    "InspectFabric",
    "Phase",
    "PhaseIntent",
    "SetCircuits",
]

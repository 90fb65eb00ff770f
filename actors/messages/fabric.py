"""Fabric: windows of a phase, circuits, and the optical switch that is an actor."""

from typing import ClassVar

import msgspec

from rubato.actors.messages.phases import Phase
from rubato.bus.message import Message, Request


class PhaseWindow(msgspec.Struct, frozen=True):
    """A part of a phase, between two moments at which circuits may change."""

    name: str
    """Those of one name may have circuits of their own, by all that is sent in them."""
    lasts_s: float
    """Without what its traffic adds."""
    traffic: tuple[tuple[str, str, int], ...] = ()


class PhaseWindows(Message, frozen=True):
    """What `phase` is made of from its next begin on, in order: context, experts and gradients of a training step. Without windows it is one."""

    phase: Phase
    windows: tuple[PhaseWindow, ...]


class Circuit(msgspec.Struct, frozen=True, array_like=True):
    """A cross-connect from input port to output port."""

    ingress: int
    egress: int


class SwitchAddress(Message, frozen=True):
    """Where an emulated switch answers HTTP, and for whom. Without `url` it answers `SwitchRequest` alone."""

    url: str
    user: str
    password: str


class FindSwitch(Request[SwitchAddress], frozen=True):
    """Ask an emulated switch where it listens."""

    idempotent: ClassVar[bool] = True


class SwitchReply(Message, frozen=True):
    """An HTTP answer."""

    status: int
    body: bytes


class SwitchRequest(Request[SwitchReply], frozen=True):
    """An HTTP request to an emulated switch, carried by the bus where there are no sockets: on virtual time."""

    method: str
    path: str
    authorization: bytes
    body: bytes


class CircuitsPromised(Message, frozen=True):
    """They will be lit in `ready_in_s`, by what changes took lately; 0 where those in place carry the traffic already."""

    number: int
    ready_in_s: float
    why: str


class NoCircuits(Message, frozen=True):
    """The electrical path carries it, and whatever circuits there are stay."""

    why: str


class CircuitsReady(Message, frozen=True):
    """They are lit, until the next phase begins or they are released."""

    number: int


class AskCircuits(Request[CircuitsPromised | NoCircuits], frozen=True):
    """Before a switch of parallelism or a rebalancing: may the `traffic` (bytes between named actors) of it have circuits of its own, lit within
    `within_s`? A promise is being kept when it is given. The asks of all actors are numbered: an older one than the last has no answer."""

    number: int
    traffic: tuple[tuple[str, str, int], ...]
    within_s: float


class AwaitCircuits(Request[CircuitsReady | NoCircuits], frozen=True):
    """Answered once the circuits of a promise are lit, or it is clear that they will not be."""

    number: int


class ReleaseCircuits(Message, frozen=True):
    """What they were asked for is over, or off: those of the running phase come back."""

    number: int


class FabricReport(Message, frozen=True):
    """Totals since start. Hidden delay passed before its phase began; exposed delay is what the phase waited for."""

    phase: str
    change: int
    """Of the circuits: one more with every change that was committed, over all incarnations of the controller."""
    stage: str
    """Of the change under way; `idle` between changes."""
    electrical: bool
    """No circuit can be relied on: the electrical path carries everything."""
    reconfigurations: int
    hidden_s: float
    exposed_s: float
    circuits: tuple[Circuit, ...]


class InspectFabric(Request[FabricReport], frozen=True):
    """Read the controller's totals."""

    idempotent: ClassVar[bool] = True

"""Hosts that joined a cluster: what the launcher of a job asks of the one on which a node of the job's lies."""

from typing import ClassVar

from rubato.bus.message import Ack, Message, Request


class HostStarted(Message, frozen=True):
    """The command runs."""

    process: str
    """Id of its process there."""


class HostNotStarted(Message, frozen=True):
    """Nothing runs; `why` is one sentence."""

    why: str


class StartHost(Request[HostStarted | HostNotStarted], frozen=True):
    """Run the command that joins this host to a job: `python -m module arguments…`. Asked again with the same `id` it is the same command.

    What an earlier `life` of the run started here ends before. So does this one, once it was not asked after for `lapse_s`.
    """

    idempotent: ClassVar[bool] = True
    id: str
    run: str
    life: str
    module: str
    arguments: tuple[str, ...]
    token: str
    """The first line of its stdin: a secret, for no log."""
    lapse_s: float


class HostStays(Message, frozen=True):
    """It still runs."""


class HostEnded(Message, frozen=True):
    """It is over. `code` is None where it is not known here."""

    code: int | None
    sentence: str


class AwaitHost(Request[HostStays | HostEnded], frozen=True):
    """Answered when the command has ended, or after some seconds."""

    idempotent: ClassVar[bool] = True
    id: str


class SignalHost(Request[Ack], frozen=True):
    """Hand a signal on to the command; nothing happens where it has ended."""

    idempotent: ClassVar[bool] = True
    id: str
    number: int

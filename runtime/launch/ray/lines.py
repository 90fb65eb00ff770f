"""What the launcher's process and its helper say to each other: lines of JSON over the helper's stdin and stdout."""

import msgspec

from rubato.runtime.launch.placer import HostSpec

LONGEST_LINE = 1 << 20
"""Bytes: a host's last output is far shorter."""

# -- to the helper -----------------------------------------------------------------------------------------------


class Connect(msgspec.Struct, tag=True, frozen=True):
    """First line: reach the cluster at `address`, and end what is left there in `namespace`."""

    address: str
    namespace: str
    lease_s: float
    """A host ends by itself so long after it last heard of the helper."""
    host: str
    """The run's own address, `bus.host`."""


class Place(msgspec.Struct, tag=True, frozen=True):
    """Start `python -m module arguments…` on one more host, and tell how it goes with `number`. Its output shows what `token` is nowhere."""

    number: int
    spec: HostSpec
    module: str
    arguments: tuple[str, ...]
    token: str

    @property
    def name(self) -> str:
        """That of its actor, of its placement group and of its log."""
        return f"{self.spec.name}.{self.number}"


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Hand `signal` on to the command of the host `number`."""

    number: int
    signal: int


class Release(msgspec.Struct, tag=True, frozen=True):
    """End what there is of `number`, a host or the wish for one; then say Released."""

    number: int


Order = Connect | Place | Signal | Release

# -- from the helper ---------------------------------------------------------------------------------------------


class Connected(msgspec.Struct, tag=True, frozen=True):
    """The cluster answers, and has nothing left of an earlier launcher."""


class Unreachable(msgspec.Struct, tag=True, frozen=True):
    """There is no cluster; the helper ends."""

    why: str


class Placed(msgspec.Struct, tag=True, frozen=True):
    """The command runs."""

    number: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """There can be no such host."""

    number: int
    why: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The command ended with `code`, or with its node where there is none."""

    number: int
    code: int | None
    sentence: str
    output: str = ""
    """The end of what it wrote."""


class Released(msgspec.Struct, tag=True, frozen=True):
    """Nothing is left of `number`."""

    number: int


Report = Connected | Unreachable | Placed | Refused | Ended | Released

_encoder = msgspec.json.Encoder()


def line_of(message: Order | Report) -> bytes:
    return _encoder.encode(message) + b"\n"

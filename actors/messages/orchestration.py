"""What the orchestrator asks of proxies: who runs where, how far it is, and what ended since it asked last."""

from typing import ClassVar

import msgspec

from actors.messages.generation import Modelled
from bus.message import Message, Request


class RequestSeen(msgspec.Struct, frozen=True, array_like=True):
    """A request that is not answered yet; lengths in tokens."""

    request_id: str
    engine: str
    """Empty while it waits for one."""
    task: str
    prompt: int
    """The same for requests of the same prompt."""
    shown: int
    """Of its prompt."""
    sampled: int
    """As far as its engine has told."""
    limit: int
    """The most it samples."""
    version: int
    """Weights that it asked for at least."""
    moves: bool = False
    """It is under way to `engine`."""


class RequestEnded(msgspec.Struct, frozen=True, array_like=True):
    """One that was answered by all of its tokens."""

    task: str
    prompt: int
    sampled: int
    version: int


class EngineSeen(msgspec.Struct, frozen=True, array_like=True):
    """An engine as the proxy knows it."""

    name: str
    num_slots: int
    takes: bool
    """New requests: it is neither suspended nor held for an evaluation."""
    asleep: bool = False
    degree: int = 1
    modelled: Modelled | None = None
    serves: str = "both"
    """Which stage of requests: both, prefill or decode."""


class Surveyed(Message, frozen=True):
    """Engines in order of their names, requests in that of their arrival."""

    requests: tuple[RequestSeen, ...]
    engines: tuple[EngineSeen, ...]
    ended: tuple[RequestEnded, ...]
    """Since `Survey.after`; the oldest may be missing."""
    num_ended: int
    """Of all that ended: the next survey's `after`."""


class OutOfDate(Message, frozen=True):
    """A later orchestrator is at work."""

    epoch: int


class Survey(Request[Surveyed | OutOfDate], frozen=True):
    """To a proxy. From now on it takes no order of an earlier `epoch`, which is the asker's incarnation."""

    idempotent: ClassVar[bool] = True
    epoch: int
    after: int = 0

"""Requests that move from one engine to another: what planners ask of the proxy, the proxy of the source, and the target of the source.

The source parks the request (prepare). Then it decides once what becomes of it: the target takes it (commit), or it is kept and goes on
where it was (abort, or the target did not come in time). The moves of a request are numbered, so that what belongs to an earlier one has no
effect.
"""

from typing import ClassVar

from rubato.actors.messages.generation import Tokens
from rubato.bus.message import Ack, Buffer, Message, Request


class Moved(Message, frozen=True):
    """It runs on `engine` now."""

    engine: str


class NotMoved(Message, frozen=True):
    """It is where it was, or over; `why` is one sentence."""

    why: str


class Move(Request[Moved | NotMoved], frozen=True):
    """To the proxy: let `target` go on with this request. Who asked for it notices nothing, whatever comes of the move."""

    idempotent: ClassVar[bool] = True
    request_id: str
    target: str
    term: int = 0
    """Incarnation of the orchestrator that sends it: refused once a later one asked the proxy. 0: the sender has none; never refused."""


class MovePrepared(Message, frozen=True):
    """The request is parked: not computed, and nothing of it is lost."""

    tokens: Tokens
    """All that were sampled so far."""
    incarnation: int
    """Of the source."""
    why: str
    """Whether its cache travels, and why."""


class PrepareMove(Request[MovePrepared | NotMoved], frozen=True):
    """Proxy → source: park this request for `target`. A number that is not above the last one is refused."""

    request_id: str
    number: int
    target: str
    version: int
    """Weights of the target, as far as the proxy knows."""


class AbortMove(Request[Ack], frozen=True):
    """Proxy → source: go on with it, unless the target took it already. Other numbers are ignored."""

    idempotent: ClassVar[bool] = True
    request_id: str
    number: int


class AwaitCaches(Request[Ack], frozen=True):
    """Orchestrator → source, then target: answered once no cache is kept there for another engine, and none is on its way there."""

    idempotent: ClassVar[bool] = True


class TakeMove(Request[Ack | NotMoved], frozen=True):
    """Target → source: I go on with it. Once it was answered by Ack the source does not, whatever happens; it may be repeated."""

    idempotent: ClassVar[bool] = True
    request_id: str
    number: int
    incarnation: int
    """Of the source that parked it: another one has lost it with everything else."""


class CachePart(Message, frozen=True):
    """Bytes of a KV cache, as rubato.actors.engines.engine.Cache has it, from the asked offset on; none where it is gone."""

    data: Buffer
    size_bytes: int = 0
    """Of the whole cache."""
    version: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""


class FetchCache(Request[CachePart], frozen=True):
    """Engine → engine: give me the next part of this request's KV cache. With the last one it is forgotten."""

    idempotent: ClassVar[bool] = False
    request_id: str
    number: int = 0
    """Of the move that it is kept for; 0 where the request was handed over."""
    offset: int = 0

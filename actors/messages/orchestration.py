"""What the orchestrator asks of proxies and of managers of environments: who runs where, how far it is, and what ended since it asked last."""

from typing import ClassVar

import msgspec

from rubato.bus.message import Message, Request
from rubato.planning.engine_info import EngineInfo


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
    session: str = ""
    """The trajectory that it is a turn of."""


class TrajectorySeen(msgspec.Struct, frozen=True, array_like=True):
    """A rollout that plays: the turns behind it, and the environment that it waits for."""

    session: str
    task: str
    prompt: int
    """The same for rollouts of the same prompt."""
    sampled: int
    """By turns that are over."""
    env_s: float
    """In environments until now."""
    limit: int
    """The most that all of its turns may sample."""
    version: int
    """Weights that it began with at least."""
    away: bool = False
    """It is in its environment: no engine has a request of it."""


class RequestEnded(msgspec.Struct, frozen=True, array_like=True):
    """A request that was answered by all of its tokens; or a rollout, all turns of it."""

    task: str
    prompt: int
    sampled: int
    version: int
    env_s: float = 0.0
    """Of a rollout, what its environment took."""
    generate_s: float = 0.0
    """Of a rollout, what its turns waited for tokens."""
    whole: bool = True
    """False for a rollout that was given up so far."""


class Surveyed(Message, frozen=True):
    """Engines in order of their names, requests in that of their arrival."""

    requests: tuple[RequestSeen, ...]
    engines: tuple[EngineInfo, ...]
    ended: tuple[RequestEnded, ...]
    """Since `Survey.after`; the oldest may be missing."""
    num_ended: int
    """Of all that ended: the next survey's `after`."""
    trajectories: tuple[TrajectorySeen, ...] = ()
    """Of a manager of environments, which has neither requests nor engines."""


class OutOfDate(Message, frozen=True):
    """A later orchestrator is at work."""

    term: int


class Survey(Request[Surveyed | OutOfDate], frozen=True):
    """To a proxy, which takes no order of an earlier `term` (the asker's incarnation) from now on; or to a manager of environments."""

    idempotent: ClassVar[bool] = True
    term: int
    after: int = 0

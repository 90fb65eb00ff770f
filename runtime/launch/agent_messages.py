"""Messages to node agents, of the command line and of each other: who is to start, to restart, to leave."""

from typing import ClassVar

from rubato.bus.message import Ack, Message, Request


class Added(Message, frozen=True):
    """Names of the actors that were started."""

    names: tuple[str, ...]


class NotAdded(Message, frozen=True):
    """Why none was started, as one sentence."""

    why: str


MOST_ADDED = 64
"""Actors that one request may add."""


class HostLeaves(Message, frozen=True):
    """To the first host's node agent: the host of `node` drains its actors and leaves the run."""

    node: str


class AddActors(Request[Added | NotAdded], frozen=True):
    """To a node agent: start `num` more actors of `role` on its host. With `node`, to the first host's: name them for that host's agent.

    An empty `pool` stands for the role's only one.
    """

    role: str
    num: int
    node: str = ""
    pool: str = ""


class Drained(Message, frozen=True):
    """These have ended, `drained_s` after they were asked to. `blocked_s` is the longest time in which the job ended no step, from
    the asking on; where that was to be measured, until a step after the drain."""

    names: tuple[str, ...]
    drained_s: float = 0.0
    blocked_s: float = 0.0


class DrainActors(Request[Drained | NotAdded], frozen=True):
    """To the first host's node agent: drain these actors, or the hosts of that name, and do not restart them; answered when they have ended.

    All of `pool` are drained too, where one is named. With `measure` the answer waits for the job's next step too, within `NEXT_STEP_S`.
    """

    idempotent: ClassVar[bool] = True
    names: tuple[str, ...]
    pool: str = ""
    measure: bool = False


NEXT_STEP_S = 10.0
"""Where no step ends for so long after a drain, the job's steps are long, or it is blocked for longer than a user waits."""


class RestartActors(Request[Added | NotAdded], frozen=True):
    """To the first host's node agent: drain these actors and start them again; answered when their old processes have exited."""

    names: tuple[str, ...]
    held: bool = False
    """Those of them alone that something holds still (SIGSTOP)."""


class StopJob(Request[Ack], frozen=True):
    """To the first host's node agent: drain and save the job (or stop it at once, when `now`). To another's: its host leaves the job."""

    idempotent: ClassVar[bool] = True
    now: bool = False
    reason: str = "stopped by request"

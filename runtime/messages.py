"""Messages of the runtime itself: between actors' kernels, the node agent and the command line."""

from typing import ClassVar

from bus.message import Ack, Message, Request


class Drain(Request[Ack], frozen=True):
    """To any kernel: take no new work, finish or hand back what runs, stop. Answered once the drain began."""

    idempotent: ClassVar[bool] = True


class TappedFrame(Message, frozen=True):
    """What one actor and `peer` said to each other: a frame as it travelled, without the buffers beside it."""

    at_s: float
    """Time of day at the actor, in seconds."""
    sent: bool
    """The actor sent it; else it arrived."""
    peer: str
    data: bytes


class Tapped(Message, frozen=True):
    """The frames since the last ask. `lost`: how many there was no room for."""

    frames: tuple[TappedFrame, ...]
    lost: int


class NotTapped(Message, frozen=True):
    """Why it is not, as one sentence."""

    why: str


class Tap(Request[Tapped | NotTapped], frozen=True):
    """To any kernel: show me your frames. Answered after `wait_s` with what was seen; the next ask gets what follows.

    It ends by itself once nobody asks for some seconds. The frames of the asker's own link are left out.
    """

    wait_s: float


class Progress(Message, frozen=True):
    """To the node agent: one more step of the job is done; `row` is its line of metrics.jsonl."""

    step: int
    steps: int
    row: dict[str, float]


class Notice(Message, frozen=True):
    """To the node agent: one sentence that the user should see now."""

    source: str
    text: str
    good: bool = False
    """Whether it tells of something that went well."""


class Saved(Message, frozen=True):
    """To the node agent, from an actor that leaves: what it did is on disk, which took so long."""

    source: str
    seconds: float


class RoomWanted(Message, frozen=True):
    """To the first host's node agent: `source` waits for room on the disk of `path`, which has `free_bytes`; without a path: no more."""

    source: str
    path: str = ""
    free_bytes: int = 0


class Finish(Request[Ack], frozen=True):
    """To the node agent: the job is over, for better or worse. Asked until it is acknowledged, or the job would never end."""

    idempotent: ClassVar[bool] = True

    source: str
    reason: str
    failed: bool


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
"""Where no step ends for so long after a drain, the job's steps are long, or it is blocked for longer than anybody waits."""


class RestartActors(Request[Added | NotAdded], frozen=True):
    """To the first host's node agent: drain these actors and start them again; answered when their old processes have exited."""

    names: tuple[str, ...]


class StopJob(Request[Ack], frozen=True):
    """To the first host's node agent: drain and save the job (or stop it at once, when `now`). To another's: its host leaves the job."""

    idempotent: ClassVar[bool] = True
    now: bool = False
    reason: str = "stopped by request"

"""Messages of the runtime itself: between actors' kernels, the node agent and the command line."""

from typing import ClassVar

from rubato.bus.message import Ack, Buffer, Message, Request


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

    It ends by itself after some seconds without an ask. The frames of the asker's own link are left out.
    """

    wait_s: float


class BytesCounted(Message, frozen=True):
    """Bytes by actor since the process began: what it was sent in asks and tells, and what came of it in replies."""

    incarnation: int
    sent: dict[str, int]
    came: dict[str, int]


class CountBytes(Request[BytesCounted], frozen=True):
    """To any kernel: how much have you and others said to each other? Of two actors, who asks counts both ways, so each byte is counted once."""


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


class NotHere(Message, frozen=True):
    """Why this host can't give it; ask another."""

    why: str


class BlobPiece(Message, frozen=True):
    """One piece of the content, as long as runtime/blobs/blob.py cuts it; the last may be shorter."""

    data: Buffer


class GetPiece(Request[BlobPiece | NotHere], frozen=True):
    """Piece `index`, counted from 0. A host that is still pulling it answers once it has it."""

    idempotent: ClassVar[bool] = True
    name: str
    version: int
    term: int
    index: int


class BlobPieces(Message, frozen=True):
    """The digests of all pieces, 32 bytes each, in order: their own digest is the blob's."""

    digests: Buffer


class GetPieces(Request[BlobPieces | NotHere], frozen=True):
    """What each piece must hash to."""

    idempotent: ClassVar[bool] = True
    name: str
    version: int
    term: int


class Newest(Message, frozen=True):
    """The newest version that a host has; digest and size of what changed since the one before, where that is there too."""

    version: int
    term: int
    digest: str
    size_bytes: int
    delta: str = ""
    delta_bytes: int = 0


class FindNewest(Request[Newest | NotHere], frozen=True):
    """Which version of this name is the newest there?"""

    idempotent: ClassVar[bool] = True
    name: str


class Pulled(Message, frozen=True):
    """It lies on this host now. `sources`: who gave pieces of it; empty where it was here already."""

    sources: tuple[str, ...]


class NotPulled(Message, frozen=True):
    """No source had all of it; what went wrong with each."""

    why: str


class PullBlob(Request[Pulled | NotPulled], frozen=True):
    """Bring this blob to your host, from one of the node agents in `sources`, best first. Asked often, it is pulled once.

    The first `ways` of them give one part of the pieces each, at the same time, as long as they do. Where `delta` is given, and your host
    has the version before, what changed is pulled instead, and the blob made of both.
    """

    idempotent: ClassVar[bool] = True
    name: str
    version: int
    term: int
    digest: str
    size_bytes: int
    sources: tuple[str, ...]
    ways: int = 1
    delta: str = ""
    delta_bytes: int = 0

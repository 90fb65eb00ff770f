"""Messages of every actor's kernel: what it is asked, and what it tells the node agent."""

from typing import ClassVar

from rubato.bus.message import Ack, Message, Request


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

"""Keeps a share of the trajectories on disk, so that somebody can read what the model wrote: RUN/trajectories, one file for each.

A file holds a Trajectory as MessagePack, without log-probabilities; what becomes of the sample stands in samples.jsonl. Of training every
n-th group is kept whole, of an evaluation its first rollouts. Where the files become too many every second group goes, and n doubles: what
is left is spread over the whole run.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.messages.samples import Ticket, Trajectory

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

FOLDER = "trajectories"
"""In the run folder."""

EVAL_ROLLOUTS = 16
"""Of each evaluation: the same tasks each time, so that versions compare."""

EVAL_SHARE = 4
"""One file in so many may be an evaluation's."""


WAITING = 1024
"""Trajectories that wait to be written; while the disk is slower than that more are not kept."""


class KeptTrajectories:
    """At most about `most` files in the run folder `run`, those of earlier launches included; 0 adds none.

    `offload` runs a blocking function away from the event loop. Nothing here raises for a disk that refuses: it is logged, once.
    """

    def __init__(
        self, run: Path, most: int, group_size: int, offload: Callable[..., Awaitable[Any]], log: "FilteringBoundLogger"
    ) -> None:
        self._folder = run / FOLDER
        self._offload, self._log = offload, log
        self._waiting: list[Trajectory] = []
        self._arrived = asyncio.Event()
        self._refused = False
        self._keeps = most > 0
        self._most_groups = max(1, (most - most // EVAL_SHARE) // group_size) if most else 0
        self._most_rounds = most // EVAL_SHARE // EVAL_ROLLOUTS
        self._stride = 1
        self._groups: set[str] = set()
        self._rounds: dict[str, None] = {}

    def offer(self, trajectory: Trajectory) -> None:
        """Keep it soon, if it is one to be kept."""
        if self._wants(trajectory.ticket) and len(self._waiting) < WAITING:
            self._waiting.append(trajectory)
            self._arrived.set()

    async def follow(self) -> None:
        """Write what is offered, until cancelled."""
        if self._keeps:
            await self._guarded(self._open)
        while True:
            await self._arrived.wait()
            await self.catch_up()

    async def catch_up(self) -> None:
        """Write what was offered so far."""
        self._arrived.clear()
        waiting, self._waiting = self._waiting, []
        await self._guarded(lambda: self._write(waiting))

    async def _guarded(self, work: Callable[[], None]) -> None:
        try:
            await self._offload(work)
        except OSError as error:
            if not self._refused:
                self._log.warning("trajectories_not_kept", path=str(self._folder), error=str(error))
            self._refused = True

    def _wants(self, ticket: Ticket) -> bool:
        if ticket.purpose == "eval":
            return self._most_rounds > 0 and int(ticket.trajectory_id.rpartition(".")[2]) < EVAL_ROLLOUTS
        return self._most_groups > 0 and number_of(ticket.group_id) % self._stride == 0

    def _open(self) -> None:
        names = {path.name.rsplit(".", 2)[0] for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        for name in sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
            self._note(name)
        self._thin()

    def _write(self, trajectories: Iterable[Trajectory]) -> None:
        """What a kill leaves half written is passed over by readers."""
        for trajectory in trajectories:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            ticket = trajectory.ticket
            lean = tuple(msgspec.structs.replace(segment, logprobs=b"") for segment in trajectory.segments)
            whole = msgspec.msgpack.encode(msgspec.structs.replace(trajectory, segments=lean))
            (self._folder / f"{ticket.trajectory_id}.{ticket.attempt}").write_bytes(whole)
            self._note(ticket.group_id)
        self._thin()

    def _note(self, group: str) -> None:
        if group.startswith("eval-"):
            self._rounds[group] = None
        else:
            self._groups.add(group)

    def _thin(self) -> None:
        gone: set[str] = set()
        while len(self._groups) > self._most_groups and self._stride < 1 << 40:
            self._stride *= 2
            gone |= {name for name in self._groups if number_of(name) % self._stride}
            self._groups -= gone
        while len(self._rounds) > max(1, self._most_rounds):
            # Every second one, but never the newest.
            gone |= set(list(self._rounds)[-2::-2])
            self._rounds = {name: None for name in self._rounds if name not in gone}
        if gone:
            for path in self._folder.iterdir():
                if path.name.rsplit(".", 2)[0] in gone:
                    path.unlink(missing_ok=True)


def number_of(group: str) -> int:
    """The place of a training group in the order of groups; 0 of any other name."""
    digits = group.removeprefix("g")
    return int(digits) if digits.isdecimal() else 0


def read_kept(folder: Path) -> Iterator[Trajectory]:
    """What is kept in the run folder `folder`, in no order. A file that is half written, or gone meanwhile, is passed over."""
    place = folder / FOLDER
    for path in place.iterdir() if place.is_dir() else ():
        with suppress(OSError, msgspec.MsgspecError):
            yield msgspec.msgpack.decode(path.read_bytes(), type=Trajectory)

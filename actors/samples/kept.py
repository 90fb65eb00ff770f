"""Keeps a share of the trajectories on disk, so that somebody can read what the model wrote: RUN/trajectories, one file for each. Beside
them, in RUN/failed_trajectories, the newest rollouts that failed, and in RUN/evals what each sample of an evaluation came to.

A file holds a Trajectory as MessagePack, without log-probabilities; what becomes of the sample stands in samples.jsonl. Of training every
n-th group is kept whole, of an evaluation its first rollouts. Where the files become too many every second group goes, and n doubles: what
is left is spread over the whole run.
"""

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.checkpoint import sync_folder, write_through
from actors.messages.samples import MOST_TEXT, Ticket, Trajectory, shortened
from actors.samples.group import Group
from actors.samples.sample import Outcome

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

FOLDER = "trajectories"
"""In the run folder."""

FAILED_FOLDER, FAILED_KEPT = "failed_trajectories", 256
"""Rollouts of training that failed: in a folder of the run folder, so many of the newest; the oldest goes first."""

EVAL_ROLLOUTS = 16
"""Of each evaluation: the same tasks each time, so that versions compare."""

EVAL_SHARE = 4
"""One file in so many may be an evaluation's."""


EVALS = "evals"
"""What became of each sample of held-out evaluations, in the run folder: VERSION.jsonl, one row for each."""

MOST_ROUND_TEXT = 64 * 1024 * 1024
"""Characters of text that one evaluation's file may hold: where it has so many samples each gets an equal share, if that is below
`MOST_TEXT`."""

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
        self._failed = FailedTrajectories(run / FAILED_FOLDER, min(most, FAILED_KEPT))
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
        if trajectory.reason:
            if trajectory.ticket.purpose == "train":
                self._failed.waiting.append(trajectory)
                self._arrived.set()
        elif self._wants(trajectory.ticket) and len(self._waiting) < WAITING:
            self._waiting.append(trajectory)
            self._arrived.set()

    async def follow(self) -> None:
        """Write what is offered, until cancelled."""
        if self._keeps:
            await self._guarded(self._open)
            await self._guarded(self._failed.open)
        while True:
            await self._arrived.wait()
            await self.catch_up()

    async def catch_up(self) -> None:
        """Write what was offered so far."""
        self._arrived.clear()
        waiting, self._waiting = self._waiting, []
        await self._guarded(lambda: self._write(waiting))
        failed = self._failed.take()
        await self._guarded(lambda: self._failed.write(failed))

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
            _write(self._folder, trajectory)
            self._note(trajectory.ticket.group_id)
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


class FailedTrajectories:
    """Rollouts that failed, in a folder of their own: the newest `most`. Those that wait to be written are no more than that either."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._written: dict[Path, None] = {}
        self.waiting: deque[Trajectory] = deque(maxlen=most)

    def open(self) -> None:
        """Count what earlier launches left, oldest first. Blocks; raises OSError."""
        if self._folder.is_dir():
            self._written = dict.fromkeys(sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns))

    def take(self) -> list[Trajectory]:
        """What waits to be written, for `write`."""
        taken = list(self.waiting)
        self.waiting.clear()
        return taken

    def write(self, trajectories: Iterable[Trajectory]) -> None:
        """Blocks; raises OSError."""
        for trajectory in trajectories:
            self._written[_write(self._folder, trajectory)] = None
            while len(self._written) > self._most:
                oldest = next(iter(self._written))
                del self._written[oldest]
                oldest.unlink(missing_ok=True)


def _write(folder: Path, trajectory: Trajectory) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{trajectory.ticket.trajectory_id}.{trajectory.ticket.attempt}"
    lean = tuple(msgspec.structs.replace(segment, logprobs=b"") for segment in trajectory.segments)
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(trajectory, segments=lean, text="")))
    return path


def fitting(outcome: Outcome, group: Group | None) -> Outcome:
    """With no more text than the file of its round `group` may have of it."""
    if not outcome.text or group is None:
        return outcome
    most = min(MOST_TEXT, MOST_ROUND_TEXT // len(group.members))
    return msgspec.structs.replace(outcome, text=shortened(outcome.text, most))


def rows_of(group: Group) -> Iterator[dict[str, Any]]:
    """Of a complete held-out round: prompts in the order of the evaluation, the samples of each next to each other.

    `finish` is how the last turn ended, `stop` or `length`; of a rollout that failed why it did, and its `reward` is null.
    """
    for index, member in enumerate(group.members):
        (task, row), outcome = group.exam[index // group.samples], member.outcome
        scored = member.state == "scored"
        last = outcome.finish_reasons[-1] if outcome.finish_reasons else ""
        yield {
            "task": task,
            "row": row,
            "sample": index % group.samples,
            "reward": outcome.reward if scored else None,
            "finish": last if scored else member.reason or member.fate,
            "text": outcome.text,
            "turns": outcome.turns,
        }


class HeldOutFiles:
    """Writes the file of each round. An evaluation of a version that comes again replaces the file of the one before."""

    def __init__(self, run: Path, offload: Callable[..., Awaitable[Any]], log: "FilteringBoundLogger") -> None:
        self._folder = run / EVALS
        self._offload, self._log = offload, log

    async def keep(self, group: Group) -> None:
        """Write what a complete round came to, once, and let go of its texts. A disk that refuses is logged: the evaluation counts."""
        if group.filed:
            return
        group.filed = True
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows_of(group))
        for member in group.members:
            member.outcome = msgspec.structs.replace(member.outcome, text="")
        try:
            await self._offload(self._write, f"{group.begun}.jsonl", lines)
        except OSError as error:
            self._log.warning("held_out_samples_not_kept", path=str(self._folder), error=str(error))

    def _write(self, name: str, lines: bytes) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        partial = self._folder / f"{name}.partial"
        write_through(partial, lines)
        partial.replace(self._folder / name)
        sync_folder(self._folder)


def number_of(group: str) -> int:
    """The place of a training group in the order of groups; 0 of any other name."""
    digits = group.removeprefix("g")
    return int(digits) if digits.isdecimal() else 0


def read_kept(folder: Path) -> Iterator[Trajectory]:
    """What is kept in the run folder `folder`, in no order. A file that is half written, or gone meanwhile, is passed over."""
    places = [place for place in (folder / FOLDER, folder / FAILED_FOLDER) if place.is_dir()]
    for path in (path for place in places for path in place.iterdir()):
        with suppress(OSError, msgspec.MsgspecError):
            yield msgspec.msgpack.decode(path.read_bytes(), type=Trajectory)

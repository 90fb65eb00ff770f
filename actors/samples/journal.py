"""Makes the groups' changes durable, in one fenced and numbered write at a time; no reply is sent before the write that covers it.

The buffer in memory is the master. A Store that comes back without its newest writes shows by the number of the next one, and then
everything is written anew, samples included: their payloads are kept for as long as the Store may forget them.

    samples/training           Training
    samples/taken_over         Fences that were taken over: token → number of the last write before its successor
    samples/group/<group>      Group, from its first ticket until it ends (held-out rounds are not kept)
    samples/payload/<sample>   MessagePack Trajectory of a scored member, while its group lives; larger ones lie in files
    stream samples/ends        SampleEnd of each sample, in the order in which they ended
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from rubato.actors.samples.group import Changes, Group, Member, SampleEnd, Training
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import PayloadLost, file_payload, read_payload, sweep_payloads, trajectory_id
from rubato.runtime.store.store import Append, Fence, Fenced, Forgotten, Store, StoreUnavailable, WriteNumber

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from rubato.runtime.observe.figures import Metrics


ResultT = TypeVar("ResultT")

TRAINING = "samples/training"
GROUP = "samples/group/"
PAYLOAD = "samples/payload/"
TAKEN_OVER = "samples/taken_over"
ENDS = "samples/ends"

PAUSE_S = 0.1
PAUSE_MAX_S = 2.0
"""A Store that restarts is back within seconds; asking it more often brings nothing."""

FETCHED = 64
"""Payloads read at a time: four megabytes at most."""

ENDS_KEPT = 20_000
"""Ends that stay in the Store behind the ledger, in case the machine loses the file's last pages."""


async def read_records(store: Store) -> tuple[Training, list[Group]]:
    """The Store's records of a run. Groups come oldest first."""
    training = await store.get(TRAINING)
    groups = await store.scan(GROUP)
    return (
        msgspec.msgpack.decode(training, type=Training) if training else Training(),
        [msgspec.msgpack.decode(value, type=Group) for _, value in sorted(groups.items())],
    )


class Wake:
    """Signal of a change to all tasks that wait for one. Take `event`, then look, then wait for it: a change in between is never missed."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def set(self) -> None:
        """Wake all present waiters."""
        self.event.set()
        self.event = asyncio.Event()


class _Written(NamedTuple):
    """Writes that the Store may still forget until loop time `until`."""

    until: float
    ends: int
    payloads: tuple[str, ...]


@dataclass(eq=False)
class Journal:
    """The only writer of what the groups are."""

    store: Store
    fence: Fence
    groups: Groups
    window_s: float
    """How far back the Store may forget what it acknowledged."""
    most_bytes: int
    """Bounds the payloads that are kept for that."""
    metrics: "Metrics"
    log: "FilteringBoundLogger"
    store_back: Callable[[], None]
    """Called when the Store answers again."""

    def __post_init__(self) -> None:
        self._number = 0
        self._taken_over: dict[int, int] = {}
        """Buffers before this one: what their fence was when the next took it over."""
        self._asked = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0
        self._ends: deque[bytes] = deque()
        """The newest ends, up to `Training.ended`."""
        self._written: deque[_Written] = deque()
        self._done_with = 0
        self.ended = Wake()
        """Samples ended: the ledger has lines to write."""
        self.is_healthy = True
        """Whether the Store answered last time. While not, some call is being retried, and says so when it succeeds."""

    async def take_over(self) -> tuple[Training, list[Group]]:
        """Shut out every buffer before this one, and read what it left: the Store may still forget the newest of it. Raises Fenced."""
        while True:
            before = await self.retried(lambda: self.store.fenced(self.fence.name))
            known = await self.retried(lambda: self.store.get(TAKEN_OVER))
            self._taken_over = (msgspec.msgpack.decode(known, type=dict[int, int]) if known else {}) | dict([before])
            self._number += 1  # none stands for two writes: by its number a buffer after this one sees whether this one wrote since
            with suppress(Forgotten):
                await self._send({TAKEN_OVER: msgspec.msgpack.encode(self._taken_over)}, None, WriteNumber(self._number, after=before))
                left = await self._read_left()
                if await self.retried(lambda: self.store.fenced(self.fence.name)) == (self.fence.token, self._number):
                    return left
            self.log.info("take_over_again", cause="the one before wrote meanwhile, or the Store forgot")

    async def _read_left(self) -> tuple[Training, list[Group]]:
        training, groups = await self.retried(lambda: read_records(self.store))
        if self.window_s:  # what was written before is kept as if it were written now
            self._kept, after = {}, max(0, training.ended - ENDS_KEPT)
            samples = [name for group in groups for name in group.inline]
            self._kept = {name: payload for name, payload in zip(samples, await self.payloads(samples), strict=True) if payload}
            self._kept_bytes = sum(map(len, self._kept.values()))
            self._ends.clear()
            while entries := await self.retried(lambda after=after: self.store.read(ENDS, after)):
                self._ends += [value for _, value in entries]
                after = entries[-1][0]
            until = asyncio.get_running_loop().time() + self.window_s
            self._written = deque([_Written(until, len(self._ends), tuple(self._kept))])
        return training, groups

    async def sync(self) -> None:
        """Return once every change made so far is durable, and this buffer was not replaced. Callers at the same time share a write."""
        done = asyncio.get_running_loop().create_future()
        self._waiters.append(done)
        self._asked.set()
        await done

    def poke(self) -> None:
        """Have a change written soon, without waiting for it."""
        self._asked.set()

    async def run(self) -> None:
        """Write, until cancelled. Raises Fenced where a newer buffer has written."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            waiters, self._waiters = self._waiters, []
            await self._write(self.groups.take_changes())
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def room(self, size_bytes: int) -> None:
        """Return once a payload of this size may be kept: until then the Store could forget more than is held here."""
        loop = asyncio.get_running_loop()
        while self._written and self._kept and self._kept_bytes + size_bytes > self.most_bytes:
            await asyncio.sleep(max(0.0, self._written[0].until - loop.time()))
            await self.sync()

    async def payloads(self, samples: Sequence[str]) -> list[bytes | None]:
        """Payloads of these that the Store has, or is about to have."""
        held = self.groups.changes.payloads
        found = {name: self._kept.get(name) or held.get(name) for name in samples}
        missing = [name for name, payload in found.items() if payload is None]
        for begin in range(0, len(missing), FETCHED):
            names = missing[begin : begin + FETCHED]
            keys = [PAYLOAD + name for name in names]
            values = await self.retried(lambda keys=keys: self.store.fetch(keys))
            found.update(zip(names, values, strict=True))
        return list(found.values())

    async def ends(self, after: int) -> list[tuple[int, SampleEnd]]:
        """Ends with an index above `after`, oldest first, as far as one read goes."""
        entries = await self.retried(lambda: self.store.read(ENDS, after))
        return [(index, msgspec.msgpack.decode(value, type=SampleEnd)) for index, value in entries]

    def forget_ends(self, through: int) -> None:
        """The ledger has ends up to this index on disk."""
        self._done_with = max(self._done_with, through - ENDS_KEPT)

    async def retried(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The result of `call`, retried for as long as the Store is away; any other error is raised."""
        pause_s = PAUSE_S
        while True:
            try:
                result = await call()
            except StoreUnavailable as error:
                self._turned(False, str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            except Exception:
                self._turned(True)
                raise
            else:
                self._turned(True)
                return result

    # -- one write ----------------------------------------------------------------------------------------------

    async def _write(self, changes: Changes) -> None:
        self._keep(changes)
        records, append = self._records(changes)
        self._number += 1
        began = asyncio.get_running_loop().time()
        num_ends, stored = len(changes.ends), tuple(name for name, payload in changes.payloads.items() if payload is not None)
        try:
            await self._send(records, append, WriteNumber(self._number))
        except Forgotten:
            while not await self._writes_all():
                self.log.warning("store_forgot_again")
            self._written.clear()
            num_ends, stored = len(self._ends), tuple(self._kept)
        until = asyncio.get_running_loop().time() + self.window_s
        self._written.append(_Written(until, num_ends, stored))
        self._settle(began if self.window_s else until)
        self._count(changes.ends)

    async def _send(self, records: dict[str, bytes | None], append: Append | None, turn: WriteNumber) -> None:
        await self.retried(lambda: self.store.write(records, fence=self.fence, turn=turn, append=append))

    def _keep(self, changes: Changes) -> None:
        """From now on the Store is sent these, and may forget them."""
        for name, payload in changes.payloads.items():
            self._kept_bytes -= len(self._kept.pop(name, b""))
            if payload is not None:
                self._kept[name] = payload
                self._kept_bytes += len(payload)
        self._ends += [msgspec.msgpack.encode(end) for end in changes.ends]

    def _settle(self, began: float) -> None:
        """A write that began then found all before it in place: what was written a window earlier can't be forgotten any more."""
        while self._written and self._written[0].until <= began:
            written = self._written.popleft()
            for _ in range(written.ends):
                self._ends.popleft()
            for name in written.payloads:
                self._kept_bytes -= len(self._kept.pop(name, b""))

    def _records(self, changes: Changes) -> tuple[dict[str, bytes | None], Append | None]:
        records = {PAYLOAD + name: payload for name, payload in changes.payloads.items()}
        for name in changes.groups:
            group = self.groups.live.get(name) or self.groups.trained.get(name)
            records[GROUP + name] = None if group is None else msgspec.msgpack.encode(group)
        num, training = len(changes.ends), self.groups.training
        if not num and not changes.training:
            return records, None
        training.ended += num
        records[TRAINING] = msgspec.msgpack.encode(self.groups.record())
        return records, Append(ENDS, training.ended - num + 1, list(self._ends)[-num:], self._done_with) if num else None

    async def _writes_all(self) -> bool:
        """The Store lost its newest writes: say all that it may have forgotten, and take away what it should no longer have.

        False where it changed meanwhile. Raises Fenced where a buffer that was replaced found itself in office again: what it answered stands.
        """
        training = self.groups.training
        self.log.error("store_forgot", ends=training.ended, cause="it came back without its newest writes")
        found = await self.retried(lambda: self.store.fenced(self.fence.name))
        if found[0] < self.fence.token and found[1] > self._taken_over.get(found[0], 0):
            raise Fenced(f"the store forgot that {self.fence.name!r} was taken over, and one before has written: it is taken over again")
        stored, forgotten = await self.retried(lambda: read_records(self.store))
        more = self.groups.take_changes()  # what happened meanwhile is said too: the records show it already
        self._keep(more)
        training.ended += len(more.ends)
        self._count(more.ends)
        records: dict[str, bytes | None] = {GROUP + group.id: None for group in forgotten}
        records[TAKEN_OVER] = msgspec.msgpack.encode(self._taken_over)
        for end in self._ends:
            records[PAYLOAD + msgspec.msgpack.decode(end, type=SampleEnd).trajectory_id] = None
        records |= {PAYLOAD + name: payload for name, payload in self._kept.items()}
        groups = (*self.groups.live.values(), *self.groups.trained.values())
        records |= {GROUP + group.id: msgspec.msgpack.encode(group) for group in groups}
        records[TRAINING] = msgspec.msgpack.encode(self.groups.record())
        first = training.ended - len(self._ends) + 1
        if stored.ended < first - 1:
            self.log.error("store_forgot_more_than_it_may", ends=stored.ended, window_s=self.window_s)
        append = Append(ENDS, first, list(self._ends), self._done_with)
        self._number += 1
        try:
            await self._send(records, append, WriteNumber(self._number, after=found))
        except Forgotten:
            return False
        return True

    def _count(self, ends: Sequence[SampleEnd]) -> None:
        for end in ends:
            self.metrics.count(f"samples/{end.fate}")
            if end.fate == "stale":
                self.metrics.count("staleness/dropped")
        if ends:
            self.ended.set()

    def _turned(self, healthy: bool, error: str = "") -> None:
        if healthy == self.is_healthy:
            return
        self.is_healthy = healthy
        if healthy:
            self.log.info("store_back")
            self.store_back()
        else:
            self.log.warning("store_unavailable", error=error, effect="nothing new is admitted until it is back")


class Payloads:
    """The samples of groups, read back whole or known to be gone. `offload` runs a blocking function away from the event loop."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        offload: Callable[..., Awaitable[Any]],
        tell_gone: Callable[[Sequence[str]], None],
        log: "FilteringBoundLogger",
    ) -> None:
        """`tell_gone` hears of the trajectories whose samples were looked for and are gone or damaged."""
        self._folder, self._journal, self._offload = folder, journal, offload
        self._tell_gone, self._log = tell_gone, log

    async def of(self, groups: Sequence[Group]) -> list[list[bytes | None]]:
        """Payloads of each group's scored members, in order; None for one that is gone or damaged."""
        inline = [name for group in groups for name in group.inline]
        there = dict(zip(inline, await self._journal.payloads(inline), strict=True))
        found: list[list[bytes | None]] = []
        gone: list[str] = []
        for group in groups:
            found.append([])
            for index in group.scored:
                name = trajectory_id(group.id, index)
                found[-1].append(there[name] if name in there else await self._read(name, group.members[index]))
                if found[-1][-1] is None:
                    self._log.error("sample_gone", trajectory=name, cause="its payload is lost or damaged")
                    gone.append(name)
        if gone:
            self._tell_gone(gone)
        return found

    async def file(self, name: str, attempt: int, payload: bytes) -> str:
        """Write the payload of an attempt to its file, on disk when this returns; the digest. Raises OSError."""
        return await self._offload(file_payload, self._folder, f"{name}.{attempt}", payload)

    async def unlink(self, name: str, attempt: int) -> None:
        """Delete the file of an attempt, if it is there."""
        await self._offload((self._folder / f"{name}.{attempt}").unlink, True)

    async def sweep(self, groups: Iterable[Group]) -> None:
        """Delete the files that no member of `groups`, which are all that live, waits for."""
        wanted = {
            f"{trajectory_id(group.id, index)}.{member.attempt}"
            for group in groups
            for index, member in enumerate(group.members)
            if member.digest
        }
        await self._offload(sweep_payloads, self._folder, wanted)

    async def _read(self, name: str, member: Member) -> bytes | None:
        try:
            return await self._offload(read_payload, self._folder, f"{name}.{member.attempt}", member.digest)
        except PayloadLost as error:
            self._log.error("sample_unreadable", trajectory=name, error=str(error))
            return None

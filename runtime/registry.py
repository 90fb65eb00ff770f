"""Who is in the run and where: leased records in the Store, mirrored in each process and kept fresh by an event stream."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from rubato.runtime.observe.figures import StageView, WaitView
from rubato.runtime.store.store import Store, StoreUnavailable

LEASE_TTL_S = 10.0
"""Longer than any pause of a healthy process (a collection, a slow disk), short enough that a dead host is noticed."""

BEAT_S = 1.0
"""Renewal and status period: one small write per actor and second keeps the monitor live."""

RELIST_S = 15.0
"""Anti-entropy: the mirror is compared with the leases this often, in case an event was lost."""

LOOK_S, LOOKS = 2.5 * BEAT_S, 3
"""After a link broke, its actor is looked for this often, at this distance: a process that was only stopped beats again."""

LEASED = "actor/"
"""Before an actor's name, in that of its lease."""

NODE = "node-1"
"""The node agent of the host that launched the run."""


def role_of(name: str) -> str:
    """`engine` of `engine-3`."""
    return name.rsplit("-", 1)[0]


State = Literal["starting", "ready", "draining", "stopped"]


class RankRecord(msgspec.Struct, frozen=True):
    """One of the processes among which an actor shares out its work."""

    rank: int
    pid: int
    host: str
    device: str


class ActorRecord(msgspec.Struct, frozen=True):
    """One live actor as the registry holds it; renewed every beat with fresh figures."""

    name: str
    role: str
    address: str
    incarnation: int
    pid: int
    host: str
    state: State
    beat: int = 0
    """Counts renewals, so a suspect that still beats is known to live."""
    progress: int = 0
    """Messages handled: standing still while the mailbox is not empty means stalled, not dead."""
    mailbox: int = 0
    rate_s: float = 0.0
    idle: float = 1.0
    metrics: dict[str, float] = {}
    waits: list[WaitView] = []
    stages: list[StageView] = []
    node: str = NODE
    """The node agent of its host."""
    public: str = ""
    """Where actors on other hosts reach it; `address` is for those of its own."""
    pool: str = ""
    """Pool of its role, where that has pools: actors that hand out work see by it what this one may be used for."""
    hardware: str = ""
    """The class of the pool's hardware."""
    provides: frozenset[str] = frozenset()
    """What it can do for others, under whatever role it runs; of a host's node agent, the host's labels."""
    ranks: tuple[RankRecord, ...] = ()
    """The processes among which it shares out its work, where it does."""


class MembershipEvent(msgspec.Struct, frozen=True, array_like=True):
    """One change of membership."""

    kind: Literal["ready", "left"]
    record: ActorRecord


class Directory:
    """This process's mirror of the registry, as seen from the host of `node`: each record's `address` is the one to use from there.

    `ready` instances only; every change wakes all that wait for one.
    """

    def __init__(self, node: str = NODE) -> None:
        self._node = node
        self._records: dict[str, ActorRecord] = {}
        self.find: Callable[[str], ActorRecord | None] = self._records.get
        """The ready actor of that name. Every message asks this, so it is the dictionary's own method."""
        self._ready: dict[str, tuple[str, ...]] = {}
        self._turn: dict[str, int] = {}
        self._suspects: dict[str, ActorRecord] = {}
        self._changed = asyncio.Event()

    def ready(self, what: str) -> tuple[str, ...]:
        """All of a role, or all that provide something."""
        found = self._ready.get(what)
        if found is None:
            able = (name for name, r in self._records.items() if r.role == what or what in r.provides)
            found = self._ready[what] = tuple(sorted(able))
        return found

    def resolve(self, target: str) -> ActorRecord | None:
        """The ready actor of that name, or the next in turn of a role, or of those that provide it."""
        found = self.find(target)
        if found is not None:
            return found
        names = self.ready(target)
        if not names:
            return None
        turn = (self._turn.get(target, -1) + 1) % len(names)
        self._turn[target] = turn
        return self.find(names[turn])

    def at(self, address: str) -> ActorRecord | None:
        return next((r for r in self._records.values() if r.address == address), None)

    async def change(self) -> None:
        """Return at the next change of membership."""
        changed = self._changed
        await changed.wait()

    def add(self, record: ActorRecord) -> tuple[set[str], set[str]]:
        """Mirror a ready actor; returns (joined, left) names. An older incarnation than the known one changes nothing."""
        record = self.seen_from_here(record)
        known, suspect = self._records.get(record.name), self._suspects.get(record.name)
        if known is not None and known.incarnation >= record.incarnation:
            return set(), set()
        if suspect is not None and suspect.incarnation >= record.incarnation and record.beat <= suspect.beat + 1:
            return set(), set()
        self._suspects.pop(record.name, None)
        self._records[record.name] = record
        self._wake()
        return {record.name}, {record.name} if known else set()

    def seen_from_here(self, record: ActorRecord) -> ActorRecord:
        """The record with the address that this host uses."""
        if record.node == self._node or not record.public:
            return record
        return msgspec.structs.replace(record, address=record.public)

    def remove(self, name: str, incarnation: int) -> set[str]:
        """Forget `name` unless a newer incarnation took its place."""
        known = self._records.get(name)
        if known is None or known.incarnation > incarnation:
            return set()
        del self._records[name]
        self._wake()
        return {name}

    def suspect(self, address: str, beats: Mapping[int, int]) -> set[str]:
        """The link to `address` broke: treat its actor as gone until it is seen to beat again. `beats` are known, by incarnation."""
        record = self.at(address)
        if record is None:
            return set()
        beat = max(record.beat, beats.get(record.incarnation, 0))
        self._suspects[record.name] = msgspec.structs.replace(record, beat=beat)
        return self.remove(record.name, record.incarnation)

    def doubt(self, records: list[ActorRecord]) -> bool:
        """A suspect has to beat beyond what these say; one that another incarnation replaced is none any more. Whether there are any."""
        found = {record.name: record for record in records}
        for name, suspect in list(self._suspects.items()):
            record = found.get(name)
            if record is None or record.incarnation > suspect.incarnation:
                del self._suspects[name]
            else:
                self._suspects[name] = msgspec.structs.replace(suspect, beat=max(suspect.beat, record.beat))
        return bool(self._suspects)

    def names(self) -> dict[str, int]:
        return {name: r.incarnation for name, r in self._records.items()}

    def _wake(self) -> None:
        self._ready.clear()
        self._changed.set()
        self._changed = asyncio.Event()


class Registry:
    """Keeps this actor's own record leased, and the Directory in step with those of the others."""

    def __init__(self, store: Store, directory: Directory, on_change: Callable[[set[str], set[str]], Awaitable[None]]) -> None:
        self._store = store
        self._directory = directory
        self._on_change = on_change
        self._beats: dict[int, int] = {}
        self._after = 0
        self._looking = False
        self._sure_at = 0.0
        """Who could not renew its own lease takes no other's lapse for a death, until all have had the time to renew theirs."""

    async def publish(self, record: ActorRecord) -> bool:
        """Take or renew the lease; False means a newer incarnation holds the name and this process must end."""
        value = msgspec.msgpack.encode(record)
        loop = asyncio.get_running_loop()
        try:
            renewed = await self._store.lease(f"{LEASED}{record.name}", record.incarnation, value, LEASE_TTL_S)
        except StoreUnavailable:
            self._sure_at = math.inf
            raise
        if self._sure_at == math.inf:
            self._sure_at = loop.time() + LOOK_S
        return renewed

    async def sync(self) -> None:
        """Bring the mirror up to date once, before anything depends on it."""
        self._after = await self._last_event()
        await self.relist()

    async def watch(self) -> None:
        """Mirror membership until cancelled; `sync` comes first."""
        while True:
            try:
                entries = await self._store.read("events", self._after, wait_s=RELIST_S)
                if not entries:
                    await self._compare()
            except StoreUnavailable:  # static stability: the mirror stays as it is until the Store answers again
                await asyncio.sleep(BEAT_S)
                continue
            for index, value in entries:
                self._after = index
                await self._apply(msgspec.msgpack.decode(value, type=MembershipEvent))

    async def _compare(self) -> None:
        """Relist where it is not the actors of the mirror that hold leases. All records of a large run are much to ask for, of each actor."""
        held = await self._store.holders(LEASED)
        if {name.removeprefix(LEASED): incarnation for name, incarnation in held.items()} != self._directory.names():
            await self.relist()

    async def relist(self) -> None:
        """Compare the mirror with the leases themselves."""
        records = await list_actors(self._store)
        joined: set[str] = set()
        left: set[str] = set()
        self._beats = {record.incarnation: record.beat for record in records}
        for record in records:
            if record.state == "ready":
                j, gone = self._directory.add(record)
                joined |= j
                left |= gone
        live = {r.name: r.incarnation for r in records}
        sure = asyncio.get_running_loop().time() >= self._sure_at
        for name, incarnation in self._directory.names().items():
            if name not in live and sure:
                left |= self._directory.remove(name, incarnation)
        if joined or left:
            await self._on_change(joined, left)

    async def lost(self, address: str) -> None:
        """The transport lost its link to `address`."""
        left = self._directory.suspect(address, self._beats)
        if not left:
            return
        await self._on_change(set(), left)
        if not self._looking:
            self._looking = True
            try:
                await self._look_for_suspects()
            finally:
                self._looking = False

    async def _look_for_suspects(self) -> None:
        try:
            for _ in range(LOOKS):
                if not self._directory.doubt(await list_actors(self._store)):
                    return
                await asyncio.sleep(LOOK_S)
                await self.relist()
        except StoreUnavailable:
            return  # `watch` compares again once it is back

    async def _apply(self, event: MembershipEvent) -> None:
        if event.kind == "ready":
            joined, left = self._directory.add(event.record)
        else:
            joined, left = set[str](), self._directory.remove(event.record.name, event.record.incarnation)
        if joined or left:
            await self._on_change(joined, left)

    async def _last_event(self) -> int:
        after = 0
        while entries := await self._store.read("events", after):
            after = entries[-1][0]
        return after


class SeenRecord(NamedTuple):
    """An actor's record, and how long ago it was renewed: a healthy process does so every `BEAT_S`."""

    record: ActorRecord
    silent_s: float


async def list_seen(store: Store) -> list[SeenRecord]:
    """Every live actor of the run, by name, with its age: what the monitor reads."""
    return [
        SeenRecord(msgspec.msgpack.decode(lease.value, type=ActorRecord), max(0.0, LEASE_TTL_S - lease.remaining_s))
        for _, lease in sorted((await store.leases(LEASED)).items())
    ]


async def list_actors(store: Store) -> list[ActorRecord]:
    """Every live actor of the run, by name."""
    return [seen.record for seen in await list_seen(store)]


async def announce(store: Store, kind: Literal["ready", "left"], record: ActorRecord) -> None:
    """Send the change to all actors of the run, now."""
    bare = msgspec.structs.replace(record, metrics={}, waits=[], stages=[])
    await store.append("events", msgspec.msgpack.encode(MembershipEvent(kind, bare)))


async def withdraw(store: Store, record: ActorRecord) -> None:
    """Leave for good; nothing happens where a newer incarnation took over."""
    if await store.release(f"{LEASED}{record.name}", record.incarnation):
        await announce(store, "left", record)


async def bury(store: Store, name: str) -> None:
    """End the lease of an actor whose process is known to be dead, and announce that."""
    lease = await store.held(f"{LEASED}{name}")
    if lease is not None:
        await withdraw(store, msgspec.msgpack.decode(lease.value, type=ActorRecord))

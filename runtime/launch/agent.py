"""The node agent: one per host; hears what the job and its user want, and decides when the job, or this host's part of it, is over."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from msgspec import structs

from rubato.bus.errors import NotSent
from rubato.bus.message import Ack
from rubato.runtime.actor import handler
from rubato.runtime.blobs.hosts import HostBlobs
from rubato.runtime.config import ActorSpec, Config
from rubato.runtime.config.compose import pool_named
from rubato.runtime.errors import ConfigError
from rubato.runtime.host import RESTART_S, Backend, Death, JobHost, RestartBudget
from rubato.runtime.kernel import Kernel, free_bytes
from rubato.runtime.launch.agent_messages import (
    NEXT_STEP_S,
    AddActors,
    Added,
    DrainActors,
    Drained,
    HostLeaves,
    NotAdded,
    RestartActors,
    StopJob,
)
from rubato.runtime.launch.hosts import DRAIN_LIMIT_S, NODE_ROLE, TELL_S, JobHosts
from rubato.runtime.messages import Finish, Notice, Progress, RoomWanted, Saved
from rubato.runtime.monitor.blocked import ENDING
from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.text import blocked_line
from rubato.runtime.monitor.views import BlockedRow
from rubato.runtime.observe.figures import STORE, Wait, Waits
from rubato.runtime.places import HostPlaces
from rubato.runtime.registry import NODE, SeenRecord, bury, list_seen, role_of
from rubato.runtime.store.store import StoreUnavailable

ASK_S = 20.0
GUESTS_S = 0.5
"""For guests to leave a job that is over."""
LOOK_S = 1.0
"""As often as actors publish their figures."""
MANY, MOST_LEFT_OUT = 64, 2
"""For so many actors each, up to so many, one look at the job is left out before the next: it costs as much as there are actors."""

RESTARTS = "restarts/"
"""How the metric of an actor's restarts begins."""
MOST_METRICS = 4096
"""Of training steps, remembered at once."""

DRAINED = 16
Key = tuple[str, str, str, str]
STOP_LIMITS_S = {"interrupted": DRAIN_LIMIT_S, "done": 8.0, "failed": 3.0, "lost": 1.0}
"""By outcome. At the end nothing that still runs is needed; what a failed run did not write down is caught up when it is resumed, and
where the run is lost its actors have no other to hand anything to.
"""


class JobOutcome(NamedTuple):
    """How the job ended: `kind` is done, failed, interrupted or, on a host that joined, lost; `sentence` is for the user."""

    kind: str
    sentence: str
    died: str = ""
    """The actor that was started again too often, if that is what ended the job."""


class Seen(NamedTuple):
    """The actors of the job as the Store had them, at that loop time."""

    actors: Sequence[SeenRecord] = ()
    at: float = -math.inf


class Screen(Protocol):
    """Display of the process that hosts the job; see runtime/launch/console.py."""

    def progress(self, message: Progress) -> None: ...
    def notice(self, text: str, *, good: bool = False) -> None: ...
    def actors(self, ready: int, wanted: int) -> None: ...


class Hosting(NamedTuple):
    """What a node agent works with, in place of an actor's config."""

    job: Config
    screen: Screen
    backend: Backend
    restart_s: tuple[float, float] = RESTART_S
    watches: bool = False
    """Whether it tells of stages that are blocked for `run.watch_s`."""
    places: HostPlaces | None = None
    """What the back end goes by, where it gives actors GPUs, cores or an environment of their own."""


class NodeAgent(HostBlobs):
    """`over` is the job's outcome, or on a host that joined that of its part; the first one stands."""

    def __init__(self, config: Hosting, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._hosting, self.job, self.screen = config, config.job, config.screen
        self.over: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self.all_ready = asyncio.Event()
        self.host = JobHost(config.backend, self.spawn, self._died)
        self.places = config.places or HostPlaces.here(config.job)
        self.hosts = JobHosts(self, config.job, self.host, self.places, self._tell)
        self._adding = asyncio.Lock()
        self._died_at: dict[str, float] = {}
        self.row: dict[str, float] = {}
        """The newest value of each metric of a training step; empty on a host that joined, and before the first step."""
        self.seen = Seen()
        self._ready: set[str] = set()
        self._watch = Watch(self.waits)
        self._spans: set[_Span] = set()
        self._wanting: dict[str, str] = {}
        """Who waits for room on which path."""
        self._without_room = ""
        """The path of which the user was told last that its disk is full; empty once he was told that it has room."""
        self.saved_s = 0.0
        """What the actors that left took to save what they did."""

    async def on_start(self) -> None:
        if self._hosting.watches:
            self.spawn(self._watch_job(), name="node.watch")

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Actors came up or went away."""
        if any(role_of(name) == NODE_ROLE for name in (*joined, *left)):
            self.hosts.seen(joined, left)
        wanted = self.host.names()
        self._ready -= set(left)
        for name in joined:
            self._watch.well(name)
            if name in wanted:
                self._ready.add(name)
                self._back(name)
        if not self.all_ready.is_set():
            self.screen.actors(len(self._ready), len(wanted))
            if wanted and self._ready.issuperset(wanted):
                self.all_ready.set()

    # -- what its caller does -----------------------------------------------------------------------------------

    def start_actors(self) -> None:
        """Start every actor of the config."""
        for role in self.job.actors:
            for index, pool in enumerate(self.job.members(role), 1):
                self.start(f"{role}-{index}", pool)

    def start(self, name: str, pool: str = "") -> None:
        """Start one actor of this host and keep it running. A name of no role of the job has the usual budget, and drains first.

        Raises ConfigError where `pool` has no place for it here.
        """
        role = role_of(name)
        self.places.take(name, role, pool)
        known = role in self.job.actors
        spec = self.job.actors[role] if known else ActorSpec.model_validate({"class": name})
        budget = RestartBudget(spec.restarts, spec.restart_window_s, self._hosting.restart_s)
        self._watch.sees(name, "starting")
        self.host.start(name, budget, self.job.actor_class(role).drain_order if known else 0)

    def end(self, outcome: JobOutcome) -> None:
        """The first outcome stands."""
        if not self.over.done():
            self.over.set_result(outcome)
            self.waits.on("the end of all actors", stage=ENDING, detail=outcome.kind).open()

    async def stop(self, kind: str) -> None:
        """Drain after an outcome of `kind`, most hosts that joined first: in order where it is to be saved, else all at once."""
        if self.name == NODE:
            limit_s, now = STOP_LIMITS_S[kind], kind == "failed"
            order, followers = self.hosts.followers() if kind == "interrupted" else (0, ())
            await self.hosts.stop([host for host in self.hosts.others() if host not in followers], limit_s, now=now)
            if followers:
                await self.host.drain_all(limit_s, by_rank=True, below=order)
                await self.hosts.stop(followers, limit_s, now=now)
        elif kind != "lost":
            with suppress(NotSent, TimeoutError):  # the first host is gone, or out of reach
                async with asyncio.timeout(TELL_S):
                    await self.ref(NODE).tell(HostLeaves(self.name))
        await self.host.drain_all(STOP_LIMITS_S[kind], by_rank=kind == "interrupted")
        with suppress(TimeoutError):  # the guest that asked for the end leaves by the Store, which ends next
            async with asyncio.timeout(GUESTS_S):
                while self.peers("guest"):
                    await self.directory.change()

    # -- what the job says --------------------------------------------------------------------------------------

    @handler
    async def progress_made(self, message: Progress) -> None:
        for span in self._spans:
            span.step(asyncio.get_running_loop().time())
        row = self.row | message.row
        self.row = row if len(row) <= MOST_METRICS else message.row
        self.screen.progress(message)

    @handler
    async def room_wanted(self, message: RoomWanted) -> None:
        self.room(message.source, message.path, message.free_bytes)

    @handler
    async def work_saved(self, message: Saved) -> None:
        self.saved_s += message.seconds

    @handler
    async def noticed(self, message: Notice) -> None:
        self.screen.notice(message.text, good=message.good)

    @handler
    async def host_leaves(self, message: HostLeaves) -> None:
        self.hosts.leaves(message.node)

    @handler
    async def finished(self, message: Finish) -> Ack:
        self.log.info("finished", source=message.source, reason=message.reason, failed=message.failed)
        self.end(JobOutcome("failed" if message.failed else "done", message.reason))
        return Ack()

    # -- what its user asks -------------------------------------------------------------------------------------

    @handler(concurrency=8)
    async def add_actors(self, request: AddActors) -> Added | NotAdded:
        if request.node:
            return self._announced(self.hosts.name_actors(request), f"joins from {request.node}")
        async with self._adding:  # no other request takes the places between the look and the start
            try:
                pool = self._pool_for(request)
            except ConfigError as error:
                return NotAdded(str(error))
            reply = await self._named(structs.replace(request, pool=pool))
            for name in reply.names if isinstance(reply, Added) else ():
                self.start(name, pool)
        return self._announced(reply, "added")

    @handler(concurrency=8)
    async def drain_actors(self, request: DrainActors) -> Drained | NotAdded:
        clock = asyncio.get_running_loop().time
        span = _Span(clock())
        self._spans.add(span)
        try:
            reply = self._announced(await self.hosts.drain(request.names, request.pool), "drained")
            drained_s = clock() - span.began
            if request.measure and not isinstance(reply, NotAdded):
                await span.next_step()
        finally:
            self._spans.discard(span)
        if isinstance(reply, NotAdded):
            return reply
        return Drained(reply.names, drained_s, span.longest(clock()))

    @handler(concurrency=8)
    async def restart_actors(self, request: RestartActors) -> Added | NotAdded:
        return self._announced(await self.hosts.restart(request.names, held=request.held), "restarted")

    @handler
    async def stop_job(self, request: StopJob) -> Ack:
        self.end(JobOutcome("interrupted", request.reason))
        if request.now:
            self.host.kill_all()
        return Ack()

    # -- parts --------------------------------------------------------------------------------------------------

    def _pool_for(self, request: AddActors) -> str:
        """The pool of what is to be added, which has a place for all of it. Raises ConfigError."""
        if request.role not in self.job.actors:
            return ""
        pool = pool_named(self.job, request.role, request.pool)
        if why := self.places.why_not(request.role, pool, request.num):
            raise ConfigError(why)
        return pool

    async def _named(self, request: AddActors) -> Added | NotAdded:
        """Names for actors that this host starts, if it has what they need: the first host gives them."""
        if self.name == NODE:
            return self.hosts.name_actors(request)
        if request.role in self.job.actors:
            actor_class, config = self.job.actor_class(request.role), self.job.actor_config(request.role, request.pool)
            try:
                actor_class.check_host(config)
                actor_class.preflight(config, self.run.folder)
            except ConfigError as error:
                return NotAdded(str(error))
        return await self.ref(NODE).ask(structs.replace(request, node=self.name), timeout=ASK_S)

    def _tell(self, text: str, good: bool) -> None:
        if not self.over.done():
            self.screen.notice(text, good=good)

    def _announced(self, reply: Added | NotAdded, what: str) -> Added | NotAdded:
        if isinstance(reply, Added):
            self.screen.notice(f"{', '.join(reply.names)} {what}", good=True)
        return reply

    async def _died(self, death: Death) -> None:
        await self._bury(death.name)
        self.room(death.name)
        if death.restart_in_s is None:
            self.places.leave(death.name)
        if death.expected:
            if death.restart_in_s is None:
                self._watch.drained(death.name)
            else:
                self._watch.sees(death.name, "starting")
            return
        ending = death.ending
        self._died_at[death.name] = asyncio.get_running_loop().time()
        self._ready.discard(death.name)
        self.metrics.count(f"deaths/{role_of(death.name)}")
        self.log.warning("died", actor=death.name, how=ending.how, after_s=death.after_s, sentence=ending.sentence)
        because = f": {ending.sentence}" if ending.sentence and not ending.how.startswith("signal") else ""
        if death.restart_in_s is None:
            log = f". Log: {ending.log}" if ending.log else ""
            often = f"died {death.attempt} times" if death.attempt > 1 else "died once"
            what = "can't start" if ending.permanent and death.attempt <= death.limit else often
            self.end(JobOutcome("failed", f"{death.name} {what} ({ending.how}){because}{log}", death.name))
            return
        again = f"restarting in {death.restart_in_s:.1f} s ({death.attempt} of {death.limit})"
        self.metrics.count(f"{RESTARTS}{death.name}")
        self.screen.notice(f"{death.name} died ({ending.how}) after {death.after_s:.1f} s{because}; {again}")
        detail = f"{ending.how}{because}; restart {death.attempt} of {death.limit}"
        self._watch.sees(death.name, "dead", detail, f"actors.{role_of(death.name)}.restarts={death.limit}")

    async def _watch_job(self) -> None:
        """Look at the processes of this host; on the first one, and where its figures are asked for, at the job."""
        full, left = "", 0
        while True:
            await asyncio.sleep(LOOK_S)
            for name in self.host.names():
                self._watch.stopped(name, now=self.host.is_stopped(name))
            left -= 1
            # If each host looked at all actors, the Store's work would grow with the square of the hosts.
            if left < 0 and (self.name == NODE or self.job.host.listen):
                full = await self._look(full)
                left = min(MOST_LEFT_OUT, len(self.seen.actors) // MANY)

    async def _look(self, full: str) -> str:
        """Tell of each stage that is blocked for `run.watch_s`, once until it moves, and of a Store without room, where it was `full` before.

        A slow stage is only logged: a job's slowest stage is no news.
        """
        try:
            seen, said = await list_seen(self.store), await self.store.full()
        except StoreUnavailable:
            return full
        self.seen = Seen(seen, asyncio.get_running_loop().time())
        if self.name != NODE:  # the first host tells its user
            return full
        if not self.job.state.url:  # it writes to the run's own disk, which is all that it can be short of
            state = self.run.folder / "state"
            self.room(STORE, str(state) if said else "", free_bytes(state) if said else 0)
        elif said != full:
            self.log.warning("store_room", full=said)
            self.screen.notice(said or "the Store takes writes again: the run goes on")
        silent = {one.record.name: one.silent_s for one in seen}
        rows = snapshot("", [one.record for one in seen], [], {}, silent=silent)["blocked"]
        for row in self._watch.overdue(rows, asyncio.get_running_loop().time(), self.job.run.watch_s):
            line = blocked_line(row) + (f"; limit {row['limit']}" if row["limit"] else "")
            self.log.warning("blocked", kind=row["kind"], stage=row["stage"], holder=row["holder"], line=line)
            if row["kind"] != "slow":
                self.screen.notice(line)
        return said

    def room(self, source: str, path: str = "", free: int = 0) -> None:
        """`source` waits for room on the disk of `path`, or no more. The user is told once when the first does, and once when all have it."""
        if not path:
            if self._wanting.pop(source, None) and not self._wanting:
                self.spawn(self._room_again(), name="node.room_again")
            return
        self._wanting[source] = path
        if not self._without_room:
            self._without_room = path
            self.screen.notice(
                f"no room on the disk of {path} ({free:,} bytes free): the run pauses, and goes on by itself once there is room"
            )

    async def _room_again(self) -> None:
        """A notice, once no actor has lacked room for `LOOK_S` or more: the first to write may take all that there is."""
        await asyncio.sleep(2 * LOOK_S)
        if self._without_room and not self._wanting:
            path, self._without_room = self._without_room, ""
            self.screen.notice(f"there is room again on the disk of {path}: the run goes on", good=True)

    def _back(self, name: str) -> None:
        died_at = self._died_at.pop(name, None)
        record = self.directory.find(name)
        if died_at is not None and record is not None:
            after_s = asyncio.get_running_loop().time() - died_at
            self.screen.notice(f"{name} is back (incarnation {record.incarnation}) after {after_s:.1f} s", good=True)

    async def _bury(self, name: str) -> None:
        """Release the dead actor's lease, so that all actors know within milliseconds; while the Store is away, at its lapse."""
        try:
            await bury(self.store, name)
        except StoreUnavailable as error:
            self.log.warning("not_buried", actor=name, error=str(error))


class _Span:
    """A span of time, and the longest that the job stood still in it."""

    def __init__(self, now: float) -> None:
        self.began = self._last = now
        self._longest_s = 0.0
        self._stepped = asyncio.Event()

    def step(self, now: float) -> None:
        self._longest_s, self._last = self.longest(now), now
        self._stepped.set()

    def longest(self, now: float) -> float:
        """Without a step, until `now`."""
        return max(self._longest_s, now - self._last)

    async def next_step(self) -> None:
        """Return once the job ended another step, within `NEXT_STEP_S`."""
        self._stepped.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(NEXT_STEP_S):
                await self._stepped.wait()


class Watch:
    """The memory of a node agent: processes that are not as they should be, each a wait of its own (stages `starting`, `stopped`, `dead`),
    and the blocked stages that it reported.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._open: dict[str, Wait] = {}
        self._since: dict[Key, float] = {}
        self._reported: set[Key] = set()

    def sees(self, name: str, stage: str, detail: str = "", limit: str = "") -> None:
        """The process of `name` is in `stage` until it is well, or seen in another."""
        self.well(name)
        self._open[name] = self._waits.on(name, stage=stage, detail=detail, limit=limit).open()

    def stopped(self, name: str, *, now: bool) -> None:
        """Whether something stopped its process (SIGSTOP)."""
        found = self._open.get(name)
        if now and found is None:
            self.sees(name, "stopped", "SIGSTOP; kill -CONT lets it go on")
        elif not now and found is not None and found.stage == "stopped":
            self.well(name)

    def drained(self, name: str) -> None:
        """The process ended as it was asked to; actors that still wait for it are shown that. The newest `DRAINED` are remembered."""
        self.sees(name, "drained")
        gone = [each for each, wait in self._open.items() if wait.stage == "drained"]
        for each in gone[:-DRAINED]:
            self.well(each)

    def well(self, name: str) -> None:
        """It is ready."""
        if found := self._open.pop(name, None):
            found.close()

    def overdue(self, rows: list[BlockedRow], now: float, limit_s: float) -> list[BlockedRow]:
        """Rows that were there for `limit_s` and not told yet; what is gone from `rows` may be told again."""
        present = {(row["actor"], row["stage"], row["holder"], row["kind"]): row for row in rows}
        self._since = {key: self._since.get(key, now) for key in present}
        self._reported &= present.keys()
        due = [key for key in present if key not in self._reported and now - self._since[key] >= limit_s]
        self._reported |= set(due)
        return [present[key] for key in due]

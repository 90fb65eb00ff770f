"""The kernel: hosts one actor, owns every task of it, and tells the rest of the run that it lives."""

import asyncio
import contextvars
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rubato.bus.errors import AskFailed
from rubato.bus.message import Ack, Message
from rubato.bus.transport import Delivery, Transport
from rubato.runtime.actor import Actor, RunInfo, current_kernel
from rubato.runtime.blobs.blob import BlobStore
from rubato.runtime.courier import Courier, Ref, current_deadline, current_trace
from rubato.runtime.dispatch import Dispatcher
from rubato.runtime.errors import PERMANENT, ActorFailed, NotRunning, has_no_room
from rubato.runtime.messages import BytesCounted, CountBytes, Drain, Finish, Notice, Progress, RoomWanted, Saved, Tap
from rubato.runtime.observe.figures import Metrics, Waits, measure_loop_lag
from rubato.runtime.observe.trace import Trace
from rubato.runtime.registry import BEAT_S, LEASE_TTL_S, NODE, ActorRecord, Directory, RankRecord, Registry, State, announce, withdraw
from rubato.runtime.store.store import Store, StoreUnavailable

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from rubato.runtime.observe.tap import FrameTap

ResultT = TypeVar("ResultT")

DRAIN_S = 20.0
"""An actor that has not drained by then is stopped anyway: what it still held is reissued by those who lent it."""

FINISH_S = 30.0
"""Limit of one attempt to tell that the job is over."""

STOPPED_S = 4.0
"""A heartbeat that comes this late shows that the process was stopped or the Store away: others may have given this actor up."""

LEAVE_S = 5.0
"""How long an actor that leaves waits in all for a Store that is away: longer than a server takes that is started again at once."""

OFFLOAD_THREADS = 4

ROOM_PAUSES_S = (0.2, 2.0)
"""A full disk is tried again after so long, at first and at most: the system sends no event when it has room."""

LINK_REFUSED_S = 15.0
"""A refused link is shown for longer than it takes to look for the peer and try again."""


class Kernel:
    """Runs `actor_class` under `name` until it is drained or fails. runtime/actor.py lists what the actor uses of it."""

    def __init__(
        self,
        actor_class: type[Actor],
        config: Any,
        *,
        name: str,
        incarnation: int,
        run: RunInfo,
        transport: Transport,
        store: Store,
        blobs: BlobStore,
        log: "FilteringBoundLogger",
        trace: Trace | None = None,
        node: str = NODE,
        pool: str = "",
        hardware: str = "",
        provides: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.run = run
        self.node = node
        self.store = store
        self.blobs = blobs
        self.log = log
        self.metrics = Metrics()
        self.waits = Waits()
        self.ranks: tuple[RankRecord, ...] = ()
        """As the actor's record has them."""
        self.trace = trace or Trace(None)
        self.directory = Directory(node)
        self.ready = asyncio.Event()
        self.transport = transport
        self.courier = Courier(transport, name, self.waits)
        system = {Drain.__name__: self._drain_asked, Tap.__name__: self._tap_asked}
        system[CountBytes.__name__] = lambda delivery: self.dispatch.reply(
            delivery, BytesCounted(incarnation, self.courier.sent, self.courier.came)
        )
        self.dispatch = Dispatcher(transport, name, log, self.spawn, system, self.courier.arrived)
        self.dispatch.incarnation = incarnation
        self.registry = Registry(store, self.directory, self._peers_changed)
        self._actor_class = actor_class
        self._config = config
        # Who is found by what it provides may run under any role that the config names.
        role = name.rpartition("-")[0] if actor_class.provides else actor_class.role
        self._presence = _Presence(self, role, pool, hardware, actor_class.provides | provides)
        self._stopping = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._owned: set[asyncio.Task[Any]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._actor: Actor | None = None
        self._tap: FrameTap | None = None
        self._num_wanting = 0

    # -- life cycle ---------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Run the actor from start to end. Returns after a drain; raises what failed the actor (grouped)."""
        current_kernel.set(self)
        await self.transport.start(self.dispatch.arrived, self._down)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._serve()
                finally:
                    self.dispatch.end()
                for task in list(self._owned):
                    task.cancel()
        finally:
            self._tasks = None
            self.trace.close()
            await self.transport.close()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    def build(self) -> Any:
        """The actor, before `serve`: for a program that hosts it and wants to hand it something."""
        self._actor = self._actor_class(self._config, self)
        return self._actor

    def stop(self) -> None:
        """Begin to drain; `serve` returns when that is done."""
        self._stopping.set()

    async def _serve(self) -> None:
        await self._presence.begin()
        await self.registry.sync()
        self.spawn(self.registry.watch(), name=f"{self.name}.registry")
        self.spawn(self.courier.sweep(), name=f"{self.name}.deadlines")
        self.spawn(self._presence.beat(), name=f"{self.name}.heartbeat")
        actor = self._actor or self.build()
        try:
            await actor.on_start()
            self.spawn(self.dispatch.consume(actor), name=f"{self.name}.mailbox")
            self.spawn(measure_loop_lag(self.metrics), name=f"{self.name}.lag")  # not of what is loaded before
            await self._presence.become("ready")
            self.log.info("ready", incarnation=self.incarnation, address=self.transport.address)
            self.ready.set()
            await self._stopping.wait()
            await self._presence.become("draining")
            self.log.info("draining")
            await self._drain(actor)
        finally:
            await actor.on_stop()
        await self._presence.end()
        self.log.info("stopped", handled=self.dispatch.handled)

    async def _drain(self, actor: Actor) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await actor.on_drain()
        except TimeoutError:
            self.log.warning("drain_cut_short", after_s=DRAIN_S)

    # -- the wire -----------------------------------------------------------------------------------------------

    def _down(self, peer: str | bytes, reason: str, refusal: str = "") -> None:
        if isinstance(peer, bytes):
            self.dispatch.forget(peer)
            if self._tap is not None:
                self._tap.forget(peer)
            return
        refuser = self.directory.at(peer)
        if refusal and refuser is not None:
            self.waits.refused(refuser.name, "the link", refusal, for_s=LINK_REFUSED_S)
        self.courier.lost(peer, reason)
        if not self._stopping.is_set() and self._tasks is not None:
            with suppress(RuntimeError):  # this actor ends, and need not know who else does
                self.spawn(self.registry.lost(peer), name=f"{self.name}.lost")

    def _drain_asked(self, delivery: Delivery) -> None:
        self._stopping.set()
        self.dispatch.reply(delivery, Ack())

    def _tap_asked(self, delivery: Delivery) -> None:
        if self._tap is None:
            from rubato.runtime.observe.tap import FrameTap  # only an actor that is tapped needs it

            self._tap = FrameTap(self.transport, self.dispatch)
        self._tap.asked(delivery)

    async def _peers_changed(self, joined: set[str], left: set[str]) -> None:
        if self._actor is not None:
            await self._actor.on_peers(tuple(sorted(joined)), tuple(sorted(left)))

    # -- what actors use, see runtime/actor.py ------------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Changes only where the actor's lease lapsed."""
        return self.dispatch.incarnation

    def spawn(self, work: Coroutine[Any, Any, ResultT], *, name: str) -> asyncio.Task[ResultT]:
        if self._tasks is None:
            work.close()
            raise NotRunning(f"{self.name} is not running")
        context = contextvars.copy_context()
        context.run(current_deadline.set, 0.0)
        context.run(current_trace.set, b"")
        try:
            task = self._tasks.create_task(work, name=name, context=context)
        except RuntimeError as error:
            work.close()
            raise NotRunning(f"{self.name} is ending") from error
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)
        return task

    async def offload(self, fn: Callable[..., ResultT], *args: Any, cost_s: float = 0.0) -> ResultT:
        loop = asyncio.get_running_loop()
        if getattr(loop, "virtual", False):
            await asyncio.sleep(cost_s)
            return fn(*args)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(OFFLOAD_THREADS, thread_name_prefix=f"{self.name}.offload")
        return await loop.run_in_executor(self._threads, fn, *args)

    async def on_disk(self, path: Path, write: Callable[..., ResultT], *args: Any) -> ResultT:
        pause_s, longest_s = ROOM_PAUSES_S
        wanted = ExitStack()
        with wanted:
            while True:
                last = self._stopping.is_set()
                try:
                    return await self.offload(write, *args)
                except OSError as error:
                    if last or not has_no_room(error):
                        raise
                    if pause_s == ROOM_PAUSES_S[0]:
                        self.log.warning("no_room", path=str(path), error=str(error))
                        wanted.enter_context(self._room_wanted(path))
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
                pause_s = min(2 * pause_s, longest_s)

    @contextmanager
    def _room_wanted(self, path: Path) -> Generator[None]:
        """One more work of this actor waits for room; the first tells it, and the last that it does so no more."""
        self._num_wanting += 1
        if self._num_wanting == 1:
            wanted = RoomWanted(self.name, str(path), free_bytes(path))
            self.spawn(self._tell_node(wanted), name=f"{self.name}.tell_node")
        try:
            with self.waits.on(str(path), stage="room", detail="its disk is full; free space there"):
                yield
        finally:
            self._num_wanting -= 1
            if not self._num_wanting:
                self.log.info("room_again", path=str(path))
                with suppress(NotRunning):
                    self.spawn(self._tell_node(RoomWanted(self.name)), name=f"{self.name}.tell_node")

    def ref(self, target: str) -> Ref:
        return Ref(target, self.courier, self.directory)

    def finish(self, reason: str, *, failed: bool = False) -> None:
        # What fails on a host that joined ends that host's part of the job, not the job.
        node = self.node if failed else NODE
        self.spawn(self._ask_to_finish(Finish(self.name, self.run.hidden(reason), failed), node), name=f"{self.name}.finish")

    def progress(self, step: int, row: dict[str, float]) -> None:
        self.spawn(self._tell_node(Progress(step, self.run.steps, row)), name=f"{self.name}.tell_node")

    def notice(self, text: str, *, good: bool = False) -> None:
        self.log.info("notice", text=text, good=good)
        self.spawn(self._tell_node(Notice(self.name, self.run.hidden(text), good)), name=f"{self.name}.tell_node")

    async def saved(self, seconds: float) -> None:
        self.log.info("saved", seconds=seconds)
        await self._tell_node(Saved(self.name, seconds))

    async def _tell_node(self, message: Message) -> None:
        try:
            await self.ref(NODE).tell(message)
        except AskFailed as error:
            self.log.warning("node_agent_unreachable", message=type(message).__name__, error=str(error))

    async def _ask_to_finish(self, message: Finish, node: str) -> None:
        """Until it is answered: the node agent may be stopped, or its link broken, just now.

        An actor that was replaced while it was stopped has no say in how the job ends.
        """
        if message.failed:
            with suppress(StoreUnavailable):
                await self._presence.renew()
        while True:
            try:
                await self.ref(node).ask(message, timeout=FINISH_S)
            except AskFailed as error:
                self.log.warning("node_agent_unreachable", message="Finish", error=str(error))
            else:
                return
            await asyncio.sleep(BEAT_S)


def free_bytes(path: Path) -> int:
    """On the disk of `path`, for this user; 0 where it can't be told."""
    try:
        found = os.statvfs(next(place for place in (path, *path.parents) if place.exists()))
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def is_permanent(error: BaseException, kernel: Kernel | None) -> bool:
    """Whether `error` kept the actor of `kernel` (None: not even built) from getting ready, and would do so again."""
    return isinstance(error, PERMANENT) and not (kernel is not None and kernel.ready.is_set())


class _Presence:
    """How the rest of the run knows that the actor of `kernel` lives: its leased record, renewed every beat, and its return after it was away."""

    def __init__(self, kernel: Kernel, role: str, pool: str, hardware: str, provides: frozenset[str]) -> None:
        self._kernel = kernel
        self._role, self._pool, self._hardware, self._provides = role, pool, hardware, provides
        self._state: State = "starting"
        self._renewing = asyncio.Lock()
        self._away = False
        self._beat = 0
        self._cpu_share = 0.0
        self._cpu_s = 0.0

    async def begin(self) -> None:
        """Take the name. Raises ActorFailed where a newer incarnation has it."""
        await self._publish("holds")

    async def become(self, state: State) -> None:
        """Publish the new state, and announce it to all actors; one that drains does so without the Store too."""
        self._state = state
        if state == "ready":
            await self._announce("ready")
        else:
            await self._unless_away(self._announce("left"))

    async def end(self) -> None:
        """Leave for good; while the Store is away the lease lapses by itself."""
        await self._unless_away(self._withdraw())

    async def _announce(self, kind: Literal["ready", "left"]) -> None:
        await self._kernel.registry.publish(self._record())
        await announce(self._kernel.store, kind, self._record())

    async def _withdraw(self) -> None:
        async with self._renewing:  # a renewal or a return under way would take the lease again
            self._state = "stopped"
            await withdraw(self._kernel.store, self._record())

    async def _unless_away(self, told: Awaitable[None]) -> None:
        """A Store that is away keeps no actor from leaving: a job can be stopped without it."""
        try:
            async with asyncio.timeout(0.0 if self._away else LEAVE_S):
                await told
        except (StoreUnavailable, TimeoutError) as error:
            self._kernel.log.warning("left_without_store", error=str(error))
            self._away = True

    async def beat(self) -> None:
        """Renew the record every beat until cancelled. Raises ActorFailed once a newer incarnation has taken the name."""
        handled, last = 0, asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(BEAT_S)
            self._kernel.metrics.gauge("actor/rate_s", (self._kernel.dispatch.handled - handled) / BEAT_S)
            handled = self._kernel.dispatch.handled
            if self._kernel.courier.unknown:
                self._kernel.metrics.gauge("bus/asks_unknown", self._kernel.courier.unknown)
            self._beat += 1
            self._measure_cpu()
            self._report_refusals()
            try:
                await self.renew()
                now = asyncio.get_running_loop().time()
                if now - last > STOPPED_S:
                    await self._rejoin(now - last)
                last = now
            except StoreUnavailable as error:
                self._kernel.log.warning("store_unavailable", error=str(error))

    async def _publish(self, how: str) -> None:
        if not await self._kernel.registry.publish(self._record()):
            raise ActorFailed(f"{self._kernel.name}: a newer incarnation {how} the name; this one ({self._kernel.incarnation}) must end")

    async def renew(self) -> None:
        """Keep the lease for another while. Raises ActorFailed where a newer incarnation has taken the name."""
        async with self._renewing:
            if self._state != "stopped":
                await self._publish("took")

    async def _rejoin(self, silent_s: float) -> None:
        """Show this actor again at once to processes that lost their link to it or saw its lease lapse, before their next look round."""
        if silent_s > LEASE_TTL_S:
            # The lease lapsed, and the run went on without this actor: others got its work, a successor may have its name. It comes
            # back as a new incarnation, so that what is addressed to the old one, or still speaks for it, is refused.
            #
            # Three steps: draw a number; publish under the old one, which fails where a higher one has the name; publish under the new
            # one. The renewal before this call does not do for the second step: it may have reached the Store before the process was
            # stopped, and a successor come since. Nor may that step come before the draw: a successor could take the name between the
            # two, and our later number would drive it out. So a successor that has the name by now ends us at the second step, and one
            # whose number is drawn from now on at the third.
            async with self._renewing:  # neither a renewal nor the withdrawal comes between the steps
                if self._state == "stopped":
                    return
                # `at_least`: a Store that lost its counter could give a number that is no higher than ours.
                drawn = await self._kernel.store.increment("incarnation", at_least=self._kernel.incarnation + 1)
                await self._publish("took")
                self._kernel.dispatch.incarnation = drawn
                self._kernel.metrics.count("actor/registered_anew")
                await self._publish("took")
        self._kernel.log.warning("rejoined", silent_s=round(silent_s, 1), incarnation=self._kernel.incarnation)
        if self._state == "ready":
            self._beat += 1  # a suspect has to be seen to beat more than once
            await announce(self._kernel.store, "ready", self._record())
        await self._kernel.registry.relist()  # those it lost links to are seen again too

    def _report_refusals(self) -> None:
        """Once per beat, so that a flood of strangers is one line of log per second."""
        for reason, total, sentence in self._kernel.transport.refusals.news():
            self._kernel.metrics.gauge(f"bus/refused/{reason}", total)
            self._kernel.log.warning("refused", reason=reason, total=total, newest=sentence)

    def _measure_cpu(self) -> None:
        """Share of one core that this process used, smoothed over some five beats; nothing on virtual time."""
        if getattr(asyncio.get_running_loop(), "virtual", False):
            return
        used = os.times()
        spent = used.user + used.system - self._cpu_s
        self._cpu_share += 0.3 * (min(1.0, spent / BEAT_S) - self._cpu_share) if self._cpu_s else 0.0
        self._cpu_s = used.user + used.system

    def _record(self) -> ActorRecord:
        now = asyncio.get_running_loop().time()
        metrics = self._kernel.metrics.snapshot()
        return ActorRecord(
            self._kernel.name,
            self._role,
            self._kernel.transport.address,
            self._kernel.incarnation,
            os.getpid(),
            socket.gethostname(),
            self._state,
            beat=self._beat,
            progress=self._kernel.dispatch.handled,
            mailbox=self._kernel.dispatch.depth,
            rate_s=metrics.pop("actor/rate_s", 0.0),
            idle=min(metrics.pop("idle", 1.0), 1.0 - self._cpu_share),
            metrics=metrics,
            waits=self._kernel.waits.snapshot(now, [*self._kernel.courier.open_asks(now), *self._kernel.dispatch.at_work(now)]),
            stages=self._kernel.waits.stages(now),
            node=self._kernel.node,
            public=self._kernel.transport.public_address,
            pool=self._pool,
            hardware=self._hardware,
            provides=self._provides,
            ranks=self._kernel.ranks,
        )

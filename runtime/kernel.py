"""The kernel: hosts one actor, owns every task of it, and tells the rest of the run that it lives."""

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from bus.errors import AskFailed
from bus.message import Ack, Message
from bus.transport import Delivery, Transport
from runtime.actor import Actor, RunInfo
from runtime.asking import current_host
from runtime.blobs.blob import BlobStore
from runtime.courier import Courier, current_deadline, current_trace
from runtime.dispatch import Dispatcher
from runtime.messages import Drain, Finish, Notice, Progress, Tap
from runtime.observe.metrics import Metrics, measure_loop_lag
from runtime.observe.trace import Trace
from runtime.observe.waits import Waits
from runtime.presence import Presence
from runtime.ref import Ref
from runtime.registry import BEAT_S, NODE, ActorRecord, Directory, Registry
from runtime.store.errors import StoreUnavailable
from runtime.store.store import Store

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from runtime.observe.tap import FrameTap

ResultT = TypeVar("ResultT")

DRAIN_S = 20.0
"""An actor that has not drained by then is stopped anyway: what it still held is reissued by those who lent it."""

FINISH_S = 30.0
"""Limit of one attempt to tell that the job is over."""

OFFLOAD_THREADS = 4

LINK_REFUSED = "refused: "
"""How a reason begins where the peer refused the link, and it did not break (bus/link.py)."""

LINK_REFUSED_S = 15.0
"""Such a refusal is shown for longer than it takes to look for the peer and try again."""


class Kernel:
    """Runs `actor_class` under `name` until it is drained or fails. Also the actor's Context (see runtime/actor.py)."""

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
    ) -> None:
        self.name, self.run, self.node = name, run, node
        self.store, self.blobs, self.log = store, blobs, log
        self.metrics, self.waits = Metrics(), Waits()
        self.trace = trace or Trace(None)
        self.rng = random.Random(f"{run.seed}/{name}/{incarnation}")
        self.directory = Directory(node)
        self.ready = asyncio.Event()
        self._actor_class, self._config = actor_class, config
        self._transport = transport
        self._courier = Courier(transport, name, self.waits)
        system = {Drain.__name__: self._drain_asked, Tap.__name__: self._tap_asked}
        self._dispatch = Dispatcher(transport, name, log, self.spawn, system, self._courier.arrived)
        self._dispatch.incarnation = incarnation
        self._registry = Registry(store, self.directory, self._peers_changed)
        self._stopping = asyncio.Event()
        self._presence = Presence(
            self, actor_class.role, incarnation, self._registry, transport, self._courier, self._dispatch
        )
        self._ids = 0
        self._turn: dict[str, int] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._owned: set[asyncio.Task[Any]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._actor: Actor | None = None
        self._tap: FrameTap | None = None

    # -- life cycle ---------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Run the actor from start to end. Returns after a drain; raises what failed the actor (grouped)."""
        current_host.set(self)
        await self._transport.start(self._dispatch.arrived, self._down)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._serve()
                finally:
                    self._dispatch.end()
                for task in list(self._owned):
                    task.cancel()
        finally:
            self._tasks = None
            self.trace.close()
            await self._transport.close()
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
        await self._registry.sync()
        self.spawn(self._registry.watch(), name=f"{self.name}.registry")
        self.spawn(self._courier.sweep(), name=f"{self.name}.deadlines")
        self.spawn(self._presence.beat(), name=f"{self.name}.heartbeat")
        actor = self._actor or self.build()
        try:
            await actor.on_start()
            self.spawn(self._dispatch.consume(actor), name=f"{self.name}.mailbox")
            self.spawn(measure_loop_lag(self.metrics), name=f"{self.name}.lag")  # not of what is loaded before
            await self._presence.become("ready")
            self.log.info("ready", incarnation=self.incarnation, address=self._transport.address)
            self.ready.set()
            await self._stopping.wait()
            await self._presence.become("draining")
            self.log.info("draining")
            await self._drain(actor)
        finally:
            await actor.on_stop()
        await self._presence.end()
        self.log.info("stopped", handled=self._dispatch.handled)

    async def _drain(self, actor: Actor) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await actor.on_drain()
        except TimeoutError:
            self.log.warning("drain_cut_short", after_s=DRAIN_S)

    # -- the wire -----------------------------------------------------------------------------------------------

    def _down(self, peer: str | bytes, reason: str) -> None:
        if isinstance(peer, bytes):
            self._dispatch.forget(peer)
            if self._tap is not None:
                self._tap.forget(peer)
            return
        refuser = self.directory.at(peer)
        if reason.startswith(LINK_REFUSED) and refuser is not None:
            self.waits.refused(refuser.name, "the link", reason.removeprefix(LINK_REFUSED), for_s=LINK_REFUSED_S)
        self._courier.lost(peer, reason)
        if not self._stopping.is_set() and self._tasks is not None:
            with suppress(RuntimeError):  # this actor ends, and need not know who else does
                self.spawn(self._registry.lost(peer), name=f"{self.name}.lost")

    def _drain_asked(self, delivery: Delivery) -> None:
        self._stopping.set()
        self._dispatch.reply(delivery, Ack())

    def _tap_asked(self, delivery: Delivery) -> None:
        if self._tap is None:
            from runtime.observe.tap import FrameTap  # only an actor that somebody taps needs it

            self._tap = FrameTap(self._transport, self._dispatch)
        self._tap.asked(delivery)

    async def _peers_changed(self, joined: set[str], left: set[str]) -> None:
        if self._actor is not None:
            await self._actor.on_peers(tuple(sorted(joined)), tuple(sorted(left)))

    # -- Context ------------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self._presence.incarnation

    def new_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}{self.incarnation:x}.{self._ids:x}"

    def spawn(self, work: Coroutine[Any, Any, ResultT], *, name: str) -> asyncio.Task[ResultT]:
        if self._tasks is None:
            work.close()
            raise RuntimeError(f"{self.name} is not running")
        context = contextvars.copy_context()
        context.run(current_deadline.set, 0.0)
        context.run(current_trace.set, b"")
        try:
            task = self._tasks.create_task(work, name=name, context=context)
        except RuntimeError:  # the group is ending
            work.close()
            raise
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

    def ref(self, target: str) -> Ref:
        return Ref(target, self._courier, self)

    def peers(self, role: str) -> tuple[str, ...]:
        return self.directory.ready(role)

    def finish(self, reason: str, *, failed: bool = False) -> None:
        # What fails on a host that joined ends that host's part of the job, not the job.
        node = self.node if failed else NODE
        self.spawn(self._finished(Finish(self.name, reason, failed), node), name=f"{self.name}.finish")

    def progress(self, step: int, steps: int, row: dict[str, float]) -> None:
        self._tell_node(Progress(step, steps, row))

    def notice(self, text: str, *, good: bool = False) -> None:
        self.log.info("notice", text=text, good=good)
        self._tell_node(Notice(self.name, text, good))

    def find(self, name: str) -> ActorRecord | None:
        return self.directory.find(name)

    async def bury(self, name: str) -> None:
        """`name`'s process is known to be dead: end its lease now and tell everybody."""
        await self._registry.bury(name)

    def resolve(self, target: str) -> ActorRecord | None:
        """A ready actor for a name, or the next instance of a role in turn."""
        found = self.directory.find(target)
        if found is not None:
            return found
        names = self.directory.ready(target)
        if not names:
            return None
        turn = self._turn[target] = (self._turn.get(target, -1) + 1) % len(names)
        return self.directory.find(names[turn])

    async def change(self) -> None:
        await self.directory.change()

    def _tell_node(self, message: Message) -> None:
        self.spawn(self._told(message), name=f"{self.name}.tell_node")

    async def _finished(self, message: Finish, node: str) -> None:
        """The node agent may be stopped, or its link broken, just now. Who was replaced while it was stopped has no say in how the job ends."""
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

    async def _told(self, message: Message) -> None:
        try:
            await self.ref(NODE).tell(message)
        except AskFailed as error:
            self.log.warning("node_agent_unreachable", message=type(message).__name__, error=str(error))

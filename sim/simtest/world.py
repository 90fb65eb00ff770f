"""A whole job on one virtual loop: processes that are started, supervised and ended as the launcher does it."""

import asyncio
import contextvars
from contextlib import suppress
from pathlib import Path
from typing import Any

from bus.errors import AskFailed
from bus.faults import FaultPlan
from bus.memory import MemoryNetwork, MemoryTransport
from bus.outbox import Frame
from bus.transport import Identity
from runtime.actor import RunInfo
from runtime.config import ActorConfig
from runtime.errors import ActorFailed, first_cause
from runtime.kernel import NODE
from runtime.messages import Finish
from runtime.store.errors import StoreError, StoreUnavailable
from sim.simtest.actors import SimBuffer, SimKernel, SimNode, SimTrainer
from sim.simtest.blobs import SimBlobClient, SimBlobServer
from sim.simtest.checks import CheckedMailbox, InvariantChecks
from sim.simtest.journal import Log, Record
from sim.simtest.loop import current_process
from sim.simtest.process import ActorProcess, Killed
from sim.simtest.setup import CLASSES, Setup, configs
from sim.simtest.store import LOSS_S, StoreClient, StoreServer

RESTART_S = 0.3
"""Between an actor's death and its next incarnation."""

EXPECTED = (ActorFailed, StoreError, AskFailed)
"""How an actor may end by itself: replaced, without its Store, or refused as the zombie it is. Anything else is a defect."""


class World:
    """`setup` says what runs; faults come from outside (see sim/inject.py)."""

    kernel_class = SimKernel

    def __init__(self, setup: Setup, folder: Path, model: Path, record: Record, monitor: InvariantChecks) -> None:
        self.setup, self.record, self.monitor = setup, record, monitor
        self.folder = folder
        self.processes: dict[str, ActorProcess] = {}
        self.zombies: list[ActorProcess] = []
        self.blobs = SimBlobServer(setup.seed, lambda text: monitor.fail("no damaged weights are taken", text))
        self.store = StoreServer(
            setup.seed,
            latency_s=setup.latency_s,
            patience_s=setup.patience_s,
            durable=setup.durable,
            reached=self._reached,
            applied=self._applied,
        )
        self.network = MemoryNetwork(FaultPlan(seed=setup.seed, delay_s=(0.0, setup.delay_s)), tap=self._sent)
        self.step = 0
        self.row_at = 0.0
        self.moved = asyncio.Event()
        """Set, and replaced, at every row and at the end."""
        self.ending: Finish | None = None
        self.stopping = False
        self.at_save: dict[str, Any] = {}
        """What happens to the trainer at a point of its next save: point → a function of its process."""
        self.at_commit: dict[str, Any] = {}
        self._model = model
        self._configs = configs(setup, model)
        self._run = RunInfo("sim", folder, setup.seed, setup.steps, 0.0 if setup.durable else LOSS_S)
        self._tasks: asyncio.TaskGroup

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start everything, as the launcher does: at once."""
        self._tasks = tasks
        self.boot(NODE)
        await self.ready(NODE)
        for name in self.setup.names:
            self.boot(name)
        for name in self.setup.names:
            await self.ready(name)

    def boot(self, name: str) -> ActorProcess:
        """A new incarnation of `name`."""
        process = self.processes[name] = ActorProcess(name)
        context = contextvars.copy_context()
        context.run(current_process.set, process)
        process.task = self._tasks.create_task(self._serve(process), name=f"serve.{name}", context=context)
        self._tasks.create_task(self._supervise(process), name=f"supervise.{name}")
        return process

    def replace(self, process: ActorProcess) -> None:
        """Another process takes its name, while it may still believe that it lives."""
        self.zombies.append(process)
        if process.transport is not None:
            self.network.unbind(process.transport.address, process.transport)
        self.boot(process.name)

    def resume(self, alpha: int) -> None:
        """The whole job is killed, and started again from its Store and checkpoints with another α."""
        self.setup = self.setup._replace(alpha=alpha)
        self._configs = configs(self.setup, self._model)
        self.monitor.alpha = alpha
        for name in self.setup.names:
            self.processes[name].kill()

    async def settled(self) -> None:
        """Return once every process of the job is up."""
        for name in self.setup.names:
            await self.ready(name)

    async def stop(self) -> None:
        """Drain everything, in the order the classes ask for, the launcher's own actor last."""
        self.stopping = True
        ranks: dict[int, list[ActorProcess]] = {}
        for name in self.setup.names:
            process = self.processes[name]
            ranks.setdefault(CLASSES[process.role].drain_order, []).append(process)
        for _, processes in sorted(ranks.items()):
            await self._drain(processes)
        await self._drain([self.processes[NODE]])

    def waiting(self) -> str:
        """What everybody waits for, in one line."""
        now = asyncio.get_running_loop().time()
        buffer: Any = self.processes["sample_buffer-1"].actor
        if isinstance(buffer, SimBuffer) and hasattr(buffer, "_book"):
            for group in buffer._book.groups.values():
                self.record.say(f"in the book: {group}")
        return "; ".join(
            f"{process.name} waits {view.age_s:.1f} s for {view.what} {view.detail}"
            for process in self.processes.values()
            if process.kernel is not None
            for view in process.kernel.waits.snapshot(now)
        )

    # -- one process --------------------------------------------------------------------------------------------

    async def _serve(self, process: ActorProcess) -> None:
        try:
            kernel = await self._build(process)
            await kernel.serve()
        except Exception as group:  # noqa: BLE001 - what ends an actor may be anything; it is judged here
            self._failed(process, first_cause(group))
        finally:
            process.alive = False
            if process.transport is not None:
                process.transport.die()
            process.ended.set()

    async def _build(self, process: ActorProcess) -> SimKernel:
        store: Any = StoreClient(self.store, process)
        process.drawn = await store.increment("incarnation")
        process.transport = MemoryTransport(
            Identity("sim", process.name, process.incarnation), self.network, f"mem://{process.name}"
        )
        actor_class = SimNode if process.name == NODE else CLASSES[process.role]
        log: Any = Log(self.record, f"{process.name}.{process.incarnation}", lambda text: self._broke(process, text))
        kernel = process.kernel = self.kernel_class(
            actor_class,
            ActorConfig() if process.name == NODE else self._configs[process.role],
            name=process.name,
            incarnation=process.incarnation,
            run=self._run,
            transport=process.transport,
            store=store,
            blobs=SimBlobClient(self.blobs, process),
            log=log,
        )
        kernel.process = process
        kernel._dispatch._mailbox = CheckedMailbox(self.monitor, process)  # pyright: ignore[reportPrivateUsage]
        self._equip(kernel.build(), process)
        return kernel

    def _equip(self, actor: Any, process: ActorProcess) -> None:
        if isinstance(actor, SimNode):
            actor.on_row, actor.on_finish = self._on_row, self._on_finish
        if isinstance(actor, SimBuffer | SimTrainer):
            actor.monitor, actor.process = self.monitor, process
        if isinstance(actor, SimTrainer):
            actor.saving = self._saving

    async def _supervise(self, process: ActorProcess) -> None:
        """Start it again after a death, unless somebody took its place."""
        await process.ended.wait()
        if process.leaving or self.stopping or self.processes.get(process.name) is not process:
            return
        self.record.say(f"{process.name}.{process.incarnation} is dead")
        node = self.processes[NODE].kernel
        if node is not None:
            with suppress(StoreUnavailable):  # its lease lapses by itself
                await node.bury(process.name)
        await asyncio.sleep(RESTART_S)
        if not self.stopping and self.processes.get(process.name) is process:
            self.boot(process.name)

    async def ready(self, name: str) -> None:
        """Return once `name` is up, whichever incarnation of it."""
        while True:
            process = self.processes[name]
            if process.alive and process.kernel is not None and process.kernel.ready.is_set():
                return
            await asyncio.sleep(0.05)

    async def _drain(self, processes: list[ActorProcess]) -> None:
        for process in processes:
            process.leaving = True
            if process.kernel is not None:
                process.kernel.stop()
        for process in processes:
            await process.ended.wait()

    def _failed(self, process: ActorProcess, error: BaseException) -> None:
        if not process.alive or isinstance(error, Killed):
            return
        self.record.say(f"{process.name}.{process.incarnation} ended: {type(error).__name__}: {error}")
        if not isinstance(error, EXPECTED):
            self.monitor.fail("no actor breaks", f"{process.name} ended with {type(error).__name__}: {error}")

    def _broke(self, process: ActorProcess, text: str) -> None:
        expected = ("StaleEpoch", "Fenced", "StoreUnavailable", "OutOfOrder")
        if process.alive and self.processes[process.name] is process and not any(kind in text for kind in expected):
            self.monitor.fail("no actor breaks", f"{process.name}: {text}")

    # -- what the world hears -----------------------------------------------------------------------------------

    def _on_row(self, step: int) -> None:
        now = asyncio.get_running_loop().time()
        self.monitor.check(list(self.processes.values()), now)
        self.step, self.row_at = max(self.step, step), now
        self._wake()

    def _on_finish(self, message: Finish) -> None:
        self.record.say(f"finish: {message.reason}")
        if message.failed:
            self.monitor.fail("the job ends well", message.reason)
        self.ending = self.ending or message
        self._wake()

    def _wake(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    def _sent(self, sender: str, receiver: str, what: Frame | str) -> None:
        self.record.frame(sender, receiver, what)
        if not isinstance(what, Frame):
            return
        if "confirm" in self.at_save and sender == "trainer-1" and b"Confirm" in what.data:
            self.at_save["confirmed"] = self.at_save.pop("confirm")
        elif "confirmed" in self.at_save and receiver == "trainer-1" and b"Ack" in what.data:
            self._saving(self.processes[receiver], "confirmed", self.step)

    def _saving(self, process: ActorProcess, point: str, step: int) -> None:
        act = self.at_save.pop(point, None)
        if act is not None and process.alive:
            act(process)

    def _reached(self, method: str) -> None:
        if method == "samples.commit" and (act := self.at_commit.pop("before", None)):
            act(self.processes["trainer-1"])

    def _applied(self, process: str, method: str, args: tuple[Any, ...], value: Any) -> None:
        self.record.call(process, method, args)
        self.monitor.applied(method, args, value)
        if method == "samples.commit" and (act := self.at_commit.pop("after", None)):
            act(self.processes["trainer-1"])

"""A whole job on one virtual loop: processes that are started, supervised and ended as the launcher does it."""

import asyncio
from pathlib import Path
from typing import Any

from rubato.actors.engines.worker import EngineWorker
from rubato.actors.envs.manager import EnvManager
from rubato.bus.errors import AskFailed
from rubato.bus.link import Frame, Identity
from rubato.bus.memory import MemoryTransport
from rubato.runtime.actor import RunInfo
from rubato.runtime.errors import ActorFailed
from rubato.runtime.kernel import NODE
from rubato.runtime.launch.agent import Hosting, JobOutcome, NodeAgent
from rubato.runtime.messages import Progress
from rubato.runtime.registry import role_of
from rubato.runtime.store.store import StoreError
from rubato.sim.simtest.actors import SimBuffer, SimEngine, SimGateway, SimKernel, SimRewards, SimTrainer
from rubato.sim.simtest.blobs import SimBlobClient, SimBlobServer
from rubato.sim.simtest.checks import CheckedMailbox, InvariantChecks
from rubato.sim.simtest.journal import Log, Record
from rubato.sim.simtest.network import FaultPlan, FaultyNetwork
from rubato.sim.simtest.process import ActorProcess, Killed, Place
from rubato.sim.simtest.setup import CLASSES, Setup, configs, job
from rubato.sim.simtest.store import LOSS_S, StoreClient, StoreServer

RESTART_S = 0.3
"""Between an actor's death and its next incarnation."""

EXPECTED = (ActorFailed, StoreError, AskFailed)
"""How an actor may end by itself: replaced, without its Store, or refused as the zombie it is. Anything else is a defect."""


class World:
    """`setup` says what runs; faults come from outside (see sim/simtest/inject.py)."""

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
        self.network = FaultyNetwork(FaultPlan(seed=setup.seed, delay_s=(0.0, setup.delay_s)), tap=self._sent)
        self.step = 0
        self.row_at = 0.0
        self.moved = asyncio.Event()
        """Set, and replaced, at every row and at the end."""
        self.ending: JobOutcome | None = None
        self.at_save: dict[str, Any] = {}
        """What happens to the trainer at a point of its next save: point → a function of its process."""
        self.at_commit: dict[str, Any] = {}
        self._model = model
        self._configs = configs(setup, model)
        self._run = RunInfo("sim", folder, setup.seed, setup.steps, 0.0 if setup.durable else LOSS_S)
        self._tasks: asyncio.TaskGroup
        self._agent: NodeAgent

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Start everything, as the launcher does: at once. Returns when all are up."""
        self._tasks = tasks
        self._boot(NODE)
        await self.ready(NODE)
        self._agent.over.add_done_callback(self._on_end)
        self._agent.start_actors()
        await self.settled()

    async def start(self, name: str) -> Place:
        """A back end of the job's host."""
        self._boot(name)
        return Place(name, self.processes.__getitem__, self._hangs)

    def _boot(self, name: str) -> None:
        process = self.processes[name] = ActorProcess(name, self._failed)
        process.begin(self._tasks, self._make)

    def replace(self, process: ActorProcess) -> None:
        """Another process takes its name, while it may still believe that it lives."""
        self.zombies.append(process)
        if process.transport is not None:
            self.network.unbind(process.transport.address, process.transport)
        self._boot(process.name)
        process.give_up()

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
        await self._agent.stop("interrupted")
        node = self.processes[NODE]
        node.drain()
        await node.ended()

    def running(self) -> list[str]:
        """Rollouts that managers play, what a gateway holds, and requests in engines, each with where it is."""
        found: list[str] = []
        for process in self.processes.values():
            actor: Any = process.actor
            if isinstance(actor, EnvManager):
                found += [f"{name} in {process.name}" for name, _ in actor._running]  # pyright: ignore[reportPrivateUsage]
                found += [f"{held} in {process.name}" for held in (actor.held() if isinstance(actor, SimGateway) else ())]
            elif isinstance(actor, EngineWorker):
                found += [f"{name} in {process.name}" for name in actor.requests.running]
        return found

    def waiting(self) -> str:
        """What all processes wait for, in one line."""
        now = asyncio.get_running_loop().time()
        buffer: Any = self.processes["sample_buffer-1"].actor
        if isinstance(buffer, SimBuffer) and hasattr(buffer, "_groups"):
            for group in buffer._groups.live.values():
                self.record.say(f"held: {group}")
        return "; ".join(
            f"{process.name} waits {view.age_s:.1f} s for {view.what} {view.detail}"
            for process in self.processes.values()
            if process.kernel is not None
            for view in process.kernel.waits.snapshot(now)
        )

    # -- one process --------------------------------------------------------------------------------------------

    async def _make(self, process: ActorProcess) -> SimKernel:
        store: Any = StoreClient(self.store, process)
        process.drawn = await store.increment("incarnation")
        # One that stood still as it started, and was replaced meanwhile, finds its successor at the name's address.
        is_replaced = self.processes[process.name] is not process
        address = f"mem://{process.name}.{process.drawn}" if is_replaced else f"mem://{process.name}"
        process.transport = MemoryTransport(Identity("sim", process.name, process.incarnation), self.network, address)
        hosting = Hosting(job(self.setup, self._configs), self, self, restart_s=(RESTART_S, RESTART_S))
        is_node = process.name == NODE
        log: Any = Log(self.record, f"{process.name}.{process.incarnation}", lambda text: self._broke(process, text))
        kernel = process.kernel = self.kernel_class(
            NodeAgent if is_node else CLASSES[process.role],
            hosting if is_node else self.config_of(process.name),
            name=process.name,
            incarnation=process.incarnation,
            run=self._run,
            transport=process.transport,
            store=store,
            blobs=SimBlobClient(self.blobs, process),
            log=log,
            hardware="" if is_node else self.hardware_of(process.name),
        )
        kernel.process = process
        kernel.dispatch._mailbox = CheckedMailbox(self.monitor, process)  # pyright: ignore[reportPrivateUsage]
        self._equip(kernel.build(), process)
        return kernel

    def config_of(self, name: str) -> Any:
        """Of one process."""
        return self._configs[role_of(name)]

    def hardware_of(self, name: str) -> str:
        """The class of one process's hardware."""
        return ""

    def _equip(self, actor: Any, process: ActorProcess) -> None:
        if isinstance(actor, NodeAgent):
            self._agent = actor
        if isinstance(actor, SimBuffer | SimEngine | SimGateway | SimRewards | SimTrainer):
            actor.monitor, actor.process = self.monitor, process
        if isinstance(actor, SimTrainer):
            actor.saving = self._saving

    async def ready(self, name: str) -> None:
        """Return once `name` is up, whichever incarnation of it."""
        while True:
            process = self.processes.get(name)
            if process is not None and process.alive and process.kernel is not None and process.kernel.ready.is_set():
                return
            await asyncio.sleep(0.05)

    def _failed(self, process: ActorProcess, error: BaseException) -> None:
        if isinstance(error, Killed):
            return
        self.record.say(f"{process.name}.{process.incarnation} ended: {type(error).__name__}: {error}")
        if not isinstance(error, EXPECTED):
            self.monitor.fail("no actor breaks", f"{process.name} ended with {type(error).__name__}: {error}")

    def _hangs(self, name: str) -> None:
        self.monitor.fail("drain", f"{name} was not drained in time: {self.waiting()}")

    def _broke(self, process: ActorProcess, text: str) -> None:
        expected = ("StaleTerm", "Fenced", "StoreUnavailable", "OutOfOrder")
        if process.alive and self.processes[process.name] is process and not any(kind in text for kind in expected):
            self.monitor.fail("no actor breaks", f"{process.name}: {text}")

    # -- what the world hears -----------------------------------------------------------------------------------

    def progress(self, message: Progress) -> None:
        now = asyncio.get_running_loop().time()
        self.monitor.check(list(self.processes.values()), now)
        self.step, self.row_at = max(self.step, message.step), now
        self._wake()

    def notice(self, text: str, *, good: bool = False) -> None:
        self.record.say(f"notice: {text}")

    def actors(self, ready: int, wanted: int) -> None:
        """Not shown."""

    def _on_end(self, over: "asyncio.Future[JobOutcome]") -> None:
        self.ending = over.result()
        self.record.say(f"the end: {self.ending.sentence}")
        if self.ending.kind != "done":
            self.monitor.fail("the job ends well", self.ending.sentence)
        self._wake()

    def _wake(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    def _sent(self, sender: str, receiver: str, what: Frame | str) -> None:
        self.record.frame(sender, receiver, what)

    def _saving(self, process: ActorProcess, point: str) -> None:
        act = self.at_save.pop(point, None)
        if act is not None and process.alive:
            act(process)

    def _reached(self, method: str, args: tuple[Any, ...]) -> None:
        if self.at_commit and self.monitor.commits(method, args) and (act := self.at_commit.pop("before", None)):
            act(self.processes["trainer-1"])

    def _applied(self, process: str, method: str, args: tuple[Any, ...], value: Any) -> None:
        self.record.call(process, method, args)
        commits = bool(self.at_commit) and self.monitor.commits(method, args)
        self.monitor.applied(method, args)
        if commits and (act := self.at_commit.pop("after", None)):
            act(self.processes["trainer-1"])

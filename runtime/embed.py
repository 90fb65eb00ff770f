"""A whole job inside the caller's own event loop: memory transport, memory store, no subprocess, no socket."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from bus.memory import MemoryNetwork, MemoryTransport
from bus.transport import Identity
from runtime.actor import Actor, ActorConfig, Context, RunInfo, handler
from runtime.blob_memory import MemoryBlobStore
from runtime.config import Config
from runtime.errors import ActorFailed
from runtime.kernel import NODE, Kernel
from runtime.messages import Finish, Notice, Progress
from runtime.observe.log import logger
from runtime.ref import Ref
from runtime.store.memory import MemoryStore
from runtime.store.store import Store


class _Listener(Actor):
    """Stands where the launcher's node agent stands: hears progress and the end."""

    role: ClassVar[str] = "node"

    def __init__(self, config: ActorConfig, context: Context) -> None:
        super().__init__(config, context)
        self.over: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.on_row: Callable[[dict[str, float]], None] | None = None

    @handler
    async def progress_made(self, message: Progress) -> None:
        if self.on_row is not None:
            self.on_row(message.row)

    @handler
    async def noticed(self, message: Notice) -> None:
        self.log.info("noticed", source=message.source, text=message.text)

    @handler
    async def finished(self, message: Finish) -> None:
        if not self.over.done():
            self.over.set_result(message)


class Job:
    """A running embedded job. `extra` actors (yours) run beside those of the config and may be asked like them."""

    def __init__(
        self,
        config: Config,
        folder: str | Path,
        *,
        extra: Mapping[str, tuple[type[Actor], ActorConfig]] | None = None,
        store: Store | None = None,
        network: MemoryNetwork | None = None,
    ) -> None:
        self._config = config
        self._extra = dict(extra or {})
        self._store = store or MemoryStore()
        self._network = network or MemoryNetwork()
        self._blobs = MemoryBlobStore()
        self._run = RunInfo(config.run.name, Path(folder), config.run.seed, config.run.steps)
        self._tasks: asyncio.TaskGroup | None = None
        self._listener: _Listener | None = None
        self.kernels: dict[str, Kernel] = {}

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start every actor in `tasks`; returns when all are ready."""
        self._tasks = tasks
        self._run.folder.mkdir(parents=True, exist_ok=True)
        self._listener = (await self._boot(NODE, _Listener, ActorConfig())).build()
        names = [f"{role}-{i + 1}" for role, spec in self._config.actors.items() for i in range(spec.count)]
        for name in names:
            role = name.rsplit("-", 1)[0]
            await self._boot(name, self._config.actor_class(role), self._config.actor_config(role))
        for name, (actor_class, config) in self._extra.items():
            await self._boot(name, actor_class, config)
        for name, kernel in self.kernels.items():
            tasks.create_task(kernel.serve(), name=name)
        for kernel in self.kernels.values():
            await kernel.ready.wait()

    def ref(self, target: str) -> Ref:
        """A reference to one of the job's actors, by name or role."""
        return self.kernels[NODE].ref(target)

    def on_row(self, callback: Callable[[dict[str, float]], None]) -> None:
        """Call `callback` with each training step's metrics, as they would be in metrics.jsonl."""
        assert self._listener is not None
        self._listener.on_row = callback

    async def done(self) -> str:
        """Wait for the job's end and return its closing sentence. Raises ActorFailed when it failed."""
        assert self._listener is not None
        finish = await self._listener.over
        if finish.failed:
            raise ActorFailed(finish.reason)
        return finish.reason

    def stop(self) -> None:
        """Drain every actor."""
        for kernel in self.kernels.values():
            kernel.stop()

    async def _boot(self, name: str, actor_class: type[Actor], config: Any) -> Kernel:
        incarnation = await self._store.increment("incarnation")
        kernel = self.kernels[name] = Kernel(
            actor_class,
            config,
            name=name,
            incarnation=incarnation,
            run=self._run,
            transport=MemoryTransport(Identity(self._run.id, name, incarnation), self._network),
            store=self._store,
            blobs=self._blobs,
            log=logger("actor").bind(actor=name, incarnation=incarnation),
        )
        return kernel


@asynccontextmanager
async def embed(config: Config, folder: str | Path, **options: Any) -> AsyncIterator[Job]:
    """Run `config`'s actors in this event loop for the length of the block; see Job for the options."""
    job = Job(config, folder, **options)
    async with asyncio.TaskGroup() as tasks:
        await job.start(tasks)
        try:
            yield job
        finally:
            job.stop()

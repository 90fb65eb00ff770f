"""A whole job inside the caller's own event loop: memory transport, memory store, no subprocess, no socket.

Nothing is supervised here: an actor that raises ends the job, and the block that embeds it raises ActorFailed.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from bus.memory import MemoryNetwork, MemoryTransport
from bus.message import Ack
from bus.transport import Identity
from runtime.actor import Actor, Context, RunInfo, handler
from runtime.blobs.blob import MemoryBlobStore
from runtime.config import ActorConfig, Config
from runtime.errors import ActorFailed, first_cause
from runtime.kernel import NODE, Kernel
from runtime.launch.folder import RunFolder
from runtime.messages import Finish, Notice, Progress
from runtime.observe.log import logger
from runtime.ref import Ref
from runtime.store.memory import MemoryStore
from runtime.store.store import Store

Row = dict[str, float]
"""One training step, as it stands in metrics.jsonl."""

Extra = Mapping[str, tuple[type[Actor], ActorConfig]]
"""Actors of the caller's by name (`role-n`), each with its config."""


class _Listener(Actor):
    """Stands where the launcher's node agent stands: hears progress, notices and the end."""

    role: ClassVar[str] = "node"

    def __init__(self, config: ActorConfig, context: Context) -> None:
        super().__init__(config, context)
        self.rows: list[Row] = []
        self.notices: list[str] = []
        self.ending: Finish | None = None
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Return at the next row, or at the end."""
        news = self._news
        await news.wait()

    @handler
    async def progress_made(self, message: Progress) -> None:
        self.rows.append(message.row)
        self._wake()

    @handler
    async def noticed(self, message: Notice) -> None:
        self.notices.append(message.text)

    @handler
    async def finished(self, message: Finish) -> Ack:
        self.ending = self.ending or message
        self.log.info("finished", source=message.source, reason=message.reason, failed=message.failed)
        self._wake()
        return Ack()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class EmbeddedJob:
    """A running embedded job, as `embed` yields it."""

    def __init__(self, config: Config, folder: Path, store: Store, network: MemoryNetwork) -> None:
        self.config = config
        self._store, self._network = store, network
        self._blobs = MemoryBlobStore()
        self._run = RunInfo(config.run.name, folder, config.run.seed, config.run.steps)
        self._kernels: dict[str, Kernel] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._listener: _Listener

    @property
    def notices(self) -> list[str]:
        """What the launcher would have shown so far, oldest first."""
        return list(self._listener.notices)

    def ref(self, target: str) -> Ref:
        """A reference to the actor `target`, or to any instance of that role."""
        return self._kernels[NODE].ref(target)

    async def rows(self) -> AsyncGenerator[Row]:
        """Each training step's metrics from the first on, as they come; ends with the job. Raises ActorFailed when it failed."""
        told = 0
        while True:
            for row in self._listener.rows[told:]:
                told += 1
                yield row
            if told < len(self._listener.rows):
                continue
            if self._ended():
                return
            await self._listener.news()

    async def done(self) -> str:
        """Wait for the job's end and return its closing sentence. Raises ActorFailed when it failed."""
        while (reason := self._ended()) is None:
            await self._listener.news()
        return reason

    async def start(self, tasks: asyncio.TaskGroup, extra: Extra) -> None:
        """Start every actor in `tasks`; returns when all are ready."""
        self._listener = (await self._boot(NODE, _Listener, ActorConfig())).build()
        for role, spec in self.config.actors.items():
            for index in range(1, spec.count + 1):
                name = f"{role}-{index}"
                await self._boot(name, self.config.actor_class(role), self.config.actor_config(role))
        for name, (actor_class, config) in extra.items():
            await self._boot(name, actor_class, config)
        for name, kernel in self._kernels.items():
            self._serving[name] = tasks.create_task(_serve(kernel), name=f"serve.{name}")
        for kernel in self._kernels.values():
            await kernel.ready.wait()

    async def stop(self) -> None:
        """Drain every actor, in the order their classes ask for: what was trained is saved."""
        ranks: dict[int, list[str]] = {}
        for name in self._serving:
            rank = self._rank(name)
            ranks.setdefault(rank, []).append(name)
        for _, names in sorted(ranks.items()):
            for name in names:
                self._kernels[name].stop()
            await asyncio.wait([self._serving[name] for name in names])

    def _rank(self, name: str) -> int:
        role = name.rsplit("-", 1)[0]
        known = self.config.actors
        return self.config.actor_class(role).drain_order if role in known else LAST if name == NODE else FIRST

    def _ended(self) -> str | None:
        finish = self._listener.ending
        if finish is not None and finish.failed:
            raise ActorFailed(finish.reason)
        return None if finish is None else finish.reason

    async def _boot(self, name: str, actor_class: type[Actor], config: Any) -> Kernel:
        incarnation = await self._store.increment("incarnation")
        kernel = self._kernels[name] = Kernel(
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


FIRST, LAST = 0, 1000
"""The caller's own actors drain before the job's, and whoever hears the last notice after them."""


@asynccontextmanager
async def embed(
    config: Config,
    folder: str | Path,
    *,
    extra: Extra | None = None,
    force: bool = False,
    store: Store | None = None,
    network: MemoryNetwork | None = None,
) -> AsyncGenerator[EmbeddedJob]:
    """Run `config`'s actors in this event loop for the length of the block.

    `folder` becomes a run folder; one that holds a run is refused (LaunchError) unless `force`, which takes away what that run wrote. `extra` actors
    run beside those of the config and may ask and be asked like them. Leaving the block drains and saves; an exception in it, or
    its cancellation, ends every actor at once. An actor that fails ends the block with ActorFailed. `config.prepare` is not run.
    """
    logging.getLogger("rubato").addHandler(
        logging.NullHandler()
    )  # the program decides where logs go, not a last resort
    held = RunFolder(Path(folder).resolve())
    held.open(resume=False, force=force, model=config.model_path)
    try:
        config.preflight(held.path)
        held.config.touch(mode=0o600)
        held.config.write_text(config.dump())
        held.commit()
        job = EmbeddedJob(config, held.path, store or MemoryStore(), network or MemoryNetwork())
        raised: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                await job.start(tasks, extra or {})
                try:
                    yield job
                except Exception as error:
                    raised = error
                    raise
                await job.stop()
        except ExceptionGroup as group:
            raise (raised or first_cause(group)) from None
    finally:
        held.close()


async def _serve(kernel: Kernel) -> None:
    try:
        await kernel.serve()
    except Exception as group:  # noqa: BLE001 - what failed an actor may be anything; it is named and handed on
        error = first_cause(group)
        said = str(error) if isinstance(error, ActorFailed) else f"{kernel.name}: {type(error).__name__}: {error}"
        raise ActorFailed(said) from error

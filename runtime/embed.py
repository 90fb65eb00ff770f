"""A whole job inside the caller's own event loop: memory transport, memory store, no subprocess, no socket.

It is hosted as a launched one is: an actor that ends is started again within its budget (`actors.ROLE.restarts`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.config import ActorConfig, Config
from rubato.runtime.config.compose import preflight
from rubato.runtime.courier import Ref
from rubato.runtime.errors import ActorFailed, LaunchError, first_cause
from rubato.runtime.host import HostedTask, TaskBackend
from rubato.runtime.kernel import NODE, Kernel
from rubato.runtime.launch.agent import Hosting, NodeAgent
from rubato.runtime.launch.folder import RunFolder
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import Progress
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import role_of
from rubato.runtime.store.store import Store

Row = dict[str, float]
"""One training step, as it stands in metrics.jsonl."""

Extra = Mapping[str, tuple[type[Actor], ActorConfig]]
"""Actors of the caller's by name (`role-n`), each with its config."""

KNOWN = "embedded"
"""Key in the Store of a job that was embedded with it."""


class _Screen:
    """Keeps for the program what a launcher would have shown."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.notices: list[str] = []
        self.news = asyncio.Event()
        """Of one more row, or of the job's end; a new one each time."""

    def progress(self, message: Progress) -> None:
        self.rows.append(message.row)
        self.wake()

    def notice(self, text: str, *, good: bool = False) -> None:
        self.notices.append(text)

    def actors(self, ready: int, wanted: int) -> None:
        """An embedded job shows no count of its actors."""

    def wake(self, _over: object = None) -> None:
        self.news.set()
        self.news = asyncio.Event()


class EmbeddedJob:
    """A running embedded job, as `embed` yields it."""

    def __init__(self, config: Config, folder: Path, store: Store, extra: Extra) -> None:
        self.config = config
        self._store, self._extra = store, extra
        self._network, self._blobs = MemoryNetwork(), MemoryBlobStore()
        window_s = 0.0 if isinstance(store, MemoryStore) else config.state.window_s
        self._run = RunInfo(config.run.name, folder, config.run.seed, config.run.steps, window_s)
        self._screen = _Screen()
        self._agent: NodeAgent

    @property
    def notices(self) -> list[str]:
        """What the launcher would have shown so far, oldest first."""
        return list(self._screen.notices)

    def ref(self, target: str) -> Ref:
        """A reference to the actor `target`, or to any instance of that role."""
        return self._agent.ref(target)

    async def rows(self) -> AsyncGenerator[Row]:
        """Each training step's metrics from the first on, as they come; ends with the job. Raises ActorFailed when it failed.

        Steps that a trainer that died trains again come again.
        """
        given = 0
        while True:
            while given < len(self._screen.rows):
                given += 1
                yield self._screen.rows[given - 1]
            if self._ended():
                return
            await self._screen.news.wait()

    async def done(self) -> str:
        """Wait for the job's end and return its closing sentence. Raises ActorFailed when it failed."""
        await asyncio.wait([self._agent.over])
        return self._ended() or ""

    # -- its life -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["EmbeddedJob"]:
        """Every actor is ready in the block; at its end all are drained, and saved."""
        async with asyncio.TaskGroup() as tasks:
            hosting = Hosting(self.config, self._screen, TaskBackend(tasks, self._make))
            kernel = await self._kernel(NODE, NodeAgent, hosting)
            agent = self._agent = kernel.build()
            agent.over.add_done_callback(self._screen.wake)
            serving = tasks.create_task(_serve(kernel), name=NODE)
            judging = tasks.create_task(self._judge(), name="embed.judge")
            await kernel.ready.wait()
            agent.start_actors()
            for name in self._extra:
                agent.start(name)
            if agent.host.names():
                await agent.all_ready.wait()
            yield self
            await agent.stop("interrupted")
            judging.cancel()
            kernel.stop()
            await serving

    async def _judge(self) -> None:
        """An actor that ended too often ends the block."""
        outcome = await self._agent.over
        if outcome.died:
            raise ActorFailed(outcome.sentence)

    def _ended(self) -> str | None:
        if not self._agent.over.done():
            return None
        outcome = self._agent.over.result()
        if outcome.kind == "failed":
            raise ActorFailed(outcome.sentence)
        return outcome.sentence

    async def _make(self, hosted: HostedTask) -> Kernel:
        name, role = hosted.name, role_of(hosted.name)
        if name in self._extra:
            return await self._kernel(name, *self._extra[name])
        pool = self._agent.places.of(name).pool
        return await self._kernel(name, self.config.actor_class(role), self.config.actor_config(role, pool), pool)

    async def _kernel(self, name: str, actor_class: type[Actor], config: Any, pool: str = "") -> Kernel:
        incarnation = await self._store.increment("incarnation")
        return Kernel(
            actor_class,
            config,
            name=name,
            incarnation=incarnation,
            run=self._run,
            transport=MemoryTransport(Identity(self._run.id, name, incarnation), self._network),
            store=self._store,
            blobs=self._blobs,
            log=logger("actor").bind(actor=name, incarnation=incarnation),
            pool=pool,
            hardware=self.config.hardware_of(role_of(name), pool),
        )


@asynccontextmanager
async def embed(
    config: Config, folder: str | Path, *, extra: Extra | None = None, force: bool = False, resume: bool = False, store: Store | None = None
) -> AsyncGenerator[EmbeddedJob]:
    """Run `config`'s actors in this event loop for the length of the block.

    `folder` becomes a run folder; one that holds a run is refused (LaunchError) unless `force`, which takes away what that run wrote, or
    `resume`, which goes on from its newest checkpoint and needs the `store` that it had: what is in no `store` of yours ends with the
    block. `extra` actors run beside those of the config and may ask and be asked like them. Leaving the block drains and saves; an exception in it, or
    its cancellation, ends every actor at once. An actor that ended more often than it may ends the block with ActorFailed.
    `config.prepare` is not run.
    """
    # The program decides where logs go, not a last resort.
    logging.getLogger("rubato").addHandler(logging.NullHandler())
    held = RunFolder(Path(folder).resolve(), embedded=True)
    if resume and (store is None or await store.get(KNOWN) is None):
        told = "the store given knows nothing of it" if store else "the state of a run without store= ended with its block"
        raise LaunchError(f"the run in {held.path} can't be resumed: {told}. Give resume=True the store= that the run had.")
    for role, name in ((role, name) for role, spec in config.actors.items() for name in spec.pools):
        if config.actors[role].pools[name].own_process:
            raise LaunchError(
                f"actors.{role}.pools.{name} gives its processes GPUs, cores or an environment of their own, and an embedded job is one "
                "process: leave gpus, cores and env out there, or launch the job."
            )
    if config.launch.hosts:
        raise LaunchError("launch.hosts asks for further hosts, and an embedded job is one process: launch the job.")
    if config.host.listen:
        raise LaunchError("host.listen is where a host's node agent serves, and an embedded job is its program's: launch the job.")
    store = store or MemoryStore()
    held.open(resume=resume, force=force, model=config.model_path)
    try:
        preflight(config, held.path)
        held.config.touch(mode=0o600)
        held.config.write_text(config.dump())
        held.commit()
        await store.write({KNOWN: b"1"})
        job = EmbeddedJob(config, held.path, store, extra or {})
        raised: Exception | None = None
        try:
            async with job.running():
                try:
                    yield job
                except Exception as error:
                    raised = error
                    raise
        except ExceptionGroup as group:
            raise (raised or first_cause(group)) from None
    finally:
        held.close()


async def _serve(kernel: Kernel) -> None:
    try:
        await kernel.serve()
    except Exception as group:  # noqa: BLE001 - named and handed on
        error = first_cause(group)
        raise ActorFailed(f"{kernel.name}: {type(error).__name__}: {error}") from error

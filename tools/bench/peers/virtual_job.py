"""A job of proxy, paced engines and orchestrator in one process and virtual time, for tools/bench/orchestrator.py: no machine is too busy for it."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rubato.actors.engines.worker import EngineWorker
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryTransport
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.log import logger
from rubato.sim.simtest.network import FaultPlan, FaultyNetwork
from tools.bench.peers.told_orchestrator import ToldOrchestrator


class VirtualAsker(Actor):
    """Asks in place of a guest."""

    role = "env_manager"


class NoWeights:
    """Blobs, of which none was published."""

    async def newest(self, name: str) -> None:
        """Of weights there are none."""


@asynccontextmanager
async def virtual_job(config: Mapping[str, Any]) -> AsyncGenerator[tuple[Actor, Actor]]:
    """Who asks, and the orchestrator, while the actors of a job's `config` run. Their network loses and delays nothing."""
    network, store = FaultyNetwork(FaultPlan(seed=1)), MemoryStore()
    kernels: list[Kernel] = []
    with TemporaryDirectory(prefix="rubato-virtual-") as folder:

        async def start(tasks: asyncio.TaskGroup, actor: type[Actor], name: str) -> Actor:
            made = actor.Config or ActorConfig
            sections = {key: config[key] for key in made.model_fields if key in config}
            incarnation = await store.increment("incarnation")
            kernel = Kernel(
                actor,
                made.model_validate(sections),
                name=name,
                incarnation=incarnation,
                run=RunInfo("bench", Path(folder), 7, 1),
                transport=MemoryTransport(Identity("bench", name, incarnation), network),
                store=store,
                blobs=NoWeights(),  # pyright: ignore[reportArgumentType] - engines of no weights ask for the newest only
                log=logger("rubato.bench"),
            )
            kernels.append(kernel)
            built = kernel.build()
            serving.append(tasks.create_task(kernel.serve()))
            await kernel.ready.wait()
            return built

        serving: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(config["actors"]["engine"]["count"]):
                await start(tasks, EngineWorker, f"engine-{number + 1}")
            await start(tasks, LLMProxy, "llm_proxy-1")
            orchestrator = await start(tasks, ToldOrchestrator, "orchestrator-1")
            asker = await start(tasks, VirtualAsker, "env_manager-1")
            await asyncio.sleep(1.0)
            yield asker, orchestrator
            for task in serving:
                task.cancel()

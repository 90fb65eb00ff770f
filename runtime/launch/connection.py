"""How a process of a run reaches the run: Store, blobs and a transport of its own."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rubato.bus.keys import Keys
from rubato.bus.link import Identity
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.blobs.blob import BlobStore
from rubato.runtime.blobs.client import BlobClient
from rubato.runtime.config import Config, load_without_types
from rubato.runtime.config.config import load_role
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.importer import use
from rubato.runtime.kernel import Kernel
from rubato.runtime.launch.card import RunCard, find_keys, running, sources
from rubato.runtime.observe.log import logger
from rubato.runtime.observe.trace import Trace, trace_path
from rubato.runtime.registry import role_of
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import Store


class RunAccess(NamedTuple):
    """Everything a kernel of this run is built from."""

    config: Config
    card: RunCard
    run: RunInfo
    store: Store
    blobs: BlobStore
    keys: Keys | None = None
    schema: str | None = None
    """Fingerprint of the job's message types; None: that of `config`, which has them all."""

    async def kernel(self, actor_class: type[Actor], config: Any, name: str, pool: str = "") -> Kernel:
        """A kernel for `name` of `pool` under a new incarnation; its endpoints are fresh, so that nothing meant for a dead one reaches its successor."""
        incarnation = await self.store.increment("incarnation")
        # Who knows no types of the job's is not compared.
        schema = self.schema or (_schema_of(self.config) if self.config.actors else "")
        identity = Identity(self.card.id, name, incarnation, schema)
        public = self.config.bus.bind(self.card.host) if self.card.host else ""
        address = f"ipc://{self.card.sockets}/{name}.{incarnation}"
        return Kernel(
            actor_class, config, name=name, incarnation=incarnation, run=self.run, store=self.store, blobs=self.blobs,
            transport=ZmqTransport(identity, address, public=public, keys=self.keys),
            trace=Trace(trace_path(self.run.folder, name)),
            log=logger("actor").bind(actor=name, incarnation=incarnation),
            node=self.card.node, pool=pool, hardware=self.config.hardware_of(role_of(name), pool),
            provides=frozenset(self.config.host.labels if name == self.card.node else ()),
        )  # fmt: skip


@asynccontextmanager
async def connect(folder: Path, *, types: bool = True, role: str = "") -> AsyncGenerator[RunAccess]:
    """Reach the run in `folder`. Raises LaunchError when there is none or it does not answer.

    Without `types` its config has no roles and no code of the user's is imported: enough to ask the node agent. With `role` it has that one
    alone, and no other actor's code is imported, unless a file of ours has changed since the launch.
    """
    folder = folder.resolve()
    card = running(folder)
    if types:
        use(folder / CODE)
    file, keys, alone = folder / "config.yaml", find_keys(folder), bool(role) and card.sources == sources()
    config = load_role(file, role) if alone else _whole(file) if types else load_without_types(file)
    async with reach(config, card, folder, keys.curve if keys else None) as connection:
        yield connection._replace(schema=card.schema) if alone else connection


@asynccontextmanager
async def reach(config: Config, card: RunCard, folder: Path, keys: Keys | None) -> AsyncGenerator[RunAccess]:
    """The run of `card`, for a process of its host that knows its config."""
    run = RunInfo(card.id, folder, config.run.seed, config.run.steps, config.state.window_s, config.hidden)
    store = RedisStore(card.url, card.id, replicated=config.state.durability == "replicated")
    blobs = BlobClient(Path(card.sockets) / "blobs.sock")
    try:
        yield RunAccess(config, card, run, store, blobs, keys)
    finally:
        await blobs.close()
        await store.close()


def _schema_of(config: Config) -> str:
    from rubato.runtime.config.schema import schema_of  # of no use where the card's holds

    return schema_of(config)


def _whole(file: Path) -> Config:
    from rubato.runtime.config.compose import load  # an actor reads its own part

    return load(file)

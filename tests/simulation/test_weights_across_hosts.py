"""Engines on other hosts than the trainer's: each host pulls a version once, all its engines read it, and cuts only delay it."""

import asyncio
from contextlib import asynccontextmanager

from msgspec import structs

from rubato.actors.engines.weights import WeightsPuller
from rubato.actors.messages.generation import GENERATION
from rubato.actors.weights.transport import BlobReceiver
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.blobs.blob import PIECE_BYTES, BlobInfo, digest_of
from rubato.runtime.blobs.blob_messages import BlobPiece, GetPiece, NotHere
from rubato.runtime.blobs.hosts import HostBlobs
from rubato.runtime.blobs.patches import put_delta
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from tests.virtual import virtual

IMAGE = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"end"
PIECES = 3

NODES: dict[str, str] = {}
"""Actor → the node agent of its host."""


class Node(HostBlobs):
    given = 0

    @handler(concurrency=64)
    async def get_piece(self, request: GetPiece) -> BlobPiece | NotHere:
        reply = await super().get_piece(request)
        self.given += isinstance(reply, BlobPiece)
        return reply


class Trainer(Actor):
    role = "trainer"


class FakeEngine:
    def __init__(self):
        self.held = (0, b"")

    async def update(self, version, image):
        self.held = (version, bytes(image))
        return 0.0


class Placed:
    """An actor of a run on several hosts."""

    def __init__(self, actor):
        self._actor, self.directory = actor, self
        self.node = NODES[actor.name]

    def __getattr__(self, name):
        return getattr(self._actor, name)

    def find(self, name):
        """As the registry of such a run tells it."""
        record = self._actor.directory.find(name)
        return structs.replace(record, node=NODES[name]) if record is not None else None


class Engine(Actor):
    role = "engine"
    provides = frozenset({GENERATION})

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.engine = FakeEngine()
        self.weights = WeightsPuller(self.engine, BlobReceiver(Placed(self)), self)

    async def on_start(self):
        await self.weights.pull()


class Job:
    def __init__(self, tasks, folder):
        self.tasks, self.folder, self.network, self.store = tasks, folder, MemoryNetwork(), MemoryStore()
        self.blobs, self.actors, self.serving = {}, {}, {}

    async def start(self, actor_class, name, host, config=None, labels=()):
        incarnation = await self.store.increment("incarnation")
        NODES[name] = f"node-{ord(host) - ord('a') + 1}"
        kernel = Kernel(
            actor_class,
            config or ActorConfig(),
            name=name,
            incarnation=incarnation,
            run=RunInfo("test", self.folder, 7, 1),
            transport=MemoryTransport(Identity("test", name, incarnation), self.network),
            store=self.store,
            blobs=self.blobs.setdefault(host, MemoryBlobStore()),
            log=logger("rubato.test"),
            provides=frozenset(labels),
        )
        self.actors[name] = kernel.build()
        self.serving[name] = self.tasks.create_task(kernel.serve(), name=name)
        await kernel.ready.wait()

    async def pull_all(self):
        async with asyncio.TaskGroup() as tasks:
            for actor in self.actors.values():
                if isinstance(actor, Engine):
                    tasks.create_task(actor.weights.pull())

    def held(self):
        return {name: actor.engine.held for name, actor in self.actors.items() if isinstance(actor, Engine)}


@asynccontextmanager
async def job(folder, pods="    "):
    """The trainer on host a, two engines on b, one each on c and d; `pods` of the four by their letters."""
    async with asyncio.TaskGroup() as tasks:
        made = Job(tasks, folder)
        for number, host in enumerate("abcd", 1):
            await made.start(Node, f"node-{number}", host, labels=[f"pod={pods[number - 1]}"] if pods.strip() else [])
        await made.start(Trainer, "trainer-1", "a")
        for number, host in enumerate("bbcd", 1):
            await made.start(Engine, f"engine-{number}", host)
        await asyncio.sleep(0)
        yield made
        for task in made.serving.values():
            task.cancel()


@virtual
async def test_each_host_pulls_a_version_once_and_every_engine_gets_it(tmp_path):
    async with job(tmp_path) as made:
        await made.blobs["a"].put("weights", 1, 1, [IMAGE])

        await made.pull_all()

        assert made.held() == {f"engine-{n}": (1, IMAGE) for n in range(1, 5)}
        assert sum(made.actors[f"node-{n}"].given for n in range(1, 5)) == 3 * PIECES
        assert made.actors["node-1"].given == 2 * PIECES


@virtual
async def test_where_little_changed_hosts_pull_that_and_a_late_joiner_the_whole(tmp_path):
    async with job(tmp_path) as made:
        await made.blobs["a"].put("weights", 1, 1, [IMAGE])
        await made.pull_all()
        changed = IMAGE[:100] + b"changed" + IMAGE[107:]
        info = BlobInfo("weights", 2, 1, digest_of(changed), len(changed))
        delta = await put_delta(made.blobs["a"], info, memoryview(changed))
        await made.blobs["a"].put("weights", 2, 1, [changed])
        before = sum(made.actors[f"node-{n}"].given for n in range(1, 5))

        await made.pull_all()
        after = sum(made.actors[f"node-{n}"].given for n in range(1, 5))
        await made.start(Node, "node-5", "e")
        await made.start(Engine, "engine-5", "e")

        assert delta.size_bytes < 200
        assert after - before == 3  # hosts, of one piece each
        assert made.held() == {f"engine-{n}": (2, changed) for n in range(1, 6)}


@virtual
async def test_a_late_engine_on_a_new_host_takes_the_same_path(tmp_path):
    async with job(tmp_path) as made:
        await made.blobs["a"].put("weights", 5, 1, [IMAGE])
        await made.start(Node, "node-5", "e")

        await made.start(Engine, "engine-5", "e")

        assert made.held()["engine-5"] == (5, IMAGE)


@virtual
async def test_a_version_enters_each_pod_once_and_goes_on_from_there(tmp_path):
    async with job(tmp_path, "xyyy") as made:
        await made.blobs["a"].put("weights", 1, 1, [IMAGE])
        await made.pull_all()

        given = {name: actor.given for name, actor in made.actors.items() if isinstance(actor, Node)}

    assert set(made.held().values()) == {(1, IMAGE)}
    assert given["node-1"] == PIECES, "to one host of the other pod alone"
    assert sum(given.values()) == 3 * PIECES


@virtual
async def test_when_the_host_by_which_a_pod_is_entered_is_dead_another_takes_its_place(tmp_path):
    async with job(tmp_path, "xyyy") as made:
        await made.blobs["a"].put("weights", 1, 1, [IMAGE])
        made.serving.pop("node-2").cancel()
        await asyncio.sleep(30.0)  # all know it by then

        async with asyncio.TaskGroup() as tasks:
            for name in ("engine-3", "engine-4"):
                tasks.create_task(made.actors[name].weights.pull())
        given = made.actors["node-1"].given

        assert made.held()["engine-3"] == made.held()["engine-4"] == (1, IMAGE)
        assert given == PIECES


@virtual
async def test_when_a_relay_is_dead_its_host_is_planned_around(tmp_path):
    async with job(tmp_path) as made:
        await made.blobs["a"].put("weights", 1, 1, [IMAGE])
        made.serving.pop("node-2").cancel()  # the relay of host b, under which d would pull
        await asyncio.sleep(0.1)

        await made.actors["engine-4"].weights.pull()

        assert made.held()["engine-4"] == (1, IMAGE)


@virtual
async def test_an_engine_whose_host_reaches_nobody_keeps_what_it_has(tmp_path):
    async with job(tmp_path) as made:
        await made.blobs["a"].put("weights", 1, 1, [IMAGE])
        await made.pull_all()
        await made.blobs["a"].put("weights", 2, 1, [IMAGE[::-1]])
        for number in (1, 2, 3):
            made.serving.pop(f"node-{number}").cancel()
        await asyncio.sleep(0.1)

        await made.actors["engine-4"].weights.pull()

        assert made.held()["engine-4"] == (1, IMAGE)

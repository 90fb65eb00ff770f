"""Blobs between hosts: each pulls once, through relays, past dead and lying ones, and never a piece twice."""

import asyncio
import functools
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from rubato.actors.messages.generation import GENERATION
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Buffer
from rubato.planning.relay import plan, ring_sources, sources
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.blobs.blob import PIECE_BYTES, BlobInfo, digest_of
from rubato.runtime.blobs.blob_messages import BlobPiece, FindNewest, GetPiece, Newest, NotHere, NotPulled, PullBlob, Pulled
from rubato.runtime.blobs.hosts import HostBlobs
from rubato.runtime.blobs.patches import FULL_EVERY, put_delta
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.sim.virtual import run_virtual

CONTENT = b"".join(bytes([n]) * PIECE_BYTES for n in range(1, 6)) + b"the end"
PIECES = 6


class Host(HostBlobs):
    """Counts the pieces it gives; `lies_about` and `stops_before` are faults."""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.given: list[int] = []
        self.lies_about: set[int] = set()
        self.stops_before = PIECES
        self.stopped = asyncio.Event()

    @handler(concurrency=64)
    async def get_piece(self, request: GetPiece) -> BlobPiece | NotHere:
        if request.index >= self.stops_before:
            self.stopped.set()
            await asyncio.get_running_loop().create_future()
        reply = await super().get_piece(request)
        if isinstance(reply, BlobPiece):
            self.given.append(request.index)
            if request.index in self.lies_about:
                return BlobPiece(Buffer(bytes(len(reply.data))))
        return reply


class Engine(Actor):
    role = "engine"
    provides = frozenset({GENERATION})


class Hosts:
    """Node agents, each with blobs of its own, and one actor that asks them."""

    def __init__(self, tasks, folder):
        self.tasks, self.network, self.store = tasks, MemoryNetwork(), MemoryStore()
        self.run = RunInfo("test", folder, 7, 1)
        self.serving, self.hosts, self.blobs = {}, {}, {}

    async def start(self, actor_class, name):
        incarnation = await self.store.increment("incarnation")
        self.blobs[name] = MemoryBlobStore()
        kernel = Kernel(
            actor_class,
            ActorConfig(),
            name=name,
            incarnation=incarnation,
            run=self.run,
            transport=MemoryTransport(Identity("test", name, incarnation), self.network),
            store=self.store,
            blobs=self.blobs[name],
            log=logger("rubato.test"),
        )
        self.hosts[name] = kernel.build()
        self.serving[name] = self.tasks.create_task(kernel.serve(), name=name)
        await kernel.ready.wait()
        return kernel

    async def kill(self, name):
        self.serving.pop(name).cancel()
        await asyncio.sleep(0.01)

    def pull(self, name, info, where, *, ways=1, delta=None):
        """Ask host `name` to pull, from the hosts `where`."""
        more = (delta.digest, delta.size_bytes) if delta else ()
        ask = self.asker.ref(name).ask(PullBlob(*info, tuple(where), ways, *more), timeout=120)
        return self.tasks.create_task(ask)

    async def put(self, version, *, delta=True):
        """CONTENT with some bytes of version `version` in it, on the first host, with what changed; both descriptions."""
        content, blobs = bytearray(CONTENT), self.blobs["node-1"]
        content[PIECE_BYTES : PIECE_BYTES + 40 * version : 40] = bytes([200]) * version
        info = BlobInfo("w", version, 1, digest_of(content), len(content))
        changed = await put_delta(blobs, info, memoryview(content)) if delta else None
        return await blobs.put("w", version, 1, [content]), changed

    def num_given(self):
        return sum(len(host.given) for host in self.hosts.values() if isinstance(host, Host))


def virtual(test):
    """Run the test in virtual time."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        return run_virtual(lambda: test(*args, **kwargs))

    return run


@asynccontextmanager
async def hosts(folder, count):
    async with asyncio.TaskGroup() as tasks:
        made = Hosts(tasks, folder)
        for number in range(1, count + 1):
            await made.start(Host, f"node-{number}")
        made.asker = await made.start(Engine, "engine-1")
        yield made
        for task in made.serving.values():
            task.cancel()


@virtual
async def test_a_blob_arrives_whole_and_is_pulled_once_however_many_ask(tmp_path):
    async with hosts(tmp_path, 2) as made:
        info = await made.blobs["node-1"].put("w", 3, 1, [CONTENT])

        asked = [made.pull("node-2", info, ["node-1"]) for _ in range(5)]
        replies = [await ask for ask in asked]
        again = await made.pull("node-2", info, ["node-1"])

        assert replies == [Pulled(("node-1",))] * 5
        assert again == Pulled(())
        assert await made.blobs["node-2"].get("w", 3) == (info, CONTENT)
        assert Counter(made.hosts["node-1"].given) == Counter(range(PIECES))


@virtual
async def test_every_host_of_a_tree_pulls_each_piece_once_and_the_root_serves_two(tmp_path):
    async with hosts(tmp_path, 9) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])
        names = sorted(made.hosts.keys() - {"engine-1"})
        tree = plan("node-1", names)

        asked = [made.pull(name, info, sources(tree, name)) for name in names]
        for name, ask in zip(names, asked, strict=True):
            assert await ask == (Pulled(()) if name == "node-1" else Pulled((tree[name],)))

        assert [bytes((await made.blobs[name].get("w", 1))[1]) for name in names] == [CONTENT] * 9
        assert made.num_given() == 8 * PIECES
        assert len(made.hosts["node-1"].given) == 2 * PIECES


@virtual
async def test_when_a_relay_dies_half_way_what_it_gave_is_not_pulled_again(tmp_path):
    async with hosts(tmp_path, 3) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])
        await made.blobs["node-2"].put("w", 1, 0, [CONTENT])
        made.hosts["node-2"].stops_before = 4

        pulling = made.pull("node-3", info, ["node-2", "node-1"])
        await made.hosts["node-2"].stopped.wait()
        ((pull, _),) = made.hosts["node-3"]._pulls.values()
        for index in range(4):
            await pull.piece(index)
        await made.kill("node-2")

        assert await pulling == Pulled(("node-2", "node-1"))
        assert sorted(made.hosts["node-2"].given) == [0, 1, 2, 3]
        assert sorted(made.hosts["node-1"].given) == [4, 5]
        assert (await made.blobs["node-3"].get("w", 1))[1] == CONTENT


@virtual
async def test_after_a_broken_link_the_same_source_goes_on_from_the_last_whole_piece(tmp_path):
    async with hosts(tmp_path, 2) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])
        source = made.hosts["node-1"]
        source.stops_before = 3

        pulling = made.pull("node-2", info, ["node-1"])
        await source.stopped.wait()
        source.stops_before = PIECES  # what was asked for meanwhile is never answered: the asks end at their deadline

        assert await pulling == Pulled(("node-1",))
        assert Counter(source.given) == Counter(range(PIECES))


@virtual
async def test_a_source_that_lies_is_named_and_left_and_its_good_pieces_are_kept(tmp_path, caplog):
    async with hosts(tmp_path, 3) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])
        await made.blobs["node-2"].put("w", 1, 0, [CONTENT])
        made.hosts["node-2"].lies_about = {5}

        alone = await made.pull("node-3", info, ["node-2"])
        helped = await made.pull("node-3", info, ["node-2", "node-1"])

        assert isinstance(alone, NotPulled)
        assert "node-2: piece 5 of blob w version 1 does not have its digest" in alone.why
        assert isinstance(helped, Pulled)
        assert (await made.blobs["node-3"].get("w", 1))[1] == CONTENT


@virtual
async def test_a_source_with_another_content_under_the_same_name_is_refused_before_a_piece_is_pulled(tmp_path):
    async with hosts(tmp_path, 3) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])
        await made.blobs["node-2"].put("w", 1, 0, [CONTENT[::-1]])

        reply = await made.pull("node-3", info, ["node-2", "node-1"])

        assert reply == Pulled(("node-1",))
        assert made.hosts["node-2"].given == []


@virtual
async def test_what_no_source_has_is_not_pulled_and_each_source_is_named(tmp_path):
    async with hosts(tmp_path, 3) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])

        reply = await made.pull("node-3", info, ["node-2", "node-9"])

        assert isinstance(reply, NotPulled)
        assert "node-2: node-2: blob w version 1 is not here" in reply.why
        assert "node-9: it is not there" in reply.why
        assert await made.blobs["node-3"].newest("w") is None


@virtual
async def test_blobs_without_a_digest_do_not_leave_their_host(tmp_path):
    async with hosts(tmp_path, 2) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT], checked=False)

        assert isinstance(await made.pull("node-2", info, ["node-1"]), NotPulled)


@virtual
async def test_an_empty_blob_travels_too(tmp_path):
    async with hosts(tmp_path, 2) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [])

        await made.pull("node-2", info, ["node-1"])

        assert await made.blobs["node-2"].newest("w") == info


@virtual
async def test_a_host_tells_its_newest_version(tmp_path):
    async with hosts(tmp_path, 1) as made:
        info = await made.blobs["node-1"].put("w", 7, 2, [b"x"])
        ref = made.asker.ref("node-1")

        assert await ref.ask(FindNewest("w"), timeout=5) == Newest(7, 2, info.digest, 1)
        assert isinstance(await ref.ask(FindNewest("other"), timeout=5), NotHere)


@virtual
async def test_around_a_ring_each_neighbour_gives_half_and_nobody_gets_a_piece_twice(tmp_path):
    async with hosts(tmp_path, 4) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])
        names = sorted(made.hosts.keys() - {"engine-1"})

        asked = [made.pull(name, info, ring_sources("node-1", names, name), ways=2) for name in names[1:]]
        for name, ask in zip(names[1:], asked, strict=True):
            assert set((await ask).sources) == set(ring_sources("node-1", names, name)[:2])

        assert Counter(made.hosts["node-1"].given) == Counter(range(PIECES))
        assert made.num_given() == 3 * PIECES
        for name in names:
            assert await made.blobs[name].get("w", 1) == (info, CONTENT)


@virtual
async def test_where_one_way_around_the_ring_is_cut_the_other_gives_everything(tmp_path):
    async with hosts(tmp_path, 3) as made:
        info = await made.blobs["node-1"].put("w", 1, 0, [CONTENT])
        await made.kill("node-3")

        reply = await made.pull("node-2", info, ("node-1", "node-3"), ways=2)

        assert reply == Pulled(("node-1",))
        assert await made.blobs["node-2"].get("w", 1) == (info, CONTENT)


@virtual
async def test_a_host_that_has_the_version_before_gets_what_changed_and_relays_it(tmp_path):
    async with hosts(tmp_path, 3) as made:
        for version in (1, 2, 3):
            info, delta = await made.put(version)
            first = made.pull("node-2", info, ["node-1"], delta=delta)
            second = made.pull("node-3", info, ["node-2", "node-1"], delta=delta)
            await asyncio.gather(first, second)

            wanted = await made.blobs["node-1"].get("w", version)
            assert await made.blobs["node-2"].get("w", version) == await made.blobs["node-3"].get("w", version) == wanted

        assert delta.size_bytes < 1000
        assert made.hosts["node-1"].given == [*range(PIECES), 0, 0]  # all of version 1, then one piece of each delta
        assert made.hosts["node-2"].given == [*range(PIECES), 0, 0]


@virtual
async def test_a_host_without_the_version_before_and_one_with_another_terms_pull_it_whole(tmp_path):
    async with hosts(tmp_path, 3) as made:
        await made.put(1)
        info, delta = await made.put(2)
        await made.blobs["node-3"].put("w", 1, 7, [CONTENT])

        for late in ("node-2", "node-3"):
            assert await made.pull(late, info, ["node-1"], delta=delta) == Pulled(("node-1",))

            assert await made.blobs[late].get("w", 2) == await made.blobs["node-1"].get("w", 2)
        assert Counter(made.hosts["node-1"].given) == Counter(dict.fromkeys(range(PIECES), 2))


@virtual
async def test_a_delta_that_makes_another_blob_is_told_and_the_blob_pulled_whole(tmp_path, caplog):
    async with hosts(tmp_path, 2) as made:
        (before, _), (info, delta) = await made.put(1), await made.put(2)
        await made.blobs["node-2"].put("w", 1, 1, [bytes(before.size_bytes)])

        await made.pull("node-2", info, ["node-1"], delta=delta)

        assert await made.blobs["node-2"].get("w", 2) == await made.blobs["node-1"].get("w", 2)
        assert "makes another blob" in caplog.text


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\1\0\0\0\xc1",
        b"\2\0\0\0\x91\x05" + bytes(5),
        b"\7\0\0\0\x96" + b"\4" * 6 + bytes(24),
        b"\7\0\0\0\x96" + b"\4" * 6 + b"\1" * 24,
    ],
)
@virtual
async def test_a_damaged_delta_is_told_and_the_blob_pulled_whole(tmp_path, caplog, broken):
    async with hosts(tmp_path, 2) as made:
        (before, _), (info, _) = await made.put(1), await made.put(2, delta=False)
        await made.pull("node-2", before, ["node-1"])
        delta = await made.blobs["node-1"].put("w.delta", 2, 1, [broken])

        await made.pull("node-2", info, ["node-1"], delta=delta)

        assert await made.blobs["node-2"].get("w", 2) == await made.blobs["node-1"].get("w", 2)
        assert "blob_not_patched" in caplog.text


@virtual
async def test_a_host_tells_of_a_delta_for_its_newest_version_alone(tmp_path):
    async with hosts(tmp_path, 1) as made:
        ref = made.asker.ref("node-1")
        await made.put(1)
        info, delta = await made.put(2)
        found = await ref.ask(FindNewest("w"), timeout=5)
        await made.put(3, delta=False)

        assert found == Newest(2, 1, info.digest, info.size_bytes, delta.digest, delta.size_bytes)
        assert (await ref.ask(FindNewest("w"), timeout=5)).delta == ""


@virtual
async def test_no_delta_is_made_of_what_changed_much_has_another_size_or_is_due_whole(tmp_path):
    blobs = MemoryBlobStore()
    old, much = bytes(1 << 16), bytes([0, 0, 1, 0]) * (1 << 14)
    for version, before, content in ((2, old, much), (2, old, old + b"x"), (FULL_EVERY, old, old), (9, None, old)):
        if before is not None:
            await blobs.put("w", version - 1, 1, [before])
        info = BlobInfo("w", version, 1, digest_of(content), len(content))

        assert await put_delta(blobs, info, memoryview(content)) is None
    assert await blobs.newest("w.delta") is None

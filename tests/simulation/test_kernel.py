"""Kernels on the memory transport: what an asker may rely on."""

import asyncio
import errno
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from rubato.bus.errors import Failed, NotSent, Unknown
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack, Message, Request
from rubato.runtime.actor import Actor, Handles, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import CountBytes, Drain, RoomWanted
from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.text import blocked_line
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import list_seen
from rubato.runtime.store.store import StoreUnavailable
from tests.virtual import virtual


class Echoed(Message, frozen=True):
    text: str


class Echo(Request[Echoed], frozen=True):
    text: str


class Fail(Request[Ack], frozen=True):
    why: str


class Hang(Request[Ack], frozen=True):
    idempotent: ClassVar[bool] = True


class Note(Message, frozen=True):
    n: int


class Server(Actor):
    role = "server"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.notes: list[int] = []
        self.hanging = 0
        self.cancelled = 0
        self.two_hang, self.one_cancelled = asyncio.Event(), asyncio.Event()

    @handler
    async def echo(self, request: Echo) -> Echoed:
        return Echoed(request.text)

    @handler
    async def fail(self, request: Fail) -> Ack:
        raise ValueError(request.why)

    @handler(concurrency=4)
    async def hang(self, request: Hang) -> Ack:
        self.hanging += 1
        if self.hanging == 2:
            self.two_hang.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.one_cancelled.set()
            raise
        return Ack()

    @handler
    async def note(self, message: Note) -> None:
        self.notes.append(message.n)


class Client(Actor):
    role = "client"


class Cluster:
    """Kernels that share a network and a store, as processes would."""

    def __init__(self, tasks: asyncio.TaskGroup, folder: Path) -> None:
        self.tasks, self.network, self.store = tasks, MemoryNetwork(), MemoryStore()
        self.run = RunInfo("test", folder, 7, 1)
        self.serving: dict[str, asyncio.Task[None]] = {}

    async def start(self, actor_class, name, schema=""):
        incarnation = await self.store.increment("incarnation")
        kernel = Kernel(
            actor_class,
            ActorConfig(),
            name=name,
            incarnation=incarnation,
            run=self.run,
            transport=MemoryTransport(Identity("test", name, incarnation, schema), self.network),
            store=self.store,
            blobs=MemoryBlobStore(),
            log=logger("rubato.test"),
        )
        actor = kernel.build()
        self.serving[name] = self.tasks.create_task(self._serve(kernel), name=name)
        await kernel.ready.wait()
        return kernel, actor

    async def kill(self, name):
        self.serving[name].cancel()
        await asyncio.wait([self.serving[name]])

    async def _serve(self, kernel):
        await kernel.serve()


@asynccontextmanager
async def cluster(folder):
    async with asyncio.TaskGroup() as tasks:
        made = Cluster(tasks, folder)
        yield made
        for task in made.serving.values():
            task.cancel()


async def test_an_ask_is_answered_with_the_typed_reply(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(Server, "server-1")
        client, _ = await made.start(Client, "client-1")

        by_role = await client.ref("server").ask(Echo("a"), timeout=5)
        by_name = await client.ref("server-1").ask(Echo("b"), timeout=5)

        assert (by_role, by_name) == (Echoed("a"), Echoed("b"))


class Shouting(Handles):
    """A plug-in."""

    @handler
    async def echo(self, request: Echo) -> Echoed:
        return Echoed(request.text.upper())

    @handler
    async def fail(self, request: Fail) -> Ack:
        return Ack()


async def test_a_plug_in_answers_what_its_actor_has_no_handler_of_its_own_for(tmp_path):
    class Equipped(Actor):
        role = "equipped"

        def __init__(self, config, kernel):
            super().__init__(config, kernel)
            self.plugins = [Shouting()]

        @handler
        async def fail(self, request: Fail) -> Ack:
            raise ValueError(request.why)

    async with cluster(tmp_path) as made:
        await made.start(Equipped, "equipped-1")
        client, _ = await made.start(Client, "client-1")

        answer = await client.ref("equipped").ask(Echo("a"), timeout=5)

        assert answer == Echoed("A")
        with pytest.raises(Failed, match="ValueError: mine"):
            await client.ref("equipped").ask(Fail("mine"), timeout=5)


async def test_the_first_message_of_a_plug_in_may_bring_it(tmp_path):
    made_for = []

    class Extended(Actor):
        role = "extended"

        def plugin_for(self, tag):
            made_for.append(tag)
            return Shouting() if tag == "Echo" else None

    async with cluster(tmp_path) as made:
        await made.start(Extended, "extended-1")
        client, _ = await made.start(Client, "client-1")
        ref = client.ref("extended")

        answers = [await ref.ask(Echo(text), timeout=5) for text in "ab"]

        assert answers == [Echoed("A"), Echoed("B")]
        assert await ref.ask(Fail("not"), timeout=5) == Ack()
        assert made_for == ["Echo"]


async def test_an_ask_waits_for_an_actor_that_is_not_there_yet(tmp_path):
    async with cluster(tmp_path) as made:
        client, _ = await made.start(Client, "client-1")
        asking = made.tasks.create_task(client.ref("server").ask(Echo("late"), timeout=5))

        await made.start(Server, "server-1")

        assert await asking == Echoed("late")


async def test_an_ask_to_nobody_ends_as_not_sent(tmp_path):
    async with cluster(tmp_path) as made:
        client, _ = await made.start(Client, "client-1")

        with pytest.raises(NotSent, match="no ready actor 'server'"):
            await client.ref("server").ask(Echo("x"), timeout=0.1)


async def test_a_handler_that_raises_fails_its_ask_and_nothing_else(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(Server, "server-1")
        client, _ = await made.start(Client, "client-1")

        with pytest.raises(Failed, match="ValueError: bad luck"):
            await client.ref("server").ask(Fail("bad luck"), timeout=5)

        assert await client.ref("server").ask(Echo("alive"), timeout=5) == Echoed("alive")


async def test_an_ask_ends_at_its_deadline_and_the_work_is_cancelled_with_the_asker(tmp_path):
    async with cluster(tmp_path) as made:
        _, server = await made.start(Server, "server-1")
        client, _ = await made.start(Client, "client-1")

        with pytest.raises(Unknown):
            await client.ref("server").ask(Hang(), timeout=0.2)
        asking = made.tasks.create_task(client.ref("server").ask(Hang(), timeout=60))
        await server.two_hang.wait()
        asking.cancel()
        await server.one_cancelled.wait()

        assert server.cancelled >= 1


async def test_more_hanging_asks_than_the_handlers_limit_do_not_block_other_messages(tmp_path):
    async with cluster(tmp_path) as made:
        _, server = await made.start(Server, "server-1")
        client, _ = await made.start(Client, "client-1")
        hanging = [made.tasks.create_task(client.ref("server").ask(Hang(), timeout=60)) for _ in range(10)]

        reply = await client.ref("server").ask(Echo("through"), timeout=5)

        assert reply == Echoed("through")
        assert server.hanging == 4
        for task in hanging:
            task.cancel()


async def test_tells_arrive_in_order_far_beyond_the_first_credit(tmp_path):
    async with cluster(tmp_path) as made:
        _, server = await made.start(Server, "server-1")
        client, _ = await made.start(Client, "client-1")
        ref = client.ref("server")

        for n in range(1000):
            await ref.tell(Note(n))
        await ref.ask(Echo("flush"), timeout=5)

        assert server.notes == list(range(1000))


async def test_an_idempotent_ask_survives_the_death_of_its_server(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(Server, "server-1")
        client, _ = await made.start(Client, "client-1")
        assert await client.ref("server").ask(Echo("before"), timeout=5) == Echoed("before")

        await made.kill("server-1")
        asking = made.tasks.create_task(client.ref("server").ask(Echo("after"), timeout=20))
        await made.start(Server, "server-1")

        assert await asking == Echoed("after")


async def test_a_drained_actor_leaves_the_directory_of_others(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(Server, "server-1")
        client, _ = await made.start(Client, "client-1")

        await client.ref("server-1").ask(Drain(), timeout=5)
        await asyncio.wait([made.serving["server-1"]])

        with pytest.raises(NotSent):
            await client.ref("server-1").ask(Echo("gone"), timeout=0.1)


@virtual
async def test_who_was_refused_for_other_message_types_and_by_whom_is_named(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(Server, "server-1", schema="newer")
        client, _ = await made.start(Client, "client-1", schema="older")
        asking = made.tasks.create_task(client.ref("server").ask(Hang(), timeout=600))

        seen = []
        for _ in range(4):
            await asyncio.sleep(7.0)
            records = [one.record for one in await list_seen(made.store)]
            seen.append([(row["holder"], row["kind"], blocked_line(row)) for row in snapshot("", records, [], {})["blocked"]])
        asking.cancel()

    assert {(holder, kind) for look in seen for holder, kind, _ in look} == {("server-1", "refused")}
    assert all("client-1 has other message types (older) than server-1 (newer)" in look[0][2] for look in seen)


@virtual
async def test_a_refused_link_is_a_wait_for_who_refused_it_and_a_broken_one_is_none(tmp_path):
    async with cluster(tmp_path) as made:
        server, _ = await made.start(Server, "server-1", schema="newer")
        refused, _ = await made.start(Client, "client-1", schema="older")
        broken, _ = await made.start(Client, "client-2", schema="newer")
        tells = [client.ref("server").tell(Note(1)) for client in (refused, broken)]

        await asyncio.gather(*tells)
        await asyncio.sleep(1.0)
        broken.transport._lose(broken.transport._links[server.transport.address], "refused: a word that means nothing")
        views = [client.waits.snapshot(asyncio.get_running_loop().time()) for client in (refused, broken)]

    said = "client-1 has other message types (older) than server-1 (newer)"
    assert [(view.what, view.holder, view.stage) for view in views[0]] == [("the link", "server-1", "refused")]
    assert views[0][0].detail.startswith(said)
    assert views[1] == []


class AwayStore(MemoryStore):
    """Answers until it is away; then each change fails after a while, as behind a link that is down."""

    away = False

    async def lease(self, name, token, value, ttl_s):
        await self._answer()
        return await super().lease(name, token, value, ttl_s)

    async def release(self, name, token):
        await self._answer()
        return await super().release(name, token)

    async def _answer(self):
        if self.away:
            await asyncio.sleep(20.0)
            raise StoreUnavailable("the store is away")


@virtual
async def test_an_actor_can_be_stopped_while_the_store_is_away(tmp_path):
    async with cluster(tmp_path) as made:
        made.store = AwayStore()
        kernel, _ = await made.start(Server, "server-1")
        made.store.away = True

        kernel.stop()
        await made.serving["server-1"]

    assert made.serving["server-1"].exception() is None


class Node(Actor):
    """Notes who waits for room."""

    role = "node"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.wanted = []

    @handler
    async def room_wanted(self, message: RoomWanted) -> None:
        self.wanted.append((message.source, message.path))


class Disk:
    """Takes what is written, or has no room for it."""

    def __init__(self) -> None:
        self.full, self.written, self.tries = True, [], 0

    def write(self, what):
        self.tries += 1
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append(what)


@virtual
async def test_what_is_written_to_a_full_disk_waits_for_room_and_the_first_and_the_last_wait_are_told(tmp_path):
    async with cluster(tmp_path) as made:
        _, node = await made.start(Node, "node-1")
        _, server = await made.start(Server, "server-1")
        disk = Disk()

        writing = [made.tasks.create_task(server.on_disk(tmp_path, disk.write, number)) for number in (1, 2)]
        await asyncio.sleep(3600.0)
        waited = [task.done() for task in writing]
        told = list(node.wanted)
        disk.full = False
        await asyncio.wait(writing)
        await asyncio.sleep(1.0)

    assert waited == [False, False]
    assert sorted(disk.written) == [1, 2]
    assert told == [("server-1", str(tmp_path))]
    assert node.wanted[1:] == [("server-1", "")]


@virtual
async def test_who_is_to_stop_waits_for_room_no_longer(tmp_path):
    async with cluster(tmp_path) as made:
        await made.start(Node, "node-1")
        kernel, server = await made.start(Server, "server-1")
        asyncio.get_running_loop().call_later(60.0, kernel.stop)

        with pytest.raises(OSError, match="No space left"):
            await server.on_disk(tmp_path, Disk().write, 1)


@virtual
async def test_what_a_disk_refuses_for_another_reason_is_raised_at_once(tmp_path):
    def refuse():
        raise OSError(errno.EIO, "Input/output error")

    async with cluster(tmp_path) as made:
        _, server = await made.start(Server, "server-1")

        with pytest.raises(OSError, match="Input/output"):
            await server.on_disk(tmp_path, refuse)


async def test_a_kernel_counts_what_it_was_told_and_answered_once_and_in_the_direction_in_which_it_went(tmp_path):
    async with cluster(tmp_path) as made:
        _, server = await made.start(Server, "server-1")
        _, client = await made.start(Client, "client-1")
        _, other = await made.start(Client, "client-2")
        await client.ref("server-1").ask(Echo("a" * 1000), timeout=5)
        await client.ref("server").begin(Echo("a" * 500), timeout=5, trace=b"")
        await client.ref("server-1").tell(Note(1))

        of_client = await other.ref("client-1").ask(CountBytes(), timeout=5)
        of_server = await other.ref("server-1").ask(CountBytes(), timeout=5)

        assert 1500 < of_client.sent["server-1"] < 1530
        assert 1500 < of_client.came["server-1"] < 1520
        assert not of_server.sent.keys() | of_server.came.keys() & {"client-1"}
        assert of_server.incarnation == server.incarnation

"""A SampleBuffer on a store that outlives it: it can be killed before or after any write, and started again."""

import asyncio
import copy
import inspect
from array import array
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest

from rubato.actors.config import SamplesSection, StalenessSection, TrainSection
from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Admit, Put, Segment, Trajectory
from rubato.actors.samples.buffer import SampleBuffer
from rubato.actors.samples.group import SampleEnd
from rubato.actors.samples.journal import ENDS
from rubato.bus.errors import NotSent
from rubato.runtime.actor import RunInfo
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.figures import Metrics, Waits
from rubato.runtime.observe.log import logger
from rubato.runtime.observe.trace import Trace
from rubato.runtime.registry import ActorRecord
from rubato.runtime.store.store import Fenced, StoreUnavailable

NAMES = ("write", "increment")
"""Store calls that change something."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """Never waits: when nothing is ready its time jumps to the next timer; without one the test is stuck and fails."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self._select = self._selector.select
        self._selector.select = self._jump

    def time(self):
        return self.now

    def _jump(self, timeout=None):
        if timeout is None:
            raise RuntimeError("nothing is ready and no timer is set: the test waits for an event that nobody sets")
        self.now += max(0.0, timeout)
        return self._select(0)


class Killed(Exception):
    """The process died in the middle of a store call."""


class Wire:
    """A process's view of a store: calls take a moment, may find it away, and may be the process's last."""

    def __init__(self, inner, process):
        self._inner, self._process = inner, process

    def __getattr__(self, name):
        member = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(member):
            return member

        async def call(*args, **kwargs):
            await asyncio.sleep(0)
            self._process.meets(name, before=True)
            result = await member(*args, **kwargs)
            self._process.meets(name, before=False)
            await asyncio.sleep(0)
            return result

        return call


class Process:
    """One incarnation, also its kernel. `spare` counts the writes it may still make; then it dies, before or after the next."""

    def __init__(self, stage, incarnation, *, spare=None, before=True):
        self.stage, self.spare, self.before = stage, spare, before
        self.name, self.incarnation, self.run = "sample_buffer-1", incarnation, stage.run_info
        self.store, self.blobs = Wire(stage.store, self), None
        self.log, self.metrics, self.waits = logger("test"), Metrics(), Waits()
        self.trace = Trace(None)
        self.node = "node-1"
        self.directory = SimpleNamespace(ready=self.peers, find=lambda _: None)
        self.finish = lambda reason, failed=False: stage.finished.append((reason, failed))
        self.progress = None
        self.notice = stage.notices.append
        self.dead = asyncio.Event()
        self.owned = set()
        self.told = []

    def meets(self, name, *, before):
        if self.dead.is_set():
            raise Killed
        if self.stage.away:
            raise StoreUnavailable("the store is away")
        if self.spare is None or name not in NAMES or before != self.before:
            return
        self.spare -= 1
        if self.spare < 0:
            self.dead.set()
            raise Killed

    def spawn(self, work, *, name):
        task = self.stage.tasks.create_task(self._own(work), name=name)
        self.owned.add(task)
        task.add_done_callback(self.owned.discard)
        task.add_done_callback(lambda _: work.close())
        return task

    async def _own(self, work):
        try:
            return await work
        except (Killed, Fenced):
            self.kill()

    def kill(self):
        self.dead.set()
        for task in list(self.owned):
            task.cancel()

    async def offload(self, fn, *args, cost_s=0.0):
        return await self.in_thread(fn, *args, cost_s=cost_s)

    async def on_disk(self, path, write, *args):
        return await self.offload(write, *args)

    async def in_thread(self, fn, *args, cost_s=0.0):
        """A test may replace it."""
        await asyncio.sleep(cost_s)
        return fn(*args)

    def peers(self, role):
        return tuple(sorted(name for name in self.stage.present if name.rpartition("-")[0] == role))

    def ref(self, target):
        return Teller(target, self)


class Teller:
    def __init__(self, name, process):
        self.name, self._process = name, process

    async def tell(self, message):
        if self.name not in self._process.stage.present:
            raise NotSent(self.name)
        self._process.told.append((self.name, message))


class Stage:
    """What stays when the buffer dies: the store, the run folder, the other actors."""

    def __init__(self, folder, **config):
        self.folder = folder
        self.run_info = RunInfo("test", folder, 7, config.pop("steps", 100), config.pop("window_s", 0.0))
        self.config = SampleBuffer.Config(
            staleness=StalenessSection(alpha=config.pop("alpha", 1), stragglers=config.pop("stragglers", "wait")),
            train=TrainSection(
                batch_groups=config.pop("batch_groups", 2),
                group_size=config.pop("group_size", 2),
                dynamic_sampling=config.pop("dynamic_sampling", False),
            ),
            samples=SamplesSection(**config),
        )
        self.present = {"env_manager-1"}
        self.away = False
        self.incarnation = 0
        self.notices = []
        self.finished = []
        self.process = None
        self.buffer = None
        self.ready = asyncio.Event()
        self.faults = None
        """A random.Random: every incarnation dies after some writes."""

    def run(self, scene):
        """Play `await scene()` on a loop whose time jumps."""

        async def main():
            self.store = MemoryStore()
            for name in self.present:
                await self.lives(name)
            async with asyncio.TaskGroup() as self.tasks:
                await scene()
                if self.process is not None:
                    self.process.kill()

        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(main())

    async def lives(self, name, incarnation=1, state="ready"):
        """Its lease, as its kernel keeps it."""
        record = ActorRecord(name, name.rpartition("-")[0], "", incarnation, 1, "host", state)
        await self.store.lease(f"actor/{name}", incarnation, msgspec.msgpack.encode(record), 1e6)

    async def start(self, **fault):
        """A new incarnation, after the end of the one before; one that dies as it starts is followed by another."""
        self.ready.clear()
        while True:
            if self.process is not None:
                self.process.kill()
            if self.faults is not None:
                fault = {"spare": self.faults.randrange(2, 20), "before": self.faults.random() < 0.5}
            self.incarnation += 1
            self.process = Process(self, self.incarnation, **fault)
            buffer, fault = SampleBuffer(self.config, self.process), {}
            starting = self.tasks.create_task(self._begin(buffer))
            dying = self.tasks.create_task(self.process.dead.wait())
            await asyncio.wait((starting, dying), return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            starting.cancel()
            if self.process.dead.is_set():
                continue
            starting.result()
            self.buffer = buffer
            self.ready.set()
            return buffer

    async def ask(self, handler, request):
        """The reply; where the buffer dies meanwhile it is started again and asked again."""
        while True:
            await self.ready.wait()
            process = self.process
            work = self.tasks.create_task(self._call(handler, request))
            dying = self.tasks.create_task(process.dead.wait())
            await asyncio.wait((work, dying), return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            if work.done() and work.result() is not Killed:
                return work.result()
            work.cancel()
            if self.process is process:
                await self.start()

    async def _begin(self, buffer):
        with suppress(Killed):
            await buffer.on_start()

    async def _call(self, handler, request):
        try:
            return await getattr(self.buffer, handler)(request)
        except Killed:
            return Killed

    async def admit(self, num=100, holder="env_manager-1", incarnation=1, wait_s=0.0):
        reply = await self.buffer.admit(Admit(num, holder, incarnation, wait_s))
        return list(reply.tickets)

    async def put(self, ticket, reward=1.0, version_first=None):
        return (await self.buffer.put(Put(trajectory_of(ticket, reward, version_first)))).fate

    async def fates(self):
        """Fate by trajectory id, from the Store itself; an id that ended twice fails."""
        ended = await ends_of(self.store)
        found = {end.trajectory_id: end.fate for end in ended}
        assert len(found) == len(ended)
        return found

    async def trained(self):
        """Fate, step and term by trajectory id; an id that ended twice fails."""
        await self.fates()
        return {end.trajectory_id: (end.fate, end.step, end.term) for end in await ends_of(self.store)}


async def ends_of(store):
    """The whole log of ends."""
    found = []
    while entries := await store.read(ENDS, len(found)):
        found += [msgspec.msgpack.decode(value, type=SampleEnd) for _, value in entries]
    return found


def remember(store):
    """What the Store forgets when the returned function is called, as a server does that was killed: all but leases."""

    def state():
        plain = {name: store.__dict__[name] for name in ("_keys", "_fences")}
        streams = {name: (stream.entries, stream.last) for name, stream in store._streams.items()}
        return copy.deepcopy((plain, streams))

    before = state()

    def forget():
        plain, streams = copy.deepcopy(before)
        store.__dict__.update(plain)
        for name, stream in store._streams.items():
            stream.entries, stream.last = streams.get(name, (deque(), 0))
        store.counters.life += 1

    return forget


def slow(monkeypatch, name, *, before=0.0, after=0.0, when=lambda n, args: True):
    """The n-th call of a MemoryStore's method for which `when(n, args)` takes effect, or is answered, late."""
    inner, calls = getattr(MemoryStore, name), []

    async def late(self, *args, **options):
        calls.append(args)
        chosen = when(len(calls), args)
        if chosen and before:
            await asyncio.sleep(before)
        result = await inner(self, *args, **options)
        if chosen and after:
            await asyncio.sleep(after)
        return result

    monkeypatch.setattr(MemoryStore, name, late)
    return calls


def trajectory_of(ticket, reward=1.0, version_first=None, num_tokens=4):
    version = ticket.version if version_first is None else version_first
    segment = Segment(
        tokens=array("i", range(num_tokens)).tobytes(),
        mask=bytes([0] + [1] * (num_tokens - 1)),
        logprobs=array("f", [-0.5] * num_tokens).tobytes(),
        spans=(VersionSpan(version, 1, num_tokens),),
    )
    return Trajectory(
        ticket=ticket,
        segments=(segment,),
        reward=reward,
        turns=3,
        truncated=False,
        wall_s=0.25,
        finish_reasons=("stop", "length", "stop"),
        cut=True,
        scores={"env": 0.75 * reward, "exact": 0.25 * reward},
    )


@pytest.fixture
def make_stage(tmp_path):
    """`make_stage(alpha=1, batch_groups=2, group_size=2, steps=100, ticket_ttl_s=…)`."""
    return lambda **config: Stage(tmp_path, **config)


@pytest.fixture
def stage(make_stage):
    return make_stage()


@pytest.fixture
def trajectory():
    """`trajectory(ticket, reward=1.0, version_first=None, num_tokens=4)`."""
    return trajectory_of


@pytest.fixture(name="slow")
def slow_fixture(monkeypatch):
    """`slow("write", before=…, after=…, when=lambda n, args: …)`."""
    return lambda name, **options: slow(monkeypatch, name, **options)


@pytest.fixture(name="remember")
def remember_fixture():
    """`forget = remember(stage.store)`."""
    return remember

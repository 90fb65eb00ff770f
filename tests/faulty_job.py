"""A whole job on virtual time that can be made to fail: the real actors and node agent, with faults in what they host or in their processes."""

import asyncio
import contextvars
import json
import math
import struct
from contextlib import asynccontextmanager

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rubato.actors.cluster.lease import finished
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.envs.hosting import EnvHost
from rubato.actors.envs.manager import EnvManager
from rubato.actors.messages.generation import Generate, GenerateReply
from rubato.actors.messages.samples import Put, Scores, Stored
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.rewards.service import RewardService
from rubato.actors.samples.buffer import SampleBuffer
from rubato.actors.training.train_engine import StepResult
from rubato.actors.training.trainer import Trainer
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.runtime.actor import RunInfo, handler
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.host import Ending, HostedTask, TaskBackend
from rubato.runtime.kernel import NODE, Kernel
from rubato.runtime.launch.agent import Hosting, NodeAgent
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import list_seen, role_of
from rubato.sim.virtual import VirtualLoop

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="")
"""Whose process a callback belongs to."""

RESTART_S = 8.0
"""Until a killed actor comes back, as one does that loads a large model."""

SLOW_S = 1.5
"""A call of a slow part; a healthy one takes some hundredths of a second."""

STARVED_S = 0.9
"""Of each second in which a starved process gets no processor time."""

TRAIN_S = 0.05

JOB = {
    "run": {"name": "faulty", "steps": 100_000, "watch_s": 3.0},
    "actors": {
        "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
        "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
        "engine": {"class": "rubato.actors.engines.worker:EngineWorker", "count": 2},
        "env_manager": {"class": "rubato.actors.envs.manager:EnvManager"},
        "reward_service": {"class": "rubato.actors.rewards.service:RewardService"},
        "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
    },
    "model": {"path": "model"},
    "env": {"isolation": "inline", "concurrency": 6},
    "engine": {"kind": "scripted", "num_slots": 4, "scripted": {"token_s": 0.01, "vocab_size": 257}},
    "rollout": {"max_turns": 3, "max_new_tokens": 2},
    "reward": {"functions": ["ours:score"]},
    "train": {"batch_groups": 2, "group_size": 2},
    "check": {"enabled": False},
    "eval": {"every": 0, "final_num_tasks": 0},
    "checkpoint": {"every": 100_000},
}


class FreezingLoop(VirtualLoop):
    """A virtual loop on which the callbacks of one process can be held back, as SIGSTOP does."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed, limit_s=600.0)
        self._held: dict[str, list[asyncio.Handle]] = {}
        self.frozen: set[str] = set()

    @staticmethod
    def running() -> "FreezingLoop":
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FreezingLoop)
        return loop

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)

    @classmethod
    def run(cls, main, seed: int | None = None):
        """As run_virtual, on a loop of this kind."""
        loop = cls(seed)
        try:
            return loop.run_until_complete(loop.create_task(main(), name="main"))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def thaw(self, name: str) -> None:
        self.frozen.discard(name)
        self._queue.extend(self._held.pop(name, []))

    def _draw(self) -> asyncio.Handle:
        while True:
            handle = super()._draw()
            owner = handle._context.get(OWNER, "")
            if owner not in self.frozen:
                return handle
            self._held.setdefault(owner, []).append(handle)
            self._wake_due()


class Faults:
    """What goes wrong in the code that actors host, by actor name."""

    def __init__(self) -> None:
        self.hang: set[str] = set()
        self.slow: set[str] = set()
        self.refused: dict[str, float] = {}
        """When an actor last refused what was asked of it."""
        self._hanging: dict[str, list[float]] = {}

    def hangs_since(self, name: str) -> float:
        """When the oldest call that still hangs there began; infinity where none does."""
        return min(self._hanging.get(name, []), default=math.inf)

    async def suffer(self, name: str) -> None:
        if name in self.hang:
            now, hanging = FreezingLoop.running().time(), self._hanging.setdefault(name, [])
            hanging.append(now)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                hanging.remove(now)
        if name in self.slow:
            await asyncio.sleep(SLOW_S)


class Job:
    """The running job, and the hand that breaks it."""

    def __init__(self, folder) -> None:
        self.folder, self.config = folder, from_mapping(JOB)
        self.store, self.network, self.blobs = MemoryStore(), MemoryNetwork(), MemoryBlobStore()
        self.faults = Faults()
        self.told: list[str] = []
        self.stopped: set[str] = set()
        self.starving: list[asyncio.Task[None]] = []
        self.classes = _classes(self.faults)
        self.processes: dict[str, Process] = {}
        self.tasks: asyncio.TaskGroup
        self.agent: NodeAgent

    def process(self, name: str) -> "Process":
        self.processes[name] = Process(self, name)
        return self.processes[name]

    async def make(self, process: "Process") -> Kernel:
        role = role_of(process.name)
        return await self.kernel(self.classes[role], self.config.actor_config(role), process.name)

    async def kernel(self, actor_class, config, name) -> Kernel:
        incarnation = await self.store.increment("incarnation")
        return Kernel(
            actor_class,
            config,
            name=name,
            incarnation=incarnation,
            run=RunInfo("faulty", self.folder, 1, self.config.run.steps),
            transport=MemoryTransport(Identity("faulty", name, incarnation), self.network),
            store=self.store,
            blobs=self.blobs,
            log=logger("test").bind(actor=name),
        )

    async def blocked(self):
        """What `monitor --why` would say now."""
        seen = await list_seen(self.store)
        silent = {one.record.name: one.silent_s for one in seen}
        return snapshot("faulty", [one.record for one in seen], [], {}, silent=silent)["blocked"]

    async def step(self, number: int) -> None:
        """Return once the trainer published version `number`."""
        while (newest := await self.blobs.newest("weights")) is None or newest.version < number:
            assert not self.agent.over.done(), self.agent.over.result().sentence
            await asyncio.sleep(0.1)

    def bites(self, name: str, kind: str, for_s: float) -> bool:
        """Whether somebody ran into the fault, and is still held up by it after `for_s` seconds where it hangs."""
        if kind == "hang":
            return self.faults.hangs_since(name) <= FreezingLoop.running().time() - for_s
        last = self.faults.refused.get(name, -math.inf)
        return kind != "refuse" or last >= FreezingLoop.running().time() - for_s

    # -- faults -------------------------------------------------------------------------------------------------

    def inflict(self, name: str, kind: str) -> None:
        """One of hang, slow (in hosted code), kill, stop, starve (of a process), refuse (everything that is asked of it)."""
        getattr(self, f"_{kind}")(name)

    def _hang(self, name: str) -> None:
        self.faults.hang.add(name)

    def _slow(self, name: str) -> None:
        self.faults.slow.add(name)

    def _kill(self, name: str) -> None:
        self.processes[name].kill()

    def _stop(self, name: str) -> None:
        self.stopped.add(name)
        FreezingLoop.running().frozen.add(name)

    def _starve(self, name: str) -> None:
        async def take_turns() -> None:
            while True:
                FreezingLoop.running().frozen.add(name)
                await asyncio.sleep(STARVED_S)
                FreezingLoop.running().thaw(name)
                await asyncio.sleep(1.0 - STARVED_S)

        self.starving.append(self.tasks.create_task(take_turns(), context=contextvars.Context()))

    def _refuse(self, name: str) -> None:
        dispatch = self.processes[name].kernel.dispatch
        dispatch.incarnation += 1
        refuse = dispatch._refuse

        def refuse_and_note(delivery, kind) -> None:
            self.faults.refused[name] = FreezingLoop.running().time()
            refuse(delivery, kind)

        dispatch._refuse = refuse_and_note


class Process(HostedTask):
    """An actor whose callbacks know whose they are, so that they can be held back."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(name)
        self.job = job
        self.context = contextvars.Context()
        self.context.run(OWNER.set, name)

    def is_stopped(self) -> bool:
        return self.name in self.job.stopped

    def kill(self) -> None:
        FreezingLoop.running().thaw(self.name)
        self.kernel.transport.die()
        super().kill()
        self._ending = Ending("signal 9")


class Screen:
    """What the user was told."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def progress(self, message) -> None: ...
    def actors(self, ready, wanted) -> None: ...

    def notice(self, text, *, good=False) -> None:
        self._told.append(text)


@asynccontextmanager
async def starting(folder):
    """A job whose actors are being started; it ends without ceremony."""
    write_tokenizer(folder / "model")
    job = Job(folder)
    async with asyncio.TaskGroup() as tasks:
        job.tasks = tasks
        backend = TaskBackend(tasks, job.make, job.process)
        hosting = Hosting(job.config, Screen(job.told), backend, restart_s=(RESTART_S, RESTART_S), watches=True)
        kernel = await job.kernel(NodeAgent, hosting, NODE)
        job.agent = agent = kernel.build()
        node = job.process(NODE)
        node.begin(tasks, lambda _: _given(kernel))
        await kernel.ready.wait()
        agent.start_actors()
        try:
            yield job
        finally:
            for task in job.starving:
                task.cancel()
            agent.host.kill_all()
            node.kill()


@asynccontextmanager
async def running(folder):
    """A job that has trained some steps."""
    async with starting(folder) as job:
        await job.step(20)
        yield job


async def _given(kernel: Kernel) -> Kernel:
    return kernel


def _classes(faults: Faults):
    class Buffer(SampleBuffer):
        @handler(concurrency=1024)
        async def put(self, request: Put) -> Stored:
            await faults.suffer(self.name)
            return await super().put(request)

    class Proxy(LLMProxy):
        @handler(concurrency=4096)
        async def generate(self, request: Generate) -> GenerateReply:
            await faults.suffer(self.name)
            return await super().generate(request)

    class Worker(EngineWorker):
        async def on_start(self):
            await super().on_start()
            generate = self._engine.generate

            async def generate_with_faults(work):
                await faults.suffer(self.name)
                async for chunk in generate(work):
                    yield chunk

            self._engine.generate = generate_with_faults

    class Manager(EnvManager):
        def __init__(self, config, kernel):
            super().__init__(config, kernel)
            host = Host(config.env)
            host.suffer = lambda: faults.suffer(self.name)
            self._hosts = {"": host}

    class Rewards(RewardService):
        def __init__(self, config, kernel):
            super().__init__(config, kernel)
            self._scorer = Scorer(lambda: faults.suffer(self.name))

    class ToyTrainer(Trainer):
        def __init__(self, config, kernel):
            super().__init__(config, kernel)
            self.offload = self._suffer_and_offload

        def _build(self):
            return ToyEngine()

        async def _suffer_and_offload(self, fn, *args, cost_s=0.0):
            if fn is finished:
                await faults.suffer(self.name)
                cost_s = TRAIN_S
            return await self._kernel.offload(fn, *args, cost_s=cost_s)

    return {
        "sample_buffer": Buffer,
        "llm_proxy": Proxy,
        "engine": Worker,
        "env_manager": Manager,
        "reward_service": Rewards,
        "trainer": ToyTrainer,
    }


class Host(EnvHost):
    """Environments that may hang or dawdle in `step`."""

    async def start(self):
        await super().start()
        inner, host = self._class, self

        class Env:
            def __init__(self, **kwargs):
                self._env = inner(**kwargs)
                self.reset, self.close = self._env.reset, self._env.close

            async def step(self, action):
                await asyncio.sleep(0.005)
                await host.suffer()
                return self._env.step(action)

        self._class = Env


class Scorer:
    """In place of worker processes."""

    def __init__(self, suffer) -> None:
        self._suffer, self._num = suffer, 0

    async def start(self):
        return ""

    async def close(self) -> None: ...

    async def score(self, requests):
        await asyncio.sleep(0.005)
        await self._suffer()
        self._num += 1
        return [Scores((float(self._num % 2),)) for _ in requests]


class ToyEngine:
    """Learns nothing, in no time."""

    num_ranks = 1

    def load(self, model_dir, checkpoint):
        return 0, 0

    def train(self, step, groups):
        return StepResult({"reward/mean": 0.0}, 1)

    def parts(self, step, groups):
        yield
        return self.train(step, groups)

    def image_bytes(self):
        return 10

    def export(self, memory):
        memory[:] = struct.pack("<Q", 2) + b"{}"
        return lambda: None


def write_tokenizer(folder) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<e>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    settings = {"eos_token": "<e>", "add_bos_token": False, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

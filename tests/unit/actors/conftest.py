"""What one actor needs around it in a unit test: a loop whose time jumps to the next timer, a kernel without a bus, and a model folder
with a byte-level tokenizer and a ChatML template, as small as they come."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rubato.actors.messages.generation import GENERATION
from rubato.bus.errors import NotSent
from rubato.runtime.actor import RunInfo
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.figures import Metrics, Waits
from rubato.runtime.observe.log import logger
from rubato.runtime.observe.trace import Trace
from rubato.runtime.registry import NODE


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


class FakeRef:
    def __init__(self, context, target):
        self.name, self._context = target, context

    async def ask(self, request, *, timeout, retry=True):
        """Like the real one: waits for an actor that is not there, up to the deadline."""
        self._context.asked.append((self.name, request))
        try:
            async with asyncio.timeout(timeout):
                while self.name not in self._context.actors:
                    await self._context.changed.wait()
        except TimeoutError:
            raise NotSent(f"no ready actor {self.name!r} before the deadline") from None
        return await self._context.actors[self.name](request)

    def begin(self, request, *, timeout, trace):
        """Always has to wait first, and so is asked in a task."""

    async def tell(self, message):
        if self.name not in self._context.actors:
            raise NotSent(f"no ready actor {self.name!r}")
        await self._context.actors[self.name](message)


class FakeKernel:
    """Peers are plain async functions in `actors`, by name; `asked`, `notices` keep what the actor did; `records` is its registry."""

    def __init__(self, name, tasks, store):
        self.name = name
        self.node = NODE
        self.incarnation = 1
        self.run = RunInfo("test", Path("run"), 1, 1)
        self.store = store
        self.blobs = None
        self.log = logger("test")
        self.metrics = Metrics()
        self.waits = Waits()
        self.trace = Trace(None)
        self.directory = self
        self.tasks = tasks
        self.changed = asyncio.Event()
        self.actors: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.notices: list[str] = []
        self.records: dict[str, Any] = {}
        self.spawned: list[asyncio.Task] = []

    def spawn(self, work, *, name):
        task = self.tasks.create_task(work, name=name)
        self.spawned.append(task)
        return task

    def ref(self, target):
        return FakeRef(self, target)

    def ready(self, what):
        role = "engine" if what == GENERATION else what
        return tuple(sorted(name for name in self.actors if name.rpartition("-")[0] == role or name == role))

    def find(self, name):
        return self.records.get(name)

    def names(self):
        return dict.fromkeys(self.actors, 1)

    def notice(self, text, *, good=False):
        self.notices.append(text)

    async def offload(self, fn, *args, cost_s=0.0):
        return fn(*args)

    def finish(self, reason, *, failed=False):
        raise AssertionError(f"the job was ended: {reason}")

    def progress(self, step, row):
        raise AssertionError(f"step {step} was told of")


@pytest.fixture
def on_stage():
    """`on_stage(play)`: run `await play(context)` on a jumping loop; what the actor spawned is cancelled at the end."""

    def run(play, *, name="actor-1", store=None):
        async def main():
            async with asyncio.TaskGroup() as tasks:
                context = FakeKernel(name, tasks, store or MemoryStore())
                await play(context)
                for task in context.spawned:
                    task.cancel()

        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(main())

    return run


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model_folder(folder, *, template=TEMPLATE, **config):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "add_bos_token": False, **config}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def model_folder(tmp_path):
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def write_model():
    return write_model_folder

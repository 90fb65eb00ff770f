"""What the trainer tells others: new weights as a blob and a hint, and to the fabric which phase begins."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from actors.messages.fabric import Phase, PhaseIntent
from actors.messages.samples import Advance, PolicyState
from actors.messages.weights import WeightsPublished, WeightsTaken
from actors.training.agreement import compare, require, sample
from actors.training.engine import TrainEngine
from actors.training.section import CheckSection
from bus.errors import AskFailed
from runtime.actor import Actor

ASK_S = 300.0
"""Longest the sample buffer may be away (its own restart and the Store's included) before training gives up."""

INTEND_S = 1.0
"""The fabric hears of phases ahead of time; a controller that takes longer hears of the next one."""

BUFFER, NODE, FABRIC = "sample_buffer", "node", "fabric_controller"
"""Roles that are told, or waited for."""

WEIGHTS = "weights"
"""Name of the weights' blob."""


class Publisher:
    """One trainer's outgoing side."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.published: WeightsPublished | None = None
        self._taken: set[str] = set()

    @property
    def size_bytes(self) -> int:
        """Of the weights published last."""
        return self.published.size_bytes if self.published else 0

    async def publish(self, step: int, epoch: int, export: Callable[[], list[memoryview | bytes]]) -> PolicyState:
        """Make version `step` available, tell everybody, and free the slots of its samples."""
        actor = self._actor
        started = asyncio.get_running_loop().time()
        await self.intend("weight_sync", step)
        with actor.waits.on(f"weights {step}", stage="publish", holder=NODE, whole=True) as wait:
            with actor.trace.span("publish", "weights", version=step):
                parts = await actor.offload(export)
                info = await actor.blobs.put(WEIGHTS, step, epoch, parts)
            self.published = WeightsPublished(step, epoch, WEIGHTS, info.digest, info.size_bytes)
            self._taken = set()
            actor.log.info("weights_published", version=step, epoch=epoch, size_bytes=info.size_bytes)
            for name in (*actor.peers("engine"), *actor.peers("llm_proxy")):
                wait.update(holder=name)
                with suppress(AskFailed):
                    await actor.ref(name).tell(self.published)
            wait.update(holder=BUFFER)
            policy = await actor.ref(BUFFER).ask(Advance(step, epoch), timeout=ASK_S)
        actor.metrics.gauge("staleness/publish_lag", asyncio.get_running_loop().time() - started)
        actor.metrics.gauge("weights/version", step)
        return policy

    def taken(self, message: WeightsTaken) -> bool:
        """Note who has what was published last; True when all engines that are ready have it."""
        now = self.published
        if now is None or (message.version, message.epoch) != (now.version, now.epoch):
            return False
        self._taken.add(message.engine)
        return self._taken >= set(self._actor.peers("engine"))

    async def intend(self, phase: Phase, step: int, in_s: float = 0.0) -> None:
        """Tell the fabric what comes, `in_s` from now, or what begins; it may be away."""
        actor = self._actor
        engines = actor.peers("engine") if phase == "weight_sync" and self.size_bytes else ()
        traffic = tuple((actor.name, name, self.size_bytes) for name in engines)
        with suppress(AskFailed, TimeoutError):
            async with asyncio.timeout(INTEND_S):
                await actor.ref(FABRIC).tell(PhaseIntent(phase, step, in_s, traffic))

    async def check_agreement(self, step: int, engine: TrainEngine, section: CheckSection) -> None:
        """Stop the run where trainer and engine do not see the same policy."""
        actor = self._actor
        path = actor.run.folder / actor.config.model.path / "config.json"
        vocab_size = int(msgspec.json.decode(await actor.offload(path.read_bytes))["vocab_size"])
        proxy, key, seed = actor.ref("llm_proxy"), f"{actor.incarnation}", actor.run.seed
        with actor.waits.on("agreement", stage="check", holder="llm_proxy", whole=True) as wait:
            sampled = await sample(proxy, section, vocab_size=vocab_size, version=step, key=key, seed=seed)
            wait.update(holder="")
            found = await actor.offload(compare, sampled, engine.logprobs)
        actor.log.info("agreement", mean_abs=found.mean_abs, tokens=found.num_tokens)
        actor.notice(require(found, section, actor.config.model.dtype), good=True)

"""Publication of the trainer's weights, version by version."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.samples import Advance, PolicyState
from rubato.actors.messages.weights import WeightsPublished, WeightsTaken
from rubato.actors.training.train_engine import TrainError
from rubato.actors.weights.transport import Announce, WeightsSender, WeightsSource, WeightsVersion
from rubato.bus.errors import AskFailed
from rubato.runtime.actor import Actor

ASK_S = 24 * 3600.0
"""Longest the sample buffer may take, its own restart and the Store's and a disk without room included, before training gives up."""

BUFFER, NODE = "sample_buffer", "node"
"""Roles that the publisher sends to, or waits for."""


TAKE_S = 5.0
"""Time that engines may take at the end for a version that they have answered under."""


class Publisher:
    """One trainer's outgoing side: versions of the weights leave by a WeightsSender, and each is announced."""

    def __init__(self, actor: Actor, sender: WeightsSender) -> None:
        self._actor = actor
        self._sender = sender
        self.version = -1
        """Taken out of the engine last."""
        self.num_published = 0
        """Versions that this trainer took out."""
        self.published: WeightsPublished | None = None
        """Announced last."""
        self._announcing: asyncio.Task[PolicyState | TrainError] | None = None
        self._taken: set[str] = set()
        self._heard = asyncio.Event()

    @property
    def size_bytes(self) -> int:
        """Size of the weights published last."""
        return self.published.size_bytes if self.published else 0

    @property
    def sizes(self) -> Mapping[str, float]:
        """Sizes for a row of metrics."""
        delta = self.published.delta_bytes if self.published else 0
        return {"weights/bytes": self.size_bytes, **({"weights/delta_bytes": delta} if delta else {})}

    async def publish(self, step: int, term: int, engine: WeightsSource) -> None:
        """Take version `step` out of `engine`, which may train on when this returns.

        What is left goes on beside that: the version is written to its end, announced, and reported to the sample buffer, which may know it by the next claim already. One
        version at a time, so this waits for the one before. Raises TrainError for weights that are none, as `announced` does.
        """
        actor = self._actor
        started = asyncio.get_running_loop().time()
        await self.announced()
        with (
            actor.waits.on(f"weights {step}", stage="publish", holder=NODE, blocks_actor=True),
            actor.trace.span("export", "weights", version=step),
        ):
            announce = await self._sender.send(WeightsVersion("", step, term), engine)
        self.version = step
        self.num_published += 1
        announcing = self._announce(Advance(step, term), announce, started)
        self._announcing = actor.spawn(announcing, name=f"{actor.name}.publish")

    async def announced(self) -> PolicyState | None:
        """Return once the version that was published last is announced: what the sample buffer answered. None where there is none."""
        if self._announcing is None:
            return None
        if not self._announcing.done():
            what = f"weights {self.version}"
            with self._actor.waits.on(what, stage="publish", holder=NODE, detail="announced", blocks_actor=True):
                await asyncio.shield(self._announcing)
        found = self._announcing.result()
        if isinstance(found, TrainError):
            raise found
        return found

    async def _announce(self, advance: Advance, announce: Announce, started: float) -> PolicyState | TrainError:
        """The result of the asks; an error reaches those that wait for the version, since none reads what this raises."""
        actor, step = self._actor, advance.step
        with actor.waits.on(f"weights {step}", stage="publish", holder=NODE) as wait:
            with actor.trace.span("publish", "weights", version=step):
                try:
                    published = await announce()
                except TrainError as error:
                    return error
                finally:
                    del announce  # which holds the memory that the version was written into
            assert published is not None  # of the first rank, which the actor is
            self.published, self._taken = published, set()
            told = {"delta_bytes": published.delta_bytes} if published.delta_bytes else {}
            actor.log.info("weights_published", version=step, term=advance.term, size_bytes=published.size_bytes, **told)
            for name in actor.peers(GENERATION):
                wait.update(holder=name)
                with suppress(AskFailed):
                    await actor.ref(name).tell(published)
            wait.update(holder=BUFFER)
            policy = await actor.ref(BUFFER).ask(advance, timeout=ASK_S)
        actor.metrics.gauge("staleness/publish_lag", asyncio.get_running_loop().time() - started)
        actor.metrics.gauge("weights/version", step)
        return policy

    def taken(self, message: WeightsTaken) -> bool:
        """Note who has what was published last; True when all engines that are ready have it."""
        now = self.published
        if now is None or (message.adapter, message.version, message.term) != (now.adapter, now.version, now.term):
            return False
        self._taken.add(message.engine)
        self._heard.set()
        return self._all_have_it

    @property
    def _all_have_it(self) -> bool:
        return self._taken >= set(self._actor.peers(GENERATION))

    def disagreement(self, message: WeightsTaken) -> str:
        """Sentence for the user where an engine computes with other tensors than were published; empty where nothing is known to be."""
        return self._sender.disagreement(message)

    async def taken_by_all(self) -> None:
        """Return once every engine has reported that it took what was published last, or after `TAKE_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TAKE_S):
                while not self._all_have_it:
                    self._heard.clear()
                    await self._heard.wait()

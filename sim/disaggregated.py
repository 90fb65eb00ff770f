"""Prefill apart from decode in virtual time: one engine reads the prompt, another samples, and the keys and values go from one to the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rubato.planning.prefill_decode import StageWatch, balance, stages
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.manager_model import TurnRequest
from rubato.sim.proxy_model import ModelledProxy
from rubato.sim.timeline import Timeline

BALANCED_S = 10.0
"""Period at which the planner looks at the stages."""


@dataclass(eq=False)
class Seated:
    """An engine as one stage sees it."""

    engine: ModelledEngine
    watch: Callable[[], StageWatch]
    on_change: Callable[[Any], None] = lambda engine: None

    def __post_init__(self) -> None:
        self.name = self.engine.name

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def suspended(self) -> bool:
        return self.engine.suspended

    @property
    def num_slots(self) -> int:
        return self.engine.num_slots

    async def generate(self, session: str, context: int, new_tokens: int, min_version: int = 0) -> int:
        began = self.engine.timeline.now
        version = await self.engine.generate(session, context, new_tokens, min_version)
        self.watch().seated_s += self.engine.timeline.now - began
        return version

    def forget(self, session: str) -> None:
        self.engine.forget(session)


@dataclass(eq=False)
class Receiving(Seated):
    """It samples what another prefilled: its keys and values come first, and are computed here where no room is left for them."""

    async def generate(self, session: str, context: int, new_tokens: int, min_version: int = 0) -> int:
        engine = self.engine
        await engine.timeline.sleep(engine.model.kv_move_s(context))
        engine.adopt(session, context)
        return await super().generate(session, context, new_tokens, min_version)


@dataclass(eq=False)
class DisaggregatedProxy:
    """What ModelledProxy is to engines that do both; every task may use every engine."""

    timeline: Timeline
    engines: Sequence[ModelledEngine]
    num_prefill: int
    """The first of the engines prefill, the others decode."""
    auto: bool = False
    """The live proxy's planner moves engines between the stages."""
    changes: list[tuple[float, str]] = field(default_factory=list)
    """When it did, and why."""

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engines]
        # The proxies look at these sets, which change in place.
        self._names = set(names[: self.num_prefill]), set(names[self.num_prefill :])
        self._watches = [StageWatch(), StageWatch()]
        reading = [Seated(engine, lambda: self._watches[0]) for engine in self.engines]
        sampling: list[Seated] = [Receiving(engine, lambda: self._watches[1]) for engine in self.engines]
        prefill, decode = self._names
        self._proxies = (ModelledProxy(self.timeline, reading, serving=prefill), ModelledProxy(self.timeline, sampling, serving=decode))
        self._seats = {a.name: (a, b) for a, b in zip(reading, sampling, strict=True)}
        for engine in self.engines:
            engine.on_change = self._changed
        if self.auto:
            self.timeline.start(self._balance())

    async def generate(self, request: TurnRequest, context: int, new_tokens: int, task: str = "") -> int:
        """The version that sampled the first token, which the prefill gives."""
        version = await self._stage(0, request, context, 1)
        if new_tokens > 1:
            await self._stage(1, request, context + 1, new_tokens - 1)
        return version

    def forget(self, session: str) -> None:
        for proxy in self._proxies:
            proxy.forget(session)

    async def _stage(self, number: int, request: TurnRequest, context: int, new_tokens: int) -> int:
        began = self.timeline.now
        version = await self._proxies[number].generate(request, context, new_tokens)
        watch = self._watches[number]
        watch.finished += 1
        watch.total_s += self.timeline.now - began
        return version

    def _changed(self, engine: ModelledEngine) -> None:
        for seated in self._seats[engine.name]:
            seated.on_change(seated)

    async def _balance(self) -> None:
        prefilled_s = 0.0
        while True:
            await self.timeline.sleep(BALANCED_S)
            prefill, decode = self._watches
            now_s = sum(engine.usage.prefill_s for engine in self.engines)
            prefill.busy_s = now_s - prefilled_s
            num_prefill, num_decode = map(len, self._names)
            seen = stages(prefill, decode, num_prefill, num_decode, self.engines[0].num_slots)
            if seen is not None:
                prefilled_s = now_s
                self._watches = [StageWatch(), StageWatch()]
                self._follow(*balance(*seen))

    def _follow(self, num_prefill: int, why: str) -> None:
        """An engine that changes its stage finishes what it has; it takes new requests of the other one at once."""
        prefill, decode = self._names
        if num_prefill == len(prefill):
            return
        giver, taker = (decode, prefill) if num_prefill > len(prefill) else (prefill, decode)
        name = min(giver, key=lambda name: (self._load(name), name))
        giver.remove(name)
        taker.add(name)
        self.changes.append((self.timeline.now, why))
        self._changed(self._seats[name][0].engine)

    def _load(self, name: str) -> int:
        return self._seats[name][0].engine.in_flight

"""A pool of modelled engines whose degrees of parallelism change, and whose requests move, while they generate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rubato.planning.makespan import Instance, Load
from rubato.planning.parallelism import Change
from rubato.planning.rebalance import RequestMove, moved
from rubato.planning.roofline import Roofline
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.timeline import SimEvent, Timeline

UNSETTLED_S = 10.0
"""An instance that changed its degree is left alone for so long, as by the live orchestrator."""


class Response(NamedTuple):
    """One request and what it will sample, in tokens."""

    name: str
    prompt: str
    """The same for responses to one prompt."""
    shown: int
    tokens: int


class Regroup(NamedTuple):
    """Instances `old` of one server become `parts`, each a degree and its requests."""

    old: tuple[str, ...]
    parts: tuple[tuple[int, tuple[str, ...]], ...]
    to: Mapping[str, str] = {}
    """Requests that go to an instance which stays as it is, by their names."""

    @classmethod
    def of(cls, change: Change) -> "Regroup":
        """A merge or a split."""
        return cls(change.old, tuple((change.degree, part) for part in change.parts))


@dataclass(eq=False)
class InstanceSeat:
    """An engine on GPUs of one server."""

    engine: ModelledEngine
    degree: int
    server: int
    ready_s: float
    settled_s: float
    """From then on it may change; infinite while it does."""
    coming: int = 0
    """Requests on their way here: it does not change meanwhile."""


class PoolUse(NamedTuple):
    """What a pool did besides generating."""

    moves: int
    switches: int
    switch_s: float
    """Of all instances together: seconds in which they were changed."""
    moved_bytes: float
    """Keys and values that went to another engine."""


@dataclass(eq=False)
class ElasticPool:
    """Engines by degree in `models`; `delay_s` is what a change waits for besides its own cost, such as for circuits."""

    timeline: Timeline
    models: Mapping[int, Roofline]
    delay_s: float = 0.0
    seats: dict[str, InstanceSeat] = field(default_factory=dict)
    moved_s: dict[str, float] = field(default_factory=dict)
    """When each request was last moved."""
    done: dict[str, float] = field(default_factory=dict)
    """When each response ended."""
    use: PoolUse = field(default_factory=lambda: PoolUse(0, 0, 0.0, 0.0))

    def __post_init__(self) -> None:
        self.responses: dict[str, Response] = {}
        self._at: dict[str, str] = {}
        self._away: dict[str, tuple[SimEvent, int, int]] = {}
        """Requests off their engine: what lets them go on, tokens that are to come, and those whose KV comes along."""
        self._all_done = self.timeline.event()
        self._num = 0

    def add(self, degree: int, server: int, start_s: float = 0.0) -> str:
        """A new instance, which begins after `start_s`; its name."""
        self._num += 1
        name = f"{self._num:05d}"
        now = self.timeline.now
        engine = ModelledEngine(self.timeline, name, self.models[degree])
        settled_s = now + start_s + UNSETTLED_S if start_s else now
        if start_s:
            engine.suspend()
            self.timeline.at(now + start_s, lambda: engine.resume(engine.version))
        self.seats[name] = InstanceSeat(engine, degree, server, now + start_s, settled_s)
        return name

    def take(self, responses: Sequence[Response], at: Mapping[str, str]) -> None:
        """Begin with all of them, each `at` its instance."""
        for each in responses:
            self.responses[each.name] = each
            self._at[each.name] = at[each.name]
            self.timeline.start(self._respond(each))

    def run(self) -> float:
        """Until the last response is done; the seconds of the timeline then."""
        self.timeline.run(until=self._all_done)
        return self.timeline.now

    @property
    def running(self) -> bool:
        return len(self.done) < len(self.responses)

    def left(self) -> dict[str, tuple[str, int, int]]:
        """Of each response that is not done: its instance, tokens to come, and those whose KV is there or comes along."""
        found = {
            name: (seat, *each) for seat, here in self.seats.items() for name, each in here.engine.left.items() if name not in self._away
        }
        return found | {name: (self._at[name], left, held) for name, (_, left, held) in self._away.items() if left}

    def instances(self, remaining: Mapping[str, float]) -> list[Instance]:
        """The pool as planners see it, with what each response has `remaining` by their forecast."""
        now = self.timeline.now
        loads: dict[str, list[Load]] = {name: [] for name in self.seats}
        for name, (seat, left, held) in self.left().items():
            each = self.responses[name]
            loads[seat].append(Load(name, each.shown + each.tokens - left, remaining[name], held))
        return [
            Instance(
                name,
                seat.degree,
                tuple(sorted(loads[name], key=lambda load: not load.cached)),
                f"server-{seat.server}",
                seat.settled_s <= now and not seat.coming,
                max(0.0, seat.ready_s - now),
            )
            for name, seat in self.seats.items()
        ]

    def move(self, moves: Sequence[RequestMove]) -> None:
        """Begin them all; each takes what its cache takes over the NICs, or is prefilled there."""
        for each in moves:
            if each.request not in self._away and each.request not in self.done:
                self.timeline.start(self._move(each))

    async def change(self, changes: Sequence[Regroup]) -> None:
        """All at once: requests leave at the next boundary of a step, and go on when the new instances are there, which ends it."""
        for process in [self.timeline.start(self._change(each)) for each in changes]:
            await process.ended

    async def _respond(self, response: Response) -> None:
        left = response.tokens
        while left:
            engine = self.seats[self._at[response.name]].engine
            await engine.generate(response.name, response.shown + response.tokens - left, left)
            left = await self._away[response.name][0] if response.name in self._away else 0
            self._away.pop(response.name, None)
        self.seats[self._at[response.name]].engine.forget(response.name)
        self.done[response.name] = self.timeline.now
        if not self.running:
            self._all_done.set()

    async def _off(self, name: str) -> tuple[int, int]:
        """Take the request off its engine: tokens that are to come, and those whose KV was there."""
        engine = self.seats[self._at[name]].engine
        before = engine.left.get(name, (0, 0))
        self._away[name] = (self.timeline.event(), *before)
        left = await engine.abort(name)
        response = self.responses[name]
        held = response.shown + response.tokens - left if before[1] else 0
        self._away[name] = (self._away[name][0], left, held if left else 0)
        return self._away[name][1:]

    def _on(self, name: str, seat: str, cached: int) -> None:
        """The request goes on, with so much of its KV."""
        event, left, _ = self._away[name]
        if left:
            self._at[name] = seat
            if cached:
                self.seats[seat].engine.adopt(name, cached)
        event.set(left)

    async def _move(self, order: RequestMove) -> None:
        source, target = self.seats[order.source], self.seats[order.target]
        self.moved_s[order.request] = self.timeline.now
        target.coming += 1
        left, held = await self._off(order.request)
        if left:
            response = self.responses[order.request]
            load = Load(order.request, response.shown + response.tokens - left, left, held)
            there, way = moved(load, self.models[source.degree], self.models[target.degree])
            self._at[order.request] = order.target
            if there.cached:
                await self.timeline.sleep(way.cache_s)
            size = there.cached * self.models[target.degree].spec.model.kv_bytes_per_token
            self._count(moves=1, moved_bytes=size)
            held = there.cached
        target.coming -= 1
        self._on(order.request, order.target, held)

    async def _change(self, change: Regroup) -> None:
        old = [self.seats[name] for name in change.old]
        for seat in old:
            seat.settled_s = float("inf")
        began = self.timeline.now
        names = [name for _, part in change.parts for name in part if name not in self.done]
        names += [name for name in change.to if name not in self.done]
        leaving = [self.timeline.start(self._off(name)) for name in names]
        held = {name: (await process.ended)[1] for name, process in zip(names, leaving, strict=True)}
        drained_s = self.timeline.now - began
        cost_s = self.delay_s + self._cost_s([seat.degree for seat in old], change, sum(held.values()))
        for name in change.old:
            del self.seats[name]
        to = dict(change.to)
        for degree, part in change.parts:
            to |= dict.fromkeys(part, self.add(degree, old[0].server, cost_s))
        self._at |= {name: to[name] for name in names}
        self._count(switches=1, switch_s=drained_s + cost_s)
        await self.timeline.sleep(cost_s)
        for name in names:
            self._on(name, self._at[name], held[name])

    def _cost_s(self, old: Sequence[int], change: Regroup, tokens: int) -> float:
        return max(self.models[before].reconfigure_s(tokens, self.models[after]) for before in set(old) for after, _ in change.parts)

    def _count(self, moves: int = 0, switches: int = 0, switch_s: float = 0.0, moved_bytes: float = 0.0) -> None:
        use = self.use
        self.use = PoolUse(use.moves + moves, use.switches + switches, use.switch_s + switch_s, use.moved_bytes + moved_bytes)

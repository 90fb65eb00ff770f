"""One step of generation on a pool in virtual time: the live planners forecast, choose degrees, switch and rebalance."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import Field

from rubato.planning.forecast import Forecast, Seen
from rubato.planning.makespan import Instance
from rubato.planning.parallelism import HORIZON, StepPlan, coming, within
from rubato.planning.rebalance import rebalance
from rubato.planning.roofline import Roofline
from rubato.runtime.config import Section
from rubato.sim.orchestrrl.pool import ElasticPool, PoolUse, Regroup, Response
from rubato.sim.timeline import Timeline

STRAGGLER = 0.8
"""Quantile of what remains by which requests are moved: one for all, since which of them is long shows only as they run."""


class Arm(Section):
    """Which planners decide; none is a static configuration."""

    name: str
    across: bool = False
    """Degrees and who has what for the step, once its requests are there."""
    within: bool = False
    """Merges and splits in it."""
    rebalance: bool = False
    knows: bool = False
    """The lengths, instead of a forecast: an oracle."""


class Pace(Section):
    """How often planners are asked, as in the live orchestrator's section of the config."""

    interval_s: float = Field(default=1.0, gt=0)
    """Period of rebalancing; a request moves once in ten of them."""
    switch_s: float = Field(default=5.0, gt=0)
    """Period of looking for a switch."""


class StepDone(NamedTuple):
    """A step: when each response was done, the degrees at its end, and what was done for it."""

    seconds: float
    ended_s: tuple[float, ...]
    degrees: tuple[int, ...]
    use: PoolUse
    why: tuple[str, ...]
    """Of the plan for the step, then of each switch."""


class StepRun:
    """Runs once. `history` is a forecast from earlier steps; None where the arm needs none."""

    def __init__(self, engines: Mapping[int, Roofline], arm: Arm, pace: Pace, forecast: Forecast | None, delay_s: float = 0.0) -> None:
        self._engines = engines
        self._arm = arm
        self._pace = pace
        self._forecast = forecast
        self._pool = ElasticPool(Timeline(), engines, delay_s)
        self._why: list[str] = []
        self._looked_s = 0.0

    def run(self, responses: Sequence[Response], degrees: Sequence[int], chunks: bool = False) -> StepDone:
        """All of them, as many on each instance of `degrees` to begin with: in turn, or in `chunks`, so that a prompt's stay together."""
        pool = self._pool
        pool.responses = {each.name: each for each in responses}
        seats, num = self._place(degrees), len(responses)
        at = {each.name: seats[number * len(seats) // num if chunks else number % len(seats)] for number, each in enumerate(responses)}
        pool.take(responses, at)
        pool.timeline.start(self._keep_on())
        seconds = pool.run()
        ends = tuple(sorted(pool.done.values()))
        return StepDone(seconds, ends, tuple(sorted(seat.degree for seat in pool.seats.values())), pool.use, tuple(self._why))

    def _place(self, degrees: Sequence[int]) -> list[str]:
        """An instance for each degree: large ones first, so that none crosses servers."""
        seats, gpu = dict[int, str](), 0
        for place in sorted(range(len(degrees)), key=lambda place: -degrees[place]):
            degree = degrees[place]
            seats[place] = self._pool.add(degree, gpu // self._engines[degree].spec.gpu.gpus_per_server)
            gpu += degree
        return [seats[place] for place in range(len(degrees))]

    async def _keep_on(self) -> None:
        """One look after another, as the live orchestrator's: a plan for the step at the first, then a switch, or moves."""
        pool, arm = self._pool, self._arm
        begins = arm.across
        while pool.running:
            await pool.timeline.sleep(self._pace.interval_s)
            changes = self._begin_step() if begins else ()
            begins = False
            if changes := changes or self._switch():
                await pool.change(changes)
            elif arm.rebalance:
                self._rebalance()

    def _begin_step(self) -> list[Regroup]:
        """Of each server whose degrees are not those of its plan for the step."""
        servers: dict[str, list[Instance]] = defaultdict(list)
        for each in self._instances():
            servers[each.server].append(each)
        found = [self._step_plan(server) for _, server in sorted(servers.items())]
        return [change for change in found if change is not None]

    def _step_plan(self, server: Sequence[Instance]) -> Regroup | None:
        loads, gpus = [load for each in server for load in each.loads], sum(each.degree for each in server)
        if not loads:
            return None
        plan = coming(loads, gpus, self._engines, server, self._arm.within, HORIZON, drawn=not self._arm.knows)
        self._why.append(f"{self._pool.timeline.now:.1f} s: {plan.why}")
        return regroup(server, plan) if plan.switched else None

    def _remaining(self, left: Mapping[str, int], quantile: float | None = None) -> dict[str, float]:
        """Tokens to come of each, of which so many are `left` in truth: at a quantile, or spread over all of them."""
        if self._arm.knows:
            return {name: float(tokens) for name, tokens in left.items()}
        if self._forecast is None:
            raise RuntimeError("an arm that plans without knowing the lengths needs a forecast")
        of = self._pool.responses
        seen = {name: Seen("", of[name].prompt, of[name].tokens - tokens) for name, tokens in left.items()}
        if quantile is None:
            return {name: each.tokens for name, each in self._forecast.spread(seen).items()}
        return {name: self._forecast.remaining(each, quantile).tokens for name, each in seen.items()}

    def _switch(self) -> list[Regroup]:
        pool = self._pool
        if not self._arm.within or pool.timeline.now - self._looked_s < self._pace.switch_s:
            return []
        self._looked_s = pool.timeline.now
        plan = within(self._instances(), self._engines)
        if plan.changes:
            self._why.append(f"{pool.timeline.now:.1f} s: {plan.why}")
        return [Regroup.of(change) for change in plan.changes]

    def _rebalance(self) -> None:
        pool = self._pool
        stay = [each for each in self._instances(STRAGGLER) if pool.seats[each.name].settled_s < float("inf")]
        moves = rebalance(stay, self._engines, now_s=pool.timeline.now, moved_s=pool.moved_s, interval_s=10 * self._pace.interval_s).moves
        pool.move(moves)

    def _instances(self, quantile: float | None = None) -> list[Instance]:
        left = {name: tokens for name, (_, tokens, _) in self._pool.left().items()}
        return self._pool.instances(self._remaining(left, quantile))


def regroup(server: Sequence[Instance], plan: StepPlan) -> Regroup:
    """What `plan` changes: an instance that has a planned degree stays, and takes the requests of that place."""
    free, to, parts = sorted(server), dict[str, str](), list[tuple[int, tuple[str, ...]]]()
    for degree, names in zip(plan.degrees, plan.assigned, strict=True):
        stays = next((each for each in free if each.degree == degree), None)
        if stays is None:
            parts.append((degree, names))
            continue
        free.remove(stays)
        here = {load.name for load in stays.loads}
        to |= {name: stays.name for name in names if name not in here}
    return Regroup(tuple(each.name for each in free), tuple(parts), to)

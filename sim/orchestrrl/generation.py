"""One step of generation on a pool in virtual time: the live planners forecast, choose degrees, switch and rebalance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import Field

from planning.forecast import Forecast, Seen
from planning.makespan import Instance, Load
from planning.parallelism import coming, within
from planning.rebalance import rebalance
from planning.roofline import Roofline
from runtime.config import Section
from sim.orchestrrl.pool import ElasticPool, PoolUse, Response
from sim.timeline import Timeline

STRAGGLER = 0.8
"""Quantile of what remains by which requests are moved: one for all, since which of them is long shows only as they run."""


class Arm(Section):
    """Which planners decide; none is a static configuration."""

    name: str
    across: bool = False
    """Degrees and who has what, before each step."""
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

    def __init__(
        self, engines: Mapping[int, Roofline], arm: Arm, pace: Pace, forecast: Forecast | None, delay_s: float = 0.0
    ) -> None:
        self._engines = engines
        self._arm = arm
        self._pace = pace
        self._forecast = forecast
        self._pool = ElasticPool(Timeline(), engines, delay_s)
        self._why: list[str] = []

    def run(self, responses: Sequence[Response], degrees: Sequence[int], current: Sequence[int] = ()) -> StepDone:
        """All of them, on instances of `degrees` where nothing is planned across steps; those not `current` begin after their switch."""
        pool, arm = self._pool, self._arm
        assigned: tuple[tuple[str, ...], ...] = ()
        pool.responses = {each.name: each for each in responses}
        if arm.across:
            remaining = self._remaining({each.name: each.tokens for each in responses})
            loads = [Load(each.name, each.shown, remaining[each.name]) for each in responses]
            plan = coming(loads, sum(degrees), self._engines, current, arm.within)
            self._why.append(plan.why)
            degrees, assigned = plan.degrees, plan.assigned
        if not arm.across or (not arm.knows and len(set(degrees)) == 1):
            # Which of them is long is not known yet: alike instances get as many.
            names = [each.name for each in responses]
            assigned = tuple(tuple(names[place :: len(degrees)]) for place in range(len(degrees)))
        seats = self._place(degrees, current)
        pool.take(responses, {name: seat for seat, names in zip(seats, assigned, strict=True) for name in names})
        if arm.within:
            pool.timeline.start(self._switch())
        if arm.rebalance:
            pool.timeline.start(self._rebalance())
        seconds = pool.run()
        ends = tuple(sorted(pool.done.values()))
        return StepDone(
            seconds, ends, tuple(sorted(seat.degree for seat in pool.seats.values())), pool.use, tuple(self._why)
        )

    def _place(self, degrees: Sequence[int], current: Sequence[int]) -> list[str]:
        """An instance for each degree: large ones first, so that none crosses servers."""
        there, seats, gpu = Counter(current), dict[int, str](), 0
        for place in sorted(range(len(degrees)), key=lambda place: -degrees[place]):
            degree = degrees[place]
            there[degree] -= 1
            new = bool(current) and there[degree] < 0
            costs = [self._engines[each].reconfigure_s(0, self._engines[degree]) for each in set(current)]
            per_server = self._engines[degree].spec.gpu.gpus_per_server
            seats[place] = self._pool.add(degree, gpu // per_server, max(costs) if new else 0.0)
            gpu += degree
        return [seats[place] for place in range(len(degrees))]

    def _remaining(self, left: Mapping[str, int], quantile: float | None = None) -> dict[str, float]:
        """Tokens to come of each, of which so many are `left` in truth: at a quantile, or spread over all of them."""
        if self._arm.knows:
            return {name: float(tokens) for name, tokens in left.items()}
        if self._forecast is None:
            raise RuntimeError("an arm that plans without knowing the lengths needs a forecast")
        of = self._pool.responses
        seen = {name: Seen("", of[name].prompt, of[name].tokens - tokens) for name, tokens in left.items()}
        if quantile is None:
            return self._forecast.spread(seen)
        return {name: self._forecast.remaining(each, quantile).tokens for name, each in seen.items()}

    async def _switch(self) -> None:
        pool = self._pool
        while pool.running:
            await pool.timeline.sleep(self._pace.switch_s)
            plan = within(self._instances(), self._engines)
            if plan.changes:
                self._why.append(f"{pool.timeline.now:.1f} s: {plan.why}")
                pool.change(plan.changes)

    async def _rebalance(self) -> None:
        pool = self._pool
        while pool.running:
            await pool.timeline.sleep(self._pace.interval_s)
            stay = [each for each in self._instances(STRAGGLER) if pool.seats[each.name].settled_s < float("inf")]
            moves = rebalance(
                stay,
                self._engines,
                now_s=pool.timeline.now,
                moved_s=pool.moved_s,
                interval_s=10 * self._pace.interval_s,
            ).moves
            pool.move(moves)

    def _instances(self, quantile: float | None = None) -> list[Instance]:
        left = {name: tokens for name, (_, tokens, _) in self._pool.left().items()}
        return self._pool.instances(self._remaining(left, quantile))

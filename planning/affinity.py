"""Which hardware class serves how much of each task, so that the mixture as a whole gets through fastest.

A class of much compute is fast at prompts, one of much memory bandwidth at decoding (RollArt, arXiv 2512.22560, sections 4.1 and 5.1 and
Figure 4, where users map tasks to classes by hand). Here the shares follow from what is observed: each task's tokens, each class's step times.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

from rubato.planning.step_cost import StepCost

GAIN: Final = 1.05
"""A new plan must promise so many times the present one's rate: sessions that move lose their KV caches, and mixtures fluctuate."""

SPLIT: Final = 1.15
"""Tasks are shared between classes where that promises so many times the rate of the best map of whole tasks: rates are of the steady state,
and where rollouts begin together, at α of 0 or 1, a few slow ones among them hold up the batch."""

MAPS: Final = 4096
"""Maps of whole tasks to classes that are tried; with more tasks and classes than that, the search begins elsewhere."""

STEPS: Final = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
"""Shares that the search moves at once, the largest first."""

BETTER: Final = 1.0 + 1e-9


class TaskProfile(NamedTuple):
    """The requests of one task, on average."""

    requests: float
    """So many came in the period, which is the same for all tasks: trajectories times their turns."""
    prompt: float
    """Tokens that a request begins with."""
    prefill: float
    """Those of them that its session's KV cache does not hold."""
    decode: float
    """Tokens that it samples."""


class HardwareClass(NamedTuple):
    """The engines of one class."""

    name: str
    engines: int
    slots: float
    """Requests that one of them decodes at once."""
    cost: StepCost


Shares = Mapping[str, Mapping[str, float]]
"""Task → class → its share of the task's requests; those of a task sum to 1."""


class AffinityPlan(NamedTuple):
    """How tasks are shared out."""

    shares: Shares
    rate: float
    """Requests per second of the mixture that the classes get through, as predicted."""
    why: str


Grid = list[list[float]]
"""Shares by the position of task and class."""


class RateModel:
    """Predicts the rate at which a mixture gets through, for any shares.

    An engine's second goes into the prefill of what comes in, and into decode steps. Each request decodes `decode` tokens; the part of a
    step that grows with the batch is each request's own, the rest is shared by the batch. The batch is what the rate needs (Little's law),
    at most the slots; all classes together hold `in_flight` requests at most.
    """

    def __init__(self, tasks: Sequence[TaskProfile], classes: Sequence[HardwareClass], in_flight: float) -> None:
        total = sum(task.requests for task in tasks)
        self._classes = classes
        self._in_flight = in_flight
        self._own = [[task.requests / total * _own_s(task, each.cost) for each in classes] for task in tasks]
        """Seconds of an engine that a request of the mixture costs there, without what its batch shares."""
        self._tokens = [task.requests / total * task.decode for task in tasks]

    def rate(self, shares: Grid) -> float:
        """Requests of the mixture per second."""
        loads: list[tuple[float, float, int]] = []
        rate = float("inf")
        for at, each in enumerate(self._classes):
            own, tokens = 1e-12, 0.0  # what costs nothing has a rate all the same
            for row, costs, decoded in zip(shares, self._own, self._tokens, strict=True):
                own += row[at] * costs[at]
                tokens += row[at] * decoded
            shared = each.cost.step_s * tokens
            if own or shared:
                rate = min(rate, each.engines / (own + shared / each.slots))
                loads.append((own, shared, each.engines))
        if _held(loads, rate) <= self._in_flight:
            return rate
        low, high = 0.0, rate
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if _held(loads, middle) <= self._in_flight else (low, middle)
        return low

    def cost(self, task: int, at: int) -> float:
        """Seconds of a class's engines per request of the mixture, if all of `task` went there and slots were full."""
        each = self._classes[at]
        return (self._own[task][at] + each.cost.step_s * self._tokens[task] / each.slots) / each.engines


def plan(
    tasks: Mapping[str, TaskProfile], classes: Sequence[HardwareClass], in_flight: float, current: Shares | None = None
) -> AffinityPlan:
    """The shares of the highest rate: the best map of whole tasks, or where that is worth it, what moving parts of tasks makes of it.

    `in_flight` requests are under way or wait at most. `current` is kept unless the gain over it is worth it; empty shares mean that every
    class is open to all. A task without requests has none. `tasks` and `classes` must not be empty. Depends on nothing but its arguments,
    and not on the order of `tasks` and `classes`.
    """
    names = sorted(name for name, task in tasks.items() if task.requests > 0)
    ordered = sorted(classes, key=lambda each: each.name)
    model = RateModel([tasks[name] for name in names], ordered, max(1.0, in_flight))
    before = _grid(current, names, ordered)
    now = model.rate(before or [_even(ordered) for _ in names])
    best = max(_maps(model, len(names), len(ordered)), key=model.rate)
    split = _refined(model, best)
    if model.rate(split) >= SPLIT * model.rate(best):
        best = split
    rate = model.rate(best)
    if rate < now * GAIN:
        shares: Shares = _named(before, names, ordered) if before else {}
        return AffinityPlan(shares, now, f"{_told(shares)} ({now:.3g} requests/s, no map promises {GAIN:g} x that)")
    shares = _named(best, names, ordered)
    what = "the map so far" if before else "an even spread"
    return AffinityPlan(shares, rate, f"{_told(shares)} ({rate:.3g} requests/s, {rate / now:.2f} x {what})")


def _own_s(task: TaskProfile, cost: StepCost) -> float:
    held = task.prompt + task.decode / 2
    return cost.prefill_s * task.prefill + task.decode * (cost.token_s + cost.context_s * held)


def _held(loads: Iterable[tuple[float, float, int]], rate: float) -> float:
    """Requests that engines hold at `rate`: those being prefilled, and the batches that it takes."""
    held = 0.0
    for own, shared, engines in loads:
        left = 1.0 - rate * own / engines
        if left <= 0.0:
            return float("inf")
        held += rate * own + rate * shared / left
    return held


def _maps(model: RateModel, num_tasks: int, num_classes: int) -> Iterable[Grid]:
    """Where the search may begin."""
    if num_classes**num_tasks <= MAPS:
        chosen: Iterable[Sequence[int]] = product(range(num_classes), repeat=num_tasks)
    else:
        cheapest = [min(range(num_classes), key=lambda at: model.cost(task, at)) for task in range(num_tasks)]
        chosen = [cheapest, *([at] * num_tasks for at in range(num_classes))]
    for each in chosen:
        yield [[1.0 if at == here else 0.0 for at in range(num_classes)] for here in each]


def _refined(model: RateModel, grid: Grid) -> Grid:
    """Move parts of tasks, alone or in exchange for parts of others, as long as the rate grows."""
    rate = model.rate(grid)
    for part in STEPS:
        improved = True
        while improved:
            improved = False
            for move in _moves(model, grid, part):
                moved = move(grid)
                found = model.rate(moved)
                if found > rate * BETTER:
                    grid, rate, improved = moved, found, True
                    break
    return grid


Move = Callable[[Grid], Grid]


def _moves(model: RateModel, grid: Grid, part: float) -> Iterable[Move]:
    num = len(grid[0])
    for task, row in enumerate(grid):
        for here, there in ((h, t) for h in range(num) if row[h] > 0.0 for t in range(num) if t != h):
            size = min(part, row[here])
            yield lambda grid, m=(task, here, there, size): _moved(grid, *m)
            for other, its in enumerate(grid):
                if other != task and its[there] > 0.0:
                    back = min(its[there], size * model.cost(task, there) / max(model.cost(other, there), 1e-30))
                    first, second = (task, here, there, size), (other, there, here, back)
                    yield lambda grid, m=first, n=second: _moved(_moved(grid, *m), *n)


def _moved(grid: Grid, task: int, here: int, there: int, size: float) -> Grid:
    row = list(grid[task])
    row[here] -= size
    row[there] += size
    return [row if at == task else each for at, each in enumerate(grid)]


def _even(classes: Sequence[HardwareClass]) -> list[float]:
    """As requests spread that any engine may take: by slots."""
    slots = [each.engines * each.slots for each in classes]
    return [each / sum(slots) for each in slots]


def _grid(shares: Shares | None, names: Sequence[str], classes: Sequence[HardwareClass]) -> Grid | None:
    """None where `shares` say nothing of a task, or send parts of it to a class that is not there."""
    if not shares or any(name not in shares for name in names):
        return None
    grid = [[shares[name].get(each.name, 0.0) for each in classes] for name in names]
    return grid if all(abs(sum(row) - 1.0) < 1e-6 for row in grid) else None


def _named(grid: Grid, names: Sequence[str], classes: Sequence[HardwareClass]) -> Shares:
    named = zip(names, grid, strict=True)
    return {name: {c.name: s for c, s in zip(classes, row, strict=True) if s > 0.0} for name, row in named}


def _told(shares: Shares) -> str:
    return "; ".join(told(name, shares[name]) for name in shares) or "every class stays open to all"


def told(task: str, shares: Mapping[str, float]) -> str:
    """`task sums → h800: 0.80, h20: 0.20`."""
    parts = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return f"task {task or 'of the job'} → " + ", ".join(f"{name}: {share:.2f}" for name, share in parts)

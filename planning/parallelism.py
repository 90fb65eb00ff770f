"""Chooses the tensor parallelism of a pool's engines: for the coming step, and by merges and splits within one.

What OrchestrRL's problem minimises, as reported, is kept: the time of the last instance with its switch and the moves of its requests in it,
over who has which request and which instance has which degree, within the GPUs and each instance's memory; and it switches only where the
predicted gain is above the cost. The search is ours: degrees of at most two sizes per step, longest first to the instance that would be
through first, and within a step the instance that would be last merges with its neighbours or is split. tests/property/test_planner_gap.py
has its gap to the optimum.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import combinations
from typing import NamedTuple

from rubato.planning.makespan import Instance, Load, finish_s, left_after
from rubato.planning.rebalance import MARGIN, shorten
from rubato.planning.roofline import Roofline

FINALISTS = 4
"""Divisions that are refined by moves, the best of those that were dealt."""

REFINEMENTS = 32

LATER = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Shares of the time that is left at which a merge is tried besides now: it costs throughput while many requests run."""

HORIZON = 2
"""Steps over which a switch for the coming one is to pay: lengths drift slowly, and the next step is more like this one than not."""


class StepPlan(NamedTuple):
    """Degrees for the coming step, ascending, and who has which requests: `assigned` in the same order. `predicted_s` has the switch in it."""

    degrees: tuple[int, ...]
    assigned: tuple[tuple[str, ...], ...]
    predicted_s: float
    switched: bool
    why: str


class Change(NamedTuple):
    """Instances `old` become `parts` of `degree` each, with these requests; a merge has one part, a split several."""

    old: tuple[str, ...]
    degree: int
    parts: tuple[tuple[str, ...], ...]
    saves_s: float
    """Of the time until all these requests are done, before costs."""
    costs_s: float
    why: str


class SwitchPlan(NamedTuple):
    """Changes that touch different instances, and when the last is through without and with them, costs included."""

    changes: tuple[Change, ...]
    before_s: float
    after_s: float
    why: str


class _Dealt(NamedTuple):
    seconds: float
    degrees: tuple[int, ...]
    instances: tuple[Instance, ...]


def divisions(num_gpus: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to divide `num_gpus` exactly into instances of at most two of `degrees`, each ascending."""
    for degree in degrees:
        if num_gpus % degree == 0:
            yield (degree,) * (num_gpus // degree)
    for small, large in combinations(sorted(degrees), 2):
        for count in range(1, num_gpus // large + 1):
            rest = num_gpus - count * large
            if rest and rest % small == 0:
                yield (small,) * (rest // small) + (large,) * count


def coming(
    loads: Sequence[Load],
    num_gpus: int,
    engines: Mapping[int, Roofline],
    current: Sequence[Instance] = (),
    merges: bool = False,
    steps: int = 1,
    drawn: bool = False,
) -> StepPlan:
    """Degrees that finish `loads` first, of `engines` by degree; the `current` ones stay unless others are MARGIN faster, switch included.

    What stays is counted as it is served: each of `current` has its requests, in its order; those of `loads` that none has go, in theirs,
    where fewest are for the GPUs. What is dealt anew is served longest first.

    Where `steps` like this one will have these degrees, the switch is counted as that share of its time in each.

    Where `within` will be asked during the step, `merges` counts with it: then small instances may begin what large ones end.

    Where lengths are `drawn`, it is not known which request is the long one: instances get as many for each of their GPUs, and no order.

    Degrees that are powers of two fill servers without a rest, so none of these crosses one. Raises ValueError where no division of the GPUs
    holds every request.
    """
    degrees = tuple(sorted(each.degree for each in current))
    shares = _even if drawn else _deal
    ordered = _begun_first(loads) if drawn else sorted(loads, key=lambda load: (-load.remaining, load))
    ways = {*divisions(num_gpus, sorted(engines))} - {degrees}
    dealt = [shares(ordered, way, engines, _starts(way, engines, degrees, steps)) for way in ways]
    if current:
        dealt.append(_standing(current, loads, engines))
    dealt.sort(key=lambda each: (each.seconds, each.degrees))
    finalists = [*dealt[:FINALISTS], *(each for each in dealt[FINALISTS:] if each.degrees == degrees)]
    refined = {each.degrees: each if drawn else _refine(each, engines) for each in finalists}
    if merges:
        alike = {each.degrees: each for each in dealt if each.degrees[0] == each.degrees[-1]}
        refined = {way: _ending(each, engines) for way, each in sorted((alike | refined).items())}
    best = min(refined.values(), key=lambda each: (each.seconds, each.degrees), default=None)
    if best is None or best.seconds == float("inf"):
        raise ValueError(f"{num_gpus} GPUs as instances of {sorted(engines)} can't hold every request; give more GPUs or a larger degree")
    kept = refined.get(degrees)
    if kept and kept.seconds <= best.seconds / (1 - MARGIN):
        return _plan(kept, False, f"{_named(kept.degrees)} stay: {kept.seconds:.1f} s, {_named(best.degrees)} {best.seconds:.1f} s")
    versus = f" with the switch, {_named(kept.degrees)} {kept.seconds:.1f} s" if kept else ""
    return _plan(best, bool(current), f"{_named(best.degrees)}: {best.seconds:.1f} s{versus}")


def within(instances: Sequence[Instance], engines: Mapping[int, Roofline]) -> SwitchPlan:
    """Merges and splits that bring the last of `instances` through earlier by MARGIN at least, their costs in it.

    Each round takes the instance that is last and makes the change that has all it touches through first; none is changed twice, nor one that
    is not settled. Depends on nothing but its arguments, and not on the order of `instances`.
    """
    state = {each.name: each for each in sorted(instances)}
    times = {name: each.through_s(engines) for name, each in state.items()}
    before_s = best_s = max(times.values(), default=0.0)
    changes: list[Change] = []
    kept = 0
    while state:
        last = max(state, key=lambda name: (times[name], name))
        options = [*_merges(state[last], state, times, engines), *_splits(state[last], times, engines)]
        after_s, change = min(options, key=lambda option: (option[0], option[1].old), default=(times[last], None))
        if change is None or after_s >= times[last]:
            break
        for name in change.old:
            del state[name]
            times[name] = after_s
        changes.append(change)
        if max(times.values()) < best_s:
            best_s, kept = max(times.values()), len(changes)
    if not kept or best_s > (1 - MARGIN) * before_s:
        return SwitchPlan((), before_s, before_s, f"no switch shortens {before_s:.1f} s by {100 * MARGIN:.0f} %")
    return SwitchPlan(tuple(changes[:kept]), before_s, best_s, "; ".join(change.why for change in changes[:kept]))


def _merges(
    last: Instance, state: Mapping[str, Instance], times: Mapping[str, float], engines: Mapping[int, Roofline]
) -> list[tuple[float, Change]]:
    """`last` with those of its server that are through first and fill a larger degree exactly; none where a later merge is better than all.

    Waits are left out of that: they pass whenever it merges, and counted they would put it off for ever.
    """
    others = [each for name, each in state.items() if name != last.name and each.server == last.server and each.settled]
    found, later_s = list[tuple[float, tuple[float, Change]]](), math.inf
    for degree in sorted(engines):
        if degree <= last.degree or not last.settled:
            continue
        group, filled = [last], last.degree
        for other in sorted(others, key=lambda each: (times[each.name], each.name)):
            if filled + other.degree <= degree:
                group.append(other)
                filled += other.degree
        if filled == degree:
            names = tuple(sorted(each.name for each in group))
            loads = _longest_first([load for each in group for load in each.loads])
            cost_s = _switch_s(loads, engines[last.degree], engines[degree])
            now_s = finish_s(_still(loads), engines[degree]) + cost_s
            found.append((now_s, _option(names, degree, (loads,), times, cost_s, engines)))
            still = [each._replace(loads=_still(each.loads)) for each in group]
            later_s = min(later_s, _later_s(still, degree, engines))
    return [option for now_s, option in found if now_s <= later_s]


def _still(loads: Sequence[Load]) -> tuple[Load, ...]:
    return tuple(load._replace(wait_s=0.0) for load in loads)


def _later_s(group: Sequence[Instance], degree: int, engines: Mapping[int, Roofline]) -> float:
    """When `group` is through at best if it merges into `degree` later than now."""
    through_s = max(each.through_s(engines) for each in group)
    return min(_merged_s(group, degree, engines, share * through_s) for share in LATER)


def _merged_s(group: Sequence[Instance], degree: int, engines: Mapping[int, Roofline], at_s: float) -> float:
    """When it is through if it merges then, the cost in it."""
    left = [load for each in group for load in left_after(each.loads, engines[each.degree], max(0.0, at_s - each.start_s))]
    merged = engines[degree]
    return at_s + max(_switch_s(left, engines[each.degree], merged) for each in group) + finish_s(_longest_first(left), merged)


def _splits(last: Instance, times: Mapping[str, float], engines: Mapping[int, Roofline]) -> Iterator[tuple[float, Change]]:
    """Parts of its own degree each. Where engines start anew, those that wake do so together, once the split one has given their GPUs away."""
    for degree in sorted(engines):
        if degree < last.degree and last.degree % degree == 0 and last.settled:
            num = last.degree // degree
            dealt = _deal(_longest_first(last.loads), (degree,) * num, engines, [0.0] * num)
            cost_s = _switch_s(last.loads, engines[last.degree], engines[degree]) + engines[degree].spec.restart_s
            parts = tuple(each.loads for each in dealt.instances)
            yield _option((last.name,), degree, parts, times, cost_s, engines)


def _option(
    names: tuple[str, ...],
    degree: int,
    parts: tuple[tuple[Load, ...], ...],
    times: Mapping[str, float],
    cost_s: float,
    engines: Mapping[int, Roofline],
) -> tuple[float, Change]:
    then_s = max(finish_s(loads, engines[degree]) for loads in parts)
    saves_s = max(times[name] for name in names) - then_s
    verb = f"merge {' + '.join(names)} into" if len(parts) == 1 else f"split {names[0]} into {len(parts)} of"
    why = f"{verb} degree {degree}: saves {saves_s:.1f} s of tail, costs {cost_s:.1f} s"
    requests = tuple(tuple(load.name for load in loads) for loads in parts)
    return then_s + cost_s, Change(names, degree, requests, saves_s, cost_s, why)


def _switch_s(loads: Sequence[Load], before: Roofline, after: Roofline) -> float:
    return before.reconfigure_s(sum(load.cached for load in loads), after)


def _longest_first(loads: Sequence[Load]) -> tuple[Load, ...]:
    """Those whose cache is there go on; of the rest the longest begin."""
    return tuple(sorted(loads, key=lambda load: (not load.cached, -load.remaining, load)))


def _begun_first(loads: Sequence[Load]) -> list[Load]:
    """Those whose cache is there go on; the rest begin in their order."""
    return sorted(loads, key=lambda load: not load.cached)


def _standing(current: Sequence[Instance], loads: Sequence[Load], engines: Mapping[int, Roofline]) -> _Dealt:
    """As it is; what none of `current` has yet comes to the one with fewest requests for its GPUs."""
    instances = sorted(current, key=lambda each: (each.degree, each.name))
    here = {load.name for each in instances for load in each.loads}
    return _dealt_in_turn(instances, [load for load in loads if load.name not in here], engines)


def _even(ordered: Sequence[Load], degrees: tuple[int, ...], engines: Mapping[int, Roofline], starts: Sequence[float]) -> _Dealt:
    """As many to each instance for its GPUs, in turn."""
    empty = [Instance(f"{place:04d}", degree, start_s=starts[place]) for place, degree in enumerate(degrees)]
    return _dealt_in_turn(empty, ordered, engines)


def _dealt_in_turn(instances: Sequence[Instance], more: Sequence[Load], engines: Mapping[int, Roofline]) -> _Dealt:
    queues = [list(each.loads) for each in instances]
    heap = [(len(queue) / each.degree, place) for place, (each, queue) in enumerate(zip(instances, queues, strict=True))]
    heapify(heap)
    for load in more:
        _, place = heap[0]
        queues[place].append(load)
        heapreplace(heap, (len(queues[place]) / instances[place].degree, place))
    full = tuple(each._replace(loads=tuple(queue)) for each, queue in zip(instances, queues, strict=True))
    return _Dealt(max((each.through_s(engines) for each in full), default=0.0), tuple(each.degree for each in full), full)


def _deal(ordered: Sequence[Load], degrees: tuple[int, ...], engines: Mapping[int, Roofline], starts: Sequence[float]) -> _Dealt:
    """Each of `ordered`, longest first, to the instance that would be through first with it.

    What one more adds is known at once: while its tokens last every step has one request more; where the KV room is full, its share of steps.
    """
    bins: dict[int, list[_Bin]] = {}
    for place, degree in enumerate(degrees):
        bins.setdefault(degree, []).append(_Bin(place, starts[place]))
    for heap in bins.values():
        heapify(heap)
    prefills: dict[tuple[int, int, int], float] = {}  # most requests have a prompt of a common length, or a cache

    def prefill_s(load: Load, degree: int) -> float:
        key = degree, load.context, load.cached
        if key not in prefills:
            prefills[key] = engines[degree].prefill_s(load.context - load.cached, load.cached)
        return prefills[key]

    for load in ordered:
        then = {degree: heap[0].seconds + heap[0].added_s(load, engines[degree], prefill_s(load, degree)) for degree, heap in bins.items()}
        degree = min(then, key=lambda each: (then[each], each))
        first = bins[degree][0]
        first.take(load, then[degree])
        heapreplace(bins[degree], first)
    all_bins = sorted((each for heap in bins.values() for each in heap), key=lambda each: each.place)
    made = tuple(Instance(f"{each.place:04d}", degrees[each.place], tuple(each.loads), start_s=starts[each.place]) for each in all_bins)
    return _Dealt(max((each.through_s(engines) for each in made), default=0.0), degrees, made)


class _Bin:
    """An instance while requests are dealt."""

    def __init__(self, place: int, seconds: float) -> None:
        self.place = place
        self.loads: list[Load] = []
        self.seconds = seconds
        self._held = 0.0
        self._room = 0.0
        self._step_s = self._with_one_more_s = 0.0

    def __lt__(self, other: "_Bin") -> bool:
        return (self.seconds, self.place) < (other.seconds, other.place)

    def added_s(self, load: Load, engine: Roofline, prefill_s: float) -> float:
        num, held = len(self.loads), self._held + load.context + load.remaining / 2
        self._with_one_more_s = engine.step_s(num + 1, held)
        full = num >= engine.spec.num_slots or self._room + load.context + load.remaining > engine.kv_tokens
        step_s = self._with_one_more_s / (num + 1) if full else self._with_one_more_s - self._step_s
        return prefill_s + load.remaining * step_s

    def take(self, load: Load, seconds: float) -> None:
        """The last one that was asked about."""
        self._step_s = self._with_one_more_s
        self.loads.append(load)
        self.seconds = seconds
        self._held += load.context + load.remaining / 2
        self._room += load.context + load.remaining


def _starts(degrees: Sequence[int], engines: Mapping[int, Roofline], current: Sequence[int], steps: int) -> list[float]:
    """Seconds until each instance is there: those of a degree that is there already begin at once, others after this step's part of the switch.

    Where engines start anew and there are to be more than now, the switch is two starts, as in `_splits`.
    """
    there = Counter(current)
    woken = len(degrees) > len(current)
    starts: list[float] = []
    for degree in degrees:
        there[degree] -= 1
        new = bool(current) and there[degree] < 0
        changes = [engines[each].reconfigure_s(0, engines[degree]) for each in set(current) if each != degree]
        switch_s = max(changes, default=0.0) + woken * engines[degree].spec.restart_s
        starts.append(switch_s / steps if new else 0.0)
    return starts


def _refine(dealt: _Dealt, engines: Mapping[int, Roofline]) -> _Dealt:
    better = shorten(dealt.instances, engines, most=REFINEMENTS)
    return _Dealt(better.after_s, dealt.degrees, better.instances)


def _ending(dealt: _Dealt, engines: Mapping[int, Roofline]) -> _Dealt:
    """With its time if the instances of its smallest degree merge where that is best; a merge of the last of them stands for all."""
    times = {each.name: each.through_s(engines) for each in dealt.instances}
    small = dealt.degrees[0]
    slowest = sorted((each for each in dealt.instances if each.degree == small), key=lambda each: -times[each.name])
    larger = [each for each in engines if each > small and each % small == 0 and each // small <= len(slowest)]
    merged_s = min((_later_s(slowest[: each // small], each, engines) for each in larger), default=math.inf)
    others_s = max((times[each.name] for each in dealt.instances if each.degree > small), default=0.0)
    return dealt._replace(seconds=min(dealt.seconds, max(others_s, merged_s)))


def _plan(found: _Dealt, switched: bool, why: str) -> StepPlan:
    assigned = tuple(tuple(load.name for load in each.loads) for each in found.instances)
    return StepPlan(found.degrees, assigned, found.seconds, switched, why)


def _named(degrees: Sequence[int]) -> str:
    """Such as `TP2 x 4 + TP8 x 1`."""
    return " + ".join(f"TP{degree} x {count}" for degree, count in sorted(Counter(degrees).items()))

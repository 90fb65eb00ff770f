"""Moves requests off the engine that would finish last, the longest remaining first, each at most once per interval.

OrchestrRL monitors the load of its instances and moves requests off a straggler, by KV transfer or recomputation, whichever is faster. The
rule below, its thresholds and the order of the search are ours.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from rubato.planning.makespan import Instance, Load
from rubato.planning.moves import Carry, Transfer, carry
from rubato.planning.roofline import Roofline

MARGIN = 0.05
"""A plan that shortens the whole by a smaller share is left alone: its costs are off by as much."""

CANDIDATES = 6
"""Requests of the straggler that are tried, and engines that each is tried on: a plan is made once or twice a second."""


class RequestMove(NamedTuple):
    """One request that goes from one engine to another."""

    request: str
    source: str
    target: str
    carry: Carry
    why: str


class Rebalance(NamedTuple):
    """The moves in their order, and when the last engine is through without and with them."""

    moves: tuple[RequestMove, ...]
    before_s: float
    after_s: float
    why: str


class Shortened(NamedTuple):
    """Instances as they are after `moves`."""

    instances: tuple[Instance, ...]
    moves: tuple[RequestMove, ...]
    before_s: float
    after_s: float


class _Option(NamedTuple):
    """Both instances after a move, or an exchange; `worst_s` is when the later one is through."""

    worst_s: float
    target_s: float
    moves: tuple[RequestMove, ...]
    changed: tuple[Instance, Instance]


def rebalance(
    instances: Sequence[Instance],
    engines: Mapping[int, Roofline],
    *,
    now_s: float,
    moved_s: Mapping[str, float] | None = None,
    interval_s: float = 10.0,
    most: int = 8,
) -> Rebalance:
    """At most `most` moves that bring the last of `instances` through earlier, by more than MARGIN; `engines` by degree.

    `moved_s` says when each request was last moved: one moved less than `interval_s` before `now_s` stays, and none is moved twice in a plan.
    Depends on nothing but its arguments, and not on the order of `instances`.
    """
    recent = {name for name, at in (moved_s or {}).items() if now_s - at < interval_s}
    found = shorten(instances, engines, recent, most)
    if not found.moves or found.after_s > (1 - MARGIN) * found.before_s:
        why = f"no moves shorten {found.before_s:.1f} s by {100 * MARGIN:.0f} %"
        return Rebalance((), found.before_s, found.before_s, why)
    num = f"{len(found.moves)} move" + "s" * (len(found.moves) > 1)
    why = f"{num}: the last engine is through in {found.after_s:.1f} s instead of {found.before_s:.1f} s"
    return Rebalance(found.moves, found.before_s, found.after_s, why)


def shorten(instances: Sequence[Instance], engines: Mapping[int, Roofline], fixed: Collection[str] = (), most: int = 8) -> Shortened:
    """Moves, however little each brings, until none brings the last instance through earlier, or all are through within MARGIN of it.

    Requests in `fixed` stay.
    """
    state = {each.name: each for each in sorted(instances)}
    times = {name: each.through_s(engines) for name, each in state.items()}
    before_s = after_s = max(times.values(), default=0.0)
    best, moves, kept, stay = tuple(state.values()), list[RequestMove](), 0, set(fixed)
    while state and len(moves) < most:
        last = max(times, key=lambda name: (times[name], name))
        if min(times.values()) > (1 - MARGIN) * times[last]:
            break
        option = _best(state, times, last, engines, stay, most - len(moves))
        if option is None:
            break
        state.update({each.name: each for each in option.changed})
        times.update({each.name: each.through_s(engines) for each in option.changed})
        moves += option.moves
        stay |= {move.request for move in option.moves}
        if max(times.values()) < after_s:
            best, after_s, kept = tuple(state.values()), max(times.values()), len(moves)
    return Shortened(best, tuple(moves[:kept]), before_s, after_s)


def moved(load: Load, source: Roofline, target: Roofline) -> tuple[Load, Carry]:
    """`load` as the target has it, and how it gets there. The slower of both ends' NICs carries the cache."""
    if not load.context or source.spec.restart_s:
        return load._replace(cached=0), carry(Transfer(load.context, 0, 0.0, 0.0, 0.0))
    seconds = max(source.kv_move_s(load.context), target.kv_move_s(load.context))
    size = load.context * source.spec.model.kv_bytes_per_token
    prefill_tokens_s = load.context / target.prefill_s(load.context)
    way = carry(Transfer(load.context, load.cached, source.spec.model.kv_bytes_per_token, size / seconds, prefill_tokens_s))
    if not way.with_cache:
        return load._replace(cached=0), way
    missing_s = target.prefill_s(load.context - load.cached, load.cached)
    return load._replace(wait_s=load.wait_s + max(0.0, way.cache_s - missing_s)), way


def _best(
    state: Mapping[str, Instance], times: Mapping[str, float], last: str, engines: Mapping[int, Roofline], stay: Collection[str], most: int
) -> _Option | None:
    """The first request of the `last` instance, longest remaining first, whose move leaves both instances through before it was.

    Where no move does, the best exchange with a shorter request.
    """
    targets = sorted((name for name in state if name != last), key=lambda name: (times[name], name))[:CANDIDATES]
    movable = [load for load in state[last].loads if load.name not in stay]
    own = sorted(movable, key=lambda load: (-load.remaining, load))[:CANDIDATES]
    for load in own:
        moves = (_move(state[last], load, state[target], engines) for target in targets)
        found = min(moves, key=lambda option: (option.worst_s, option.target_s), default=None)
        if found and found.worst_s < times[last]:
            return found
    exchanges = (
        _exchange(state[last], load, state[target], other, engines)
        for load in own
        for target in targets
        for other in state[target].loads
        if other.name not in stay and other.remaining < load.remaining
    )
    found = min(islice(exchanges, CANDIDATES**2), key=lambda option: option.worst_s, default=None) if most > 1 else None
    return found if found and found.worst_s < times[last] else None


def _move(source: Instance, load: Load, target: Instance, engines: Mapping[int, Roofline]) -> _Option:
    there, way = moved(load, engines[source.degree], engines[target.degree])
    less = source._replace(loads=tuple(each for each in source.loads if each != load))
    more = target._replace(loads=(*target.loads, there))
    why = f"{load.remaining:.0f} tokens left on {source.name}; {way.why}"
    move = RequestMove(load.name, source.name, target.name, way, why)
    target_s = more.through_s(engines)
    return _Option(max(less.through_s(engines), target_s), target_s, (move,), (less, more))


def _exchange(source: Instance, load: Load, target: Instance, other: Load, engines: Mapping[int, Roofline]) -> _Option:
    there = _move(source, load, target, engines)
    less, more = there.changed
    back = _move(more, other, less, engines)
    return _Option(back.worst_s, back.target_s, there.moves + back.moves, (back.changed[1], back.changed[0]))

"""Decides which engine takes a request: its session's engine while that is fair to the others, else the least loaded one."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple
from zlib import crc32

from rubato.planning.engine_info import EngineInfo, WeightsNeed


@dataclass(eq=False, slots=True)
class EngineView:
    """One engine, alive at the moment of the look. A dead one has no view."""

    info: EngineInfo
    in_flight: int = 0
    """Requests given to it and not yet answered, running or waiting inside."""
    resting: bool = False
    """It refused the last request, or could not be reached: it takes no new one for a moment."""

    @property
    def name(self) -> str:
        return self.info.name


QUEUE_FACTOR: Final = 0.125
"""Requests an engine may hold beyond its slots, as a share of them: the next one starts the moment a slot frees, and
the rest wait where they can still go elsewhere."""

STICKY_SLACK: Final = 0.25
"""How much more loaded (share of slots) a session's engine may be than the least loaded: recomputing a KV cache costs about
that much of a turn."""

MASK: Final = 0xFFFFFFFF


class Wait(Enum):
    """Why no engine takes a request just now."""

    NO_ROOM = "no room"
    PINNED = "engines with room are pinned to an older version"
    NEVER = "no engine is pinned to its version"


class Choice(NamedTuple):
    """The engine that takes the request."""

    engine: str
    why: Literal["sticky", "least loaded", "session's engine is overloaded", "session's engine is gone"]


def capacity(engine: EngineView) -> int:
    """Requests `engine` may hold: its slots and a small queue of at least one."""
    num_slots = engine.info.num_slots
    return num_slots + max(1, int(num_slots * QUEUE_FACTOR))


def choose(engines: Collection[EngineView], session: str, need: WeightsNeed, sticky: str | None = None) -> Choice | Wait:
    """Route one request of `session` over `engines`; `sticky` names the engine that served the session last.

    Never an engine that is suspended, resting or full, nor one that is pinned to an older version; for an exact request only those that are
    pinned to its version. A last resort only where all that serve the request are one. Otherwise least loaded by in_flight / num_slots, those
    that already hold the version before those that must pull first. Equals are spread by rendezvous hashing of the session, so the same
    session meets the same engine and no engine is the first choice of all sessions. Depends on nothing but its arguments, and not on
    the order of `engines`.
    """
    best, least, kept_load, kept_slots = _scan(engines, session, need, sticky, in_need=False)
    if not best:
        able = [e for e in engines if (_serves(e, need) if e.info.pinned else not need.exact)]
        if all(engine.info.is_last_resort for engine in able):
            best, least, kept_load, kept_slots = _scan(able, session, need, sticky, in_need=True)
    if not best:
        return _why_none(engines, need)
    if not sticky:
        return Choice(best, "least loaded")
    if kept_load is None:
        return Choice(best, "session's engine is gone")
    # One request of slack at least, so that small engines keep their sessions too.
    if kept_load <= least + max(STICKY_SLACK, 1.0 / kept_slots):
        return Choice(sticky, "sticky")
    return Choice(best, "session's engine is overloaded")


def _scan(
    engines: Collection[EngineView], session: str, need: WeightsNeed, sticky: str | None, *, in_need: bool
) -> tuple[str, float, float | None, int]:
    """The best engine ("" for none), the least load of all usable ones, and the load and slots of `sticky` if it is usable.

    `in_need`: last resorts count as well.
    """
    best, best_load, best_stale, best_weight = "", 2.0, True, -1
    kept_load: float | None = None
    kept_slots, least = 1, 2.0
    for engine in engines:
        info, in_flight = engine.info, engine.in_flight
        name, num_slots = info.name, info.num_slots
        if engine.resting or info.suspended or (info.is_last_resort and not in_need):
            continue
        if in_flight >= num_slots and in_flight >= capacity(engine):
            continue
        if not _serves(engine, need) if info.pinned else need.exact:
            continue
        load, stale, weight = in_flight / num_slots, info.version_of(need.adapter) < need.version, -1
        if load < least:
            least = load
        if name == sticky:
            kept_load, kept_slots = load, num_slots
        if best:
            if stale and not best_stale:
                continue
            if stale == best_stale:
                if load > best_load:
                    continue
                if load == best_load:
                    weight = _weight(session, name)
                    best_weight = _weight(session, best) if best_weight < 0 else best_weight
                    if (weight, name) < (best_weight, best):
                        continue
        best, best_load, best_stale, best_weight = name, load, stale, weight
    return best, least, kept_load, kept_slots


def _serves(engine: EngineView, need: WeightsNeed) -> bool:
    """Whether an engine that is pinned may take it."""
    return need.is_met_by(engine.info.version_of(need.adapter))


def _why_none(engines: Collection[EngineView], need: WeightsNeed) -> Wait:
    pinned = [engine for engine in engines if engine.info.pinned]
    if need.exact:
        return Wait.NO_ROOM if any(_serves(engine, need) for engine in pinned) else Wait.NEVER
    has_room = any(
        not (engine.info.suspended or engine.resting or engine.info.is_last_resort) and engine.in_flight < capacity(engine)
        for engine in pinned
    )
    return Wait.PINNED if has_room else Wait.NO_ROOM


def _weight(session: str, name: str) -> int:
    """32 well-mixed bits of the pair. CRC alone is linear and would favour some engines; the multiplications mix it."""
    bits = crc32(session.encode()) ^ crc32(name.encode()) * 0x9E3779B1 & MASK
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & MASK
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & MASK
    return bits ^ bits >> 16

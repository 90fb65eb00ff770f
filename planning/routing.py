"""Decides which engine takes a request: its session's engine while that is fair to the others, else the least loaded one."""

from collections.abc import Collection
from typing import Final, Literal, NamedTuple
from zlib import crc32


class EngineView(NamedTuple):
    """One engine, alive at the moment of the snapshot. A dead one has no view."""

    name: str
    version: int
    """Newest weight version it is known to hold."""
    num_slots: int
    """Requests it decodes at once; at least 1."""
    in_flight: int
    """Requests given to it and not yet answered, running or waiting inside."""
    suspended: bool = False
    """It takes no new request: paused, drained, or it refused the last one."""
    held: bool = False
    """It stays on `version` for an evaluation."""
    asleep: bool = False
    """What it is given waits until it wakes."""


class RequestView(NamedTuple):
    """One request for a completion."""

    session: str
    """The trajectory; its earlier turns left a KV cache on one engine."""
    min_version: int = 0
    num_resumed: int = 0
    """Tokens that it has already, from an engine that died or handed it back."""
    exact: bool = False
    """It belongs to an evaluation of `min_version`: only an engine that is held there serves it."""


QUEUE_FACTOR: Final = 0.125
"""Requests an engine may hold beyond its slots, as a share of them: the next one starts the moment a slot frees, and
the rest wait where they can still go elsewhere."""

STICKY_SLACK: Final = 0.25
"""How much more loaded (share of slots) a session's engine may be than the least loaded: recomputing a KV cache costs about
that much of a turn."""

MASK: Final = 0xFFFFFFFF

Why = Literal[
    "sticky",
    "least loaded",
    "session's engine is overloaded",
    "session's engine is gone",
    "no room",
    "engines with room are held",
    "no engine holds its version",
]


class Route(NamedTuple):
    """The engine that takes the request; None while no engine has room."""

    engine: str | None
    why: Why


def capacity(engine: EngineView) -> int:
    """Requests `engine` may hold: its slots and a small queue of at least one."""
    return engine.num_slots + max(1, int(engine.num_slots * QUEUE_FACTOR))


def goes_first(request: RequestView) -> bool:
    """Whether it waits for room at the head of the queue: one that has tokens already holds up a group whose others are further."""
    return request.num_resumed > 0


def choose(request: RequestView, engines: Collection[EngineView], sticky: str | None = None) -> Route:
    """Route one request over `engines`; `sticky` names the engine that served the session last.

    Never an engine that is suspended or full, nor one that is held at an older version; for an exact request only those that are held at its
    version. One that is asleep only where all that serve the request are. Otherwise least loaded by in_flight / num_slots, those that already hold
    `min_version` before those that must pull first. Equals are spread by rendezvous hashing of the session, so the same
    session meets the same engine and no engine is everybody's first choice. Depends on nothing but its arguments, and not on
    the order of `engines`.
    """
    best, least, kept_load, kept_slots = _scan(request, engines, sticky)
    if not best:
        able = [e for e in engines if (_serves(e.version, request) if e.held else not request.exact)]
        if all_asleep(able):
            woken = [engine._replace(asleep=False) for engine in able]
            best, least, kept_load, kept_slots = _scan(request, woken, sticky)
    if not best:
        return Route(None, _why_none(request, engines))
    if not sticky:
        return Route(best, "least loaded")
    if kept_load is None:
        return Route(best, "session's engine is gone")
    # One request of slack at least, so that small engines keep their sessions too.
    if kept_load <= least + max(STICKY_SLACK, 1.0 / kept_slots):
        return Route(sticky, "sticky")
    return Route(best, "session's engine is overloaded")


def _scan(
    request: RequestView, engines: Collection[EngineView], sticky: str | None
) -> tuple[str, float, float | None, int]:
    """The best engine ("" for none), the least load of all usable ones, and the load and slots of `sticky` if it is usable."""
    best, best_load, best_stale, best_weight = "", 2.0, True, -1
    kept_load: float | None = None
    kept_slots, least = 1, 2.0
    for engine in engines:
        # Unpacked, because this loop is most of the cost of a request with many engines.
        name, version, num_slots, in_flight, suspended, held, asleep = engine
        if suspended or asleep or (in_flight >= num_slots and in_flight >= capacity(engine)):
            continue
        if not _serves(version, request) if held else request.exact:
            continue
        load, stale, weight = in_flight / num_slots, version < request.min_version, -1
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
                    weight = _weight(request.session, name)
                    best_weight = _weight(request.session, best) if best_weight < 0 else best_weight
                    if (weight, name) < (best_weight, best):
                        continue
        best, best_load, best_stale, best_weight = name, load, stale, weight
    return best, least, kept_load, kept_slots


def all_asleep(engines: Collection[EngineView]) -> bool:
    """Whether there are some, and each is asleep."""
    return bool(engines) and all(engine.asleep for engine in engines)


def _serves(version: int, request: RequestView) -> bool:
    """Whether an engine that is held at `version` may take it."""
    return version == request.min_version if request.exact else version >= request.min_version


def _why_none(request: RequestView, engines: Collection[EngineView]) -> Why:
    held = [engine for engine in engines if engine.held]
    if request.exact:
        there = any(engine.version == request.min_version for engine in held)
        return "no room" if there else "no engine holds its version"
    has_room = any(not (engine.suspended or engine.asleep) and engine.in_flight < capacity(engine) for engine in held)
    return "engines with room are held" if has_room else "no room"


def _weight(session: str, name: str) -> int:
    """32 well-mixed bits of the pair. CRC alone is linear and would favour some engines; the multiplications mix it."""
    bits = crc32(session.encode()) ^ crc32(name.encode()) * 0x9E3779B1 & MASK
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & MASK
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & MASK
    return bits ^ bits >> 16

"""The bytes of a phase as its job goes on: means that forget, and whether circuits planned for earlier ones still fit.

RFabric profiles a job's first iteration (section 4.3.1) and has its control plane monitor traffic from then on (abstract). How it forgets,
and from which change on it plans anew, is not published: the rules here are ours.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from rubato.planning.demand import Demand

KEPT: Final = 0.5
"""Weight of the mean so far against the newest round of a phase: after four rounds a sixteenth is left of what was before."""

CHANGED: Final = 0.1
"""Share of a phase's bytes that go another way than when its circuits were planned: from there on they are planned anew."""

SMALL: Final = 0.01
"""What two endpoints send each other counts from this share of the job's fullest pair on: below, it is control, and worth no port."""

Way = tuple[str, str]

Volumes = dict[Way, float]
"""Mean bytes of a round, by source and target."""


def volumes(traffic: Sequence[Demand]) -> Volumes:
    """The same, added up by way."""
    found: Volumes = {}
    for source, target, size_bytes in traffic:
        found[source, target] = found.get((source, target), 0.0) + size_bytes
    return found


def demands(means: Mapping[Way, float]) -> tuple[Demand, ...]:
    """In whole bytes; none that has not one."""
    return tuple((*way, size_bytes) for way, mean in means.items() if (size_bytes := round(mean)) > 0)


def followed(before: Mapping[Way, float], now: Mapping[Way, float], least: float = 0.0) -> Volumes:
    """Means after one more round, whose bytes are `now`. A way that is new has them at once; one below `least` is forgotten."""
    found = {way: KEPT * mean + (1 - KEPT) * now.get(way, 0.0) for way, mean in before.items()}
    found |= {way: size for way, size in now.items() if way not in before}
    return {way: mean for way, mean in found.items() if mean > least}


def strayed(planned: Mapping[Way, float], now: Mapping[Way, float]) -> float:
    """Share of the bytes that go another way than `planned`, from 0 to 1: circuits depend on shares alone, not on how many bytes there are."""
    before_all, now_all = sum(planned.values()), sum(now.values())
    if not before_all or not now_all:
        return float(before_all != now_all)
    return sum(abs(planned.get(way, 0.0) / before_all - now.get(way, 0.0) / now_all) for way in planned.keys() | now.keys()) / 2

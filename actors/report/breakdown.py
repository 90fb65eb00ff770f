"""What rewards consist of and what environments tell in numbers: taken from a rollout's info, and as means over many samples."""

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any, Protocol

from rubato.actors.config import RESERVED_SCORES
from rubato.actors.messages.samples import MOST_FIGURES, MOST_REWARD
from rubato.bus.message import well_formed

SHOWN = 32
"""Keys of the environment's info that become metrics: each step writes a row, which has to stay readable."""

LONGEST_KEY = 64
"""Characters; what is longer is no name."""


class Told(Protocol):
    """What a sample says of itself; see Trajectory."""

    @property
    def scores(self) -> Mapping[str, float]: ...
    @property
    def info(self) -> Mapping[str, float]: ...


def numbers_of(info: Mapping[Any, Any]) -> dict[str, float]:
    """The finite numbers in `info`, true and false as 1 and 0: the first `MOST_FIGURES` keys by name."""
    named = ((well_formed(key), _number(value)) for key, value in info.items() if isinstance(key, str) and len(key) <= LONGEST_KEY)
    return dict(sorted((key, value) for key, value in named if value is not None)[:MOST_FIGURES])


def breakdown(samples: Collection[Told]) -> dict[str, float]:
    """`reward/<function>` and `env/<key>`, each the mean over the samples that have it; of more than `SHOWN` keys the first by name."""
    scores, info = _means(s.scores for s in samples), _means(s.info for s in samples)
    row = {f"reward/{name}": mean for name, mean in scores.items() if name not in RESERVED_SCORES}
    return row | {f"env/{key}": info[key] for key in sorted(info)[:SHOWN]}


def left_out(samples: Collection[Told]) -> list[str]:
    """The keys of info that `breakdown` leaves out."""
    return sorted({key for sample in samples for key in sample.info})[SHOWN:]


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return None
    return number if abs(number) <= MOST_REWARD else None


def _means(given: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for figures in given:
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}

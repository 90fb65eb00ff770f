"""Random quantities of a workload: seconds, tokens or turns, drawn from a stated law."""

from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from rubato.runtime.config import Section


class Constant(Section):
    """Always `value`."""

    law: Literal["constant"] = "constant"
    value: float = Field(ge=0)

    def draw(self, chance: Random) -> float:
        return self.value


class Uniform(Section):
    """Between `low` and `high`."""

    law: Literal["uniform"]
    low: float = Field(ge=0)
    high: float = Field(ge=0)

    def draw(self, chance: Random) -> float:
        return chance.uniform(self.low, self.high)


class Normal(Section):
    """N(mean, sigma); what falls below 0 is 0."""

    law: Literal["normal"]
    mean: float = Field(ge=0)
    sigma: float = Field(ge=0)

    def draw(self, chance: Random) -> float:
        return max(0.0, chance.gauss(self.mean, self.sigma))


class LogNormal(Section):
    """Its logarithm has the median's and `sigma`; cut at `most`."""

    law: Literal["lognormal"]
    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    most: float = Field(gt=0)

    def draw(self, chance: Random) -> float:
        return min(self.most, self.median * chance.lognormvariate(0.0, self.sigma))


class Quantiles(Section):
    """Straight lines between (share, value) points, such as a digitised distribution curve; the shares run from 0 to 1."""

    law: Literal["quantiles"]
    points: tuple[tuple[float, float], ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        shares, values = zip(*self.points, strict=True)
        if shares[0] != 0 or shares[-1] != 1 or any(a >= b for a, b in pairwise(shares)):
            raise ValueError("points must have rising shares from 0 to 1")
        if any(a > b for a, b in pairwise(values)):
            raise ValueError("points must not have falling values")
        return self

    def draw(self, chance: Random) -> float:
        return self.at(chance.random())

    def at(self, share: float) -> float:
        """The value below which this share lies."""
        for (low, a), (high, b) in pairwise(self.points):
            if share <= high:
                return a + (b - a) * (share - low) / (high - low)
        return self.points[-1][1]


class Histogram(Section):
    """Whole numbers, each as often as it was counted."""

    law: Literal["histogram"]
    counts: dict[int, int] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.counts) < 0 or min(self.counts.values()) < 0 or not any(self.counts.values()):
            raise ValueError("counts must be of numbers from 0 on, and some number must have been counted")
        return self

    @property
    def mean(self) -> float:
        return sum(value * num for value, num in self.counts.items()) / sum(self.counts.values())

    def draw(self, chance: Random) -> float:
        return chance.choices(tuple(self.counts), tuple(self.counts.values()))[0]


def _law(value: object) -> object:
    """A function, since pydantic reads no discriminator from fields with a validator before them, as every Section's have."""
    return value.get("law", "constant") if isinstance(value, Mapping) else getattr(value, "law", None)


Distribution = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Uniform, Tag("uniform")]
    | Annotated[Normal, Tag("normal")]
    | Annotated[LogNormal, Tag("lognormal")]
    | Annotated[Quantiles, Tag("quantiles")]
    | Annotated[Histogram, Tag("histogram")],
    Discriminator(_law),
]

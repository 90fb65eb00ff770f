"""A scenario with some keys changed: what a sensitivity table is made of."""

from typing import Any, TypeVar

from pydantic import ValidationError

from runtime.config.config import Section
from runtime.errors import ConfigError
from sim.scenario import Scenario

S = TypeVar("S", bound=Scenario)


class Variation(Section):
    """Keys, dotted from the scenario's root, and what each becomes."""

    name: str
    set: dict[str, Any]


def varied(scenario: S, variation: Variation) -> S:
    """`scenario` with the keys changed; ConfigError where that leaves no scenario."""
    tree = scenario.model_dump(mode="json")
    for key, value in variation.set.items():
        inner = tree
        *outer, last = key.split(".")
        for name in outer:
            inner = inner.get(name)
            if not isinstance(inner, dict):
                raise ConfigError(f"The variation {variation.name!r} sets {key}, which is not a key.")
        inner[last] = value
    try:
        return type(scenario).model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"The variation {variation.name!r} is refused: {where}: {first['msg']}.") from error

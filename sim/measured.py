"""Transfers that a paper timed: where a scenario's rates come from."""

from pydantic import Field

from runtime.config.config import Section
from sim.weight_sync import GIB


class Measured(Section):
    """`gib` GiB took `seconds`."""

    gib: float = Field(gt=0)
    seconds: float = Field(gt=0)

    @property
    def bytes_s(self) -> float:
        return self.gib * GIB / self.seconds

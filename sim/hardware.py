"""What network parts cost: read from configs/hardware, each file with its source."""

from typing import Self

from pydantic import Field, model_validator

from rubato.runtime.config import Section


class Prices(Section):
    """Network parts in US dollars, for one line rate."""

    name: str
    transceiver: float = Field(ge=0)
    """One end of an optical link."""
    eps_port: float = Field(ge=0)
    """One port of an electrical packet switch, without its transceiver."""
    ocs_port: float = Field(ge=0)
    """One duplex port of an optical circuit switch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.transceiver or (self.eps_port and self.ocs_port)):
            raise ValueError("transceiver, or both eps_port and ocs_port, must be above 0: no fabric is free")
        return self

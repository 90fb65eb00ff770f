"""What machines can do and what network parts cost: read from configs/hardware, each file with its source."""

from typing import Self

from pydantic import Field, model_validator

from runtime.config import Section


class GpuSpec(Section):
    """A GPU in its server, with one NIC per GPU. Rates are bytes per second in one direction."""

    name: str
    peak_flops: float = Field(gt=0)
    """Dense BF16."""
    hbm_bytes_s: float = Field(gt=0)
    hbm_bytes: float = Field(gt=0)
    nvlink_bytes_s: float = Field(gt=0)
    """Line rate."""
    nvlink_busbw_bytes_s: float = Field(gt=0)
    """What collectives reach of it."""
    nic_bytes_s: float = Field(gt=0)
    nic_busbw_bytes_s: float = Field(gt=0)
    gpus_per_server: int = Field(default=8, ge=1)
    usd: float = Field(gt=0)
    """Purchase, the server's share included."""
    usd_per_hour: float | None = Field(default=None, gt=0)


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

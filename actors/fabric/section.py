"""The fabric's section of the config: read by the controller and by the emulated switch."""

from pydantic import Field

from runtime.config import Section


class FabricSection(Section):
    """The optical fabric and its switch."""

    enabled: bool = True
    """False leaves the switch alone: everything takes the electrical path."""
    ports: int = Field(default=64, ge=2)
    """Duplex ports of the switch."""
    ports_per_endpoint: int = Field(default=4, ge=2)
    """Ports of each endpoint; endpoints beyond ports / ports_per_endpoint stay on the electrical path."""
    reconfiguration_s: float = Field(default=0.010, ge=0)
    """Time that changed circuits are dark; 3D MEMS by default."""
    switch_timeout_s: float = Field(default=2.0, gt=0)
    """Beyond the reconfiguration itself: a switch that answers later counts as unreachable."""

"""What a GPU can do, and the base of the specifications that planners count with: configs/hardware has one file per GPU, with its source."""

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Spec(BaseModel):
    """A specification: frozen, unknown keys refused, each field documented by the string below it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """`layers: yes` is a slip, not 1."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and (field.annotation is int or field.annotation is float):
            raise PydanticCustomError("bool_for_number", "it must be a number")
        return value


class GpuSpec(Spec):
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
    cpu: bool = False
    """It is a processor: engines share a host's cores, and none needs a device of its own."""
    usd: float = Field(gt=0)
    """Purchase, the server's share included."""
    usd_per_hour: float | None = Field(default=None, gt=0)

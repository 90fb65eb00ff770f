"""The scheduler's section of a cluster's config: its two pools, and what is agreed about sharing them."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from actors import catalog
from planning.coexecution import NodePool, SharedCluster
from runtime.config import Section

GB = 1e9


class ClusterPoolSection(Section):
    """Nodes of one class. A node is what one phase of one job has to itself."""

    hardware: str = ""
    """Class, a name from configs/hardware such as h20: it says what a GPU costs where `usd_hour` doesn't."""
    nodes: int = Field(default=1, ge=1, le=1024)
    """Phases that run at once in this pool, of different jobs."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of each node; 0 where jobs compute on CPU cores."""
    devices: tuple[str, ...] = ()
    """The GPUs of all nodes one after another, as CUDA_VISIBLE_DEVICES names them; empty leaves jobs what their own pools say."""
    usd_hour: float = Field(default=0.0, ge=0)
    """What a node costs; 0 takes the class's price for its GPUs."""
    memory_gb: float = Field(gt=0)
    """Host memory of each node for the states of all jobs that share it, in 10^9 bytes."""

    @field_validator("hardware")
    @classmethod
    def _class(cls, name: str) -> str:
        if name:
            catalog.hardware(name)
        return name

    @field_validator("devices", mode="before")
    @classmethod
    def _named(cls, given: object) -> object:
        return tuple(str(each) for each in given) if isinstance(given, list | tuple) else given

    @model_validator(mode="after")
    def _has_a_device_for_each(self) -> Self:
        if self.devices and len(self.devices) != self.nodes * self.gpus:
            raise ValueError(
                f"devices names {len(self.devices)}, and {self.nodes} nodes of {self.gpus} GPUs have {self.nodes * self.gpus}"
            )
        return self

    @property
    def node(self) -> NodePool:
        """As planners have it."""
        price = (catalog.hardware(self.hardware).usd_per_hour or 0.0) if self.hardware else 0.0
        return NodePool(self.usd_hour or price * max(1, self.gpus), self.memory_gb * GB, self.nodes)

    def devices_of(self, node: int) -> str:
        """CUDA_VISIBLE_DEVICES of a phase on `node`; empty where the pool names none."""
        return ",".join(self.devices[node * self.gpus : (node + 1) * self.gpus])


class SchedulerSection(Section):
    """A cluster, and how jobs share it. See docs/cluster.md."""

    rollout: ClusterPoolSection
    """Where jobs generate."""
    training: ClusterPoolSection
    """Where they train."""
    slo: float = Field(default=1.5, ge=1)
    """A job's time may be so many times its time alone, unless it was submitted with another bound."""
    residents: int = Field(default=5, ge=1)
    """Most jobs that share nodes."""
    epsilon: float = Field(default=0.0, ge=0, lt=1)
    """Share of the time in which a job's bound may be missed, as predicted from steps seen; 0 plans with the longest ones."""
    crashes: int = Field(default=3, ge=0)
    """A job is started again this often without having finished a step between; then it has failed."""

    @property
    def cluster(self) -> SharedCluster:
        """As planners have it."""
        return SharedCluster(self.rollout.node, self.training.node, self.residents, self.epsilon)

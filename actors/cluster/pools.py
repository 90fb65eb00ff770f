"""The pools of a cluster: the section of its config that says what they have and how jobs share them, and their names."""

import difflib
import re
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rubato.actors import catalog
from rubato.actors.cluster.lease import ROLLOUT, TRAINING
from rubato.actors.config import ClusterSection
from rubato.planning.coexecution import NodePool, SharedCluster
from rubato.runtime.actor import Actor
from rubato.runtime.config import Section
from rubato.runtime.errors import ConfigError

GB = 1e9
CLUSTER_HOST, HOST_CLASS = "cluster_host", "rubato.actors.cluster.joined:ClusterHost"
"""The role of a host that joined the cluster, and its class: only where nodes lie on such hosts."""
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")


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
    switch_s: float = Field(default=0.0, ge=0)
    """Loading a job's states before its phase, where it shares the node: jobs are planned with it."""
    cores: float = Field(default=0.0, ge=0)
    """CPU cores of each node that environments may take; 0 leaves them uncounted. On rollout nodes alone."""
    hosts: tuple[str, ...] = ()
    """A label of the host on which each node lies, one for all or one for each; empty: the cluster's own. Of rollout nodes alone."""

    @field_validator("hardware")
    @classmethod
    def _class(cls, name: str) -> str:
        if name:
            catalog.hardware(name)
        return name

    @field_validator("hosts")
    @classmethod
    def _are_labels(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for label in hosts:
            if label and not LABEL.fullmatch(label):
                raise ValueError(f"{label!r} is no label of a host: use letters, digits and . _ : -")
        return hosts

    @field_validator("devices", mode="before")
    @classmethod
    def _named(cls, given: object) -> object:
        return tuple(str(each) for each in given) if isinstance(given, list | tuple) else given

    @model_validator(mode="after")
    def _has_a_device_for_each(self) -> Self:
        if self.devices and len(self.devices) != self.nodes * self.gpus:
            raise ValueError(f"devices names {len(self.devices)}, and {self.nodes} nodes of {self.gpus} GPUs have {self.nodes * self.gpus}")
        return self

    @model_validator(mode="after")
    def _has_a_host_for_each(self) -> Self:
        if len(self.hosts) not in (0, 1, self.nodes):
            raise ValueError(f"hosts names {len(self.hosts)}, and there are {self.nodes} nodes: name one for all, or one for each")
        return self

    @property
    def node(self) -> NodePool:
        """As planners have it."""
        price = (catalog.hardware(self.hardware).usd_per_hour or 0.0) if self.hardware else 0.0
        return NodePool(self.usd_hour or price * max(1, self.gpus), self.memory_gb * GB, self.nodes, self.switch_s, self.cores)

    def devices_of(self, node: int) -> str:
        """CUDA_VISIBLE_DEVICES of a phase on `node`; empty where the pool names none."""
        return ",".join(self.devices[node * self.gpus : (node + 1) * self.gpus])

    def host_of(self, node: int) -> str:
        """Label of the host on which `node` lies; empty on the cluster's own."""
        return self.hosts[node % len(self.hosts)] if self.hosts else ""


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
    cold_s: float = Field(default=60.0, ge=0)
    """What a job's move to another group takes, until its own start was seen to take longer."""

    @model_validator(mode="after")
    def _cores_are_on_rollout_nodes(self) -> Self:
        if self.training.cores:
            raise ValueError("training.cores has no effect: environments run beside rollouts. Set rollout.cores")
        return self

    @model_validator(mode="after")
    def _jobs_train_where_their_folders_are(self) -> Self:
        if self.training.hosts:
            raise ValueError(
                "training.hosts has no effect: jobs train on the cluster's own host, where their folders are. Set rollout.hosts"
            )
        return self

    @property
    def cluster(self) -> SharedCluster:
        """As planners have it."""
        return SharedCluster(self.rollout.node, self.training.node, self.residents, self.epsilon)


def labels_of(actor: Actor) -> dict[str, frozenset[str]]:
    """Labels of each host that joined the cluster, by the name of its actor, as `actor` of the cluster sees them."""
    records = [record for name in actor.peers(CLUSTER_HOST) if (record := actor.directory.find(name)) is not None]
    nodes = {record.name: actor.directory.find(record.node) for record in records}
    return {name: node.provides for name, node in nodes.items() if node is not None}


def rollout_pool(node: int) -> str:
    """The pool of that node: what a job rolls out on there needs its permit."""
    return f"rollout-{node}"


def training_pool(group: int) -> str:
    """The same of that group's training node."""
    return f"training-{group}"


def pools_of(cluster: Path) -> tuple[str, ...]:
    """Names of the pools that the cluster in this folder has. Empty without a scheduler: there a pool is whatever is asked for."""
    from rubato.runtime.config.source import fill_tree
    from rubato.runtime.monitor.source import read_config  # YAML, which engines and trainers do without

    section = fill_tree(read_config(cluster / "config.yaml").get("scheduler"), "scheduler")[0]
    if not isinstance(section, dict):
        return ()
    counts: dict[str, dict[str, int]] = section
    rollout, training = (counts.get(kind, {}).get("nodes", 1) for kind in (ROLLOUT, TRAINING))
    return (*map(rollout_pool, range(rollout)), *map(training_pool, range(training)))


def check_pool(cluster: Path, pool: str, whose: str) -> None:
    """Raises ConfigError, one sentence, where the cluster has no `pool`: no other job would ever wait for it."""
    known = pools_of(cluster)
    if known and pool not in known:
        near = difflib.get_close_matches(pool, known, n=1, cutoff=0.0)
        raise ConfigError(f"{whose}={pool}: the cluster in {cluster} has no such pool. Did you mean {near[0]}? It has {', '.join(known)}.")


def check_pools(config: Any) -> None:
    """The same for both pools of a job, whose config has the section `cluster`."""
    section: ClusterSection = config.cluster
    for key in ("rollout_pool", "training_pool"):
        check_pool(Path(section.dir), getattr(section, key), f"cluster.{key}")

"""How long new weights take from the trainer to the engines: through a store in buckets, from cluster to cluster once per GPU, or by relays."""

from collections import Counter

from pydantic import Field

from rubato.planning.relay import demands
from rubato.planning.roofline import load_s
from rubato.runtime.config import Section

GIB = 1 << 30


class Measured(Section):
    """A transfer that a paper timed, which a scenario's rate comes from: `gib` GiB took `seconds`."""

    gib: float = Field(gt=0)
    seconds: float = Field(gt=0)

    @property
    def bytes_s(self) -> float:
        return self.gib * GIB / self.seconds


class StoreSync(Section):
    """The trainer pushes buckets to a store on CPUs; every engine pulls each as soon as it is there, then loads what it pulled."""

    push_bytes_s: float = Field(gt=0)
    pull_bytes_s: float = Field(gt=0)
    load_bytes_s: float = Field(gt=0)
    """Host to GPU, per GPU of an engine."""
    bucket_bytes: float = Field(default=float(GIB), gt=0)

    def push_s(self, size_bytes: float) -> float:
        return size_bytes / self.push_bytes_s

    def pull_s(self, size_bytes: float) -> float:
        """The pulls added up."""
        return size_bytes / self.pull_bytes_s

    def staged_s(self, size_bytes: float) -> float:
        """From the first push until an engine's host has the last bucket: the slower of the two paces it."""
        last = min(self.bucket_bytes, size_bytes)
        return max(self.push_s(size_bytes) + last / self.pull_bytes_s, last / self.push_bytes_s + self.pull_s(size_bytes))

    def load_s(self, size_bytes: float, num_gpus: int) -> float:
        """Each GPU of an engine takes its share; the engine does not generate meanwhile."""
        return load_s(size_bytes, num_gpus, self.load_bytes_s)

    def exposed_s(self, size_bytes: float, num_gpus: int, slack_s: float) -> float:
        """How long engines stand still that are asked to swap `slack_s` after the push began."""
        return max(0.0, self.staged_s(size_bytes) - slack_s) + self.load_s(size_bytes, num_gpus)


class CrossLink(Section):
    """Two clusters, joined by one stream per pair of GPUs; inside the rollout cluster its own fabric."""

    stream_bytes_s: float = Field(gt=0)
    """What one stream between the clusters carries."""
    node_bytes_s: float = Field(gt=0)
    """What a broadcast reaches inside one node."""
    relay_bytes_s: float = Field(gt=0)
    """What one flow of weights reaches between nodes of a cluster."""
    gpus_per_node: int = Field(default=8, ge=1)

    def all_gather_s(self, size_bytes: float, streams: int, copies: int) -> float:
        """Every one of `copies` receivers gets the whole model across the link."""
        return copies * size_bytes / (streams * self.stream_bytes_s)

    def relayed_s(self, size_bytes: float, gpus: int) -> float:
        """Each training node's part along the relay tree that planning/relay.py gives it, piece by piece: the fullest way paces. Then the
        GPUs of a node hand it to each other."""
        nodes = range(-(-gpus // self.gpus_per_node))
        rollout = [f"rollout-{node}" for node in nodes]
        pods = {host: pod for pod in ("train", "rollout") for host in (f"{pod}-{node}" for node in nodes)}
        ways: Counter[tuple[str, str]] = Counter()
        for node in nodes:
            for source, target, part in demands(f"train-{node}", rollout, round(size_bytes / len(nodes)), by_rings=False, pods=pods):
                ways[source if pods[source] == "rollout" else "", target] += part
        cross_bytes_s = self.gpus_per_node * self.stream_bytes_s
        return (
            max(size / (self.relay_bytes_s if source else cross_bytes_s) for (source, _), size in ways.items())
            + size_bytes / self.node_bytes_s
        )

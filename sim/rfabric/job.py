"""A training job on servers: who is in which group, how long a step computes, and what it sends in each phase.

Tensor parallelism fills a server. Servers are numbered as Megatron numbers ranks: expert parallel first, then data, then pipeline.
"""

from math import ceil
from typing import Literal, NamedTuple

from pydantic import Field

from runtime.config import Section
from sim.hardware import GpuSpec
from sim.model import BF16, ModelSpec
from sim.net.collectives import Transfer, all_to_all, chains, ring_all_reduce_s, ring_hop_bytes, rings

GRADIENT = 4
"""Bytes of a gradient: Megatron's distributed optimizer reduces in FP32."""

TOKEN_AND_LOGPROB = 8
"""Bytes per response token that go from generation to training."""

Phase = Literal["execution", "gradients", "weights_send", "weights_local"]
PHASES: tuple[Phase, ...] = ("execution", "gradients", "weights_send", "weights_local")


class JobSpec(Section):
    """Parallelism, batch and efficiency of the training cluster, and its share of the GPUs."""

    train_share: float = Field(gt=0, lt=1)
    """Of all GPUs; rounded down to whole replicas, the rest generates."""
    pipeline: int = Field(ge=1)
    expert: int = Field(ge=1)
    """Servers over which experts are spread; 1 keeps them inside the server."""
    sequence_tokens: int = Field(ge=1)
    sequences: int = Field(ge=1)
    """Per RL iteration."""
    updates: int = Field(ge=1)
    """Optimizer steps per RL iteration."""
    compute_efficiency: float = Field(gt=0, le=1)
    """Of the peak, in matrix products, with neither bubble nor communication."""
    overlap: float = Field(default=0.0, ge=0, le=1)
    """Share of the all-to-all that hides behind computation."""
    skew: float = Field(default=1.0, ge=1)
    """Tokens of the busiest expert server over the mean: what imbalance stretches its computation and transfers by."""


class Job(NamedTuple):
    """The job on a cluster of `gpus`; raises ValueError in `place` where it has no room."""

    spec: JobSpec
    model: ModelSpec
    gpu: GpuSpec
    gpus: int
    data: int
    """Data-parallel replicas."""

    @property
    def servers(self) -> int:
        return self.gpus // self.gpu.gpus_per_server

    @property
    def train_servers(self) -> int:
        return self.data * self.spec.expert * self.spec.pipeline

    @property
    def micro_batches(self) -> int:
        """Of one sequence each, per data-parallel rank and optimizer step; a remainder costs a whole one."""
        return ceil(self.spec.sequences / self.spec.updates / (self.data * self.spec.expert))

    @property
    def slots(self) -> int:
        """Micro-batch times of an optimizer step: the pipeline's fill included."""
        return self.micro_batches + self.spec.pipeline - 1

    @property
    def layers(self) -> int:
        """Per pipeline stage, the longest."""
        return ceil(self.model.layers / self.spec.pipeline)

    def server(self, expert: int, data: int, stage: int) -> int:
        return expert + self.spec.expert * (data + self.data * stage)


def place(spec: JobSpec, model: ModelSpec, gpu: GpuSpec, gpus: int) -> Job:
    """The job with as many replicas as its share of the GPUs holds."""
    replica = spec.pipeline * spec.expert * gpu.gpus_per_server
    data = int(gpus * spec.train_share) // replica
    if data < 1:
        raise ValueError(f"{gpus} GPUs leave no room to train: one replica takes {replica} of the share of training")
    return Job(spec, model, gpu, gpus, data)


def compute_s(job: Job) -> float:
    """Computation and tensor-parallel collectives of one micro-batch in one stage, forward and backward."""
    tokens, gpu, tp = job.spec.sequence_tokens, job.gpu, job.gpu.gpus_per_server
    flops = 3 * tokens * job.model.forward_flops_per_token(tokens / 2) / job.model.layers * job.layers
    activation = tokens * job.model.hidden * BF16
    tensor = 4 * job.layers * ring_all_reduce_s(tp, activation, gpu.nvlink_busbw_bytes_s)
    return flops * job.spec.skew / (tp * gpu.peak_flops * job.spec.compute_efficiency) + tensor


def expert_transfers(job: Job) -> list[Transfer]:
    """One dispatch or combine of one layer and micro-batch, in all groups at once: each token goes to its experts' servers."""
    spec = job.spec
    sent = spec.sequence_tokens * job.model.hidden * BF16 * job.model.experts_per_token * spec.skew
    groups = [[job.server(e, d, p) for e in range(spec.expert)] for p in range(spec.pipeline) for d in range(job.data)]
    return list(all_to_all(groups, sent / spec.expert))


def stage_transfers(job: Job) -> list[Transfer]:
    """Activations of one micro-batch from every stage to the next, and gradients back."""
    size = job.spec.sequence_tokens * job.model.hidden * BF16
    ahead = [
        (job.server(e, d, p), job.server(e, d, p + 1), float(size))
        for p in range(job.spec.pipeline - 1)
        for d in range(job.data)
        for e in range(job.spec.expert)
    ]
    return ahead + [(b, a, v) for a, b, v in ahead]


def gradient_transfers(job: Job) -> list[Transfer]:
    """Reduce-scatter of gradients and all-gather of weights: experts among replicas, all else among replicas and expert ranks."""
    spec, model = job.spec, job.model
    experts = model.routed_params / (spec.expert * spec.pipeline)
    dense = (model.params - model.routed_params) / spec.pipeline
    stages = range(spec.pipeline)
    wide = [[job.server(e, d, p) for d in range(job.data) for e in range(spec.expert)] for p in stages]
    narrow = [[job.server(e, d, p) for d in range(job.data)] for p in stages for e in range(spec.expert)]
    each = GRADIENT + BF16
    found = list(rings(wide, ring_hop_bytes(len(wide[0]), dense * each)))
    return found + list(rings(narrow, ring_hop_bytes(job.data, experts * each)))


def generation_pods(job: Job, pod_servers: int) -> list[list[int]]:
    """The generation servers, pod by pod; each pod's first one is the first to get new weights."""
    first, last = job.train_servers, job.servers
    return [list(range(max(start, first), min(start + pod_servers, last)))
            for start in range(first // pod_servers * pod_servers, last, pod_servers)]  # fmt: skip


def weight_send(job: Job, pods: list[list[int]]) -> list[Transfer]:
    """Each pod's first server gets the model, its shards from the servers of one replica; pods take turns at replicas."""
    spec = job.spec
    shard = job.model.weight_bytes / (spec.expert * spec.pipeline)
    return [
        (job.server(e, turn % job.data, p), pod[0], shard)
        for turn, pod in enumerate(pods)
        for p in range(spec.pipeline)
        for e in range(spec.expert)
    ]


def weight_local(job: Job, pods: list[list[int]]) -> list[Transfer]:
    """From each pod's first server to the others."""
    return list(chains(pods, job.model.weight_bytes))


def responses(job: Job) -> list[Transfer]:
    """The iteration's responses, from every generation server to some training server."""
    generating = range(job.train_servers, job.servers)
    size = job.spec.sequences * job.spec.sequence_tokens * TOKEN_AND_LOGPROB / len(generating)
    return [(g, g % job.train_servers, size) for g in generating]

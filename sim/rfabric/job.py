"""A training job on servers: who is in which group, how long a step computes, and what it sends in each phase.

Tensor parallelism fills a server. Servers are numbered as Megatron numbers ranks: context parallel first, then expert, data, pipeline.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, comb
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import BF16, ModelSpec
from rubato.planning.relay import demands
from rubato.runtime.config import Section
from rubato.sim.net.collectives import Transfer, all_to_all, ring_all_reduce_s, ring_hop_bytes, rings

GRADIENT = 4
"""Bytes of a gradient: Megatron's distributed optimizer reduces in FP32."""

TOKEN_AND_LOGPROB = 8
"""Bytes per response token that go from generation to training."""

Phase = Literal["execution", "gradients", "weights_send", "weights_local"]
PHASES: tuple[Phase, ...] = ("execution", "gradients", "weights_send", "weights_local")


MOST_GPUS = 131_072
"""Four times the largest cluster of the paper: planning circuits beyond takes minutes."""


def _sizes(gpus: tuple[int, ...]) -> tuple[int, ...]:
    if not gpus or any(n < 8 or n % 8 or n > MOST_GPUS for n in gpus):
        raise ValueError(f"give at least one cluster, each a multiple of 8 GPUs up to {MOST_GPUS}")
    return gpus


Gpus = Annotated[tuple[int, ...], AfterValidator(_sizes)]
"""Sizes of clusters, in whole servers."""


class GenerationSpec(Section):
    """What generation sends between the servers of a pod while training runs."""

    expert: int = Field(ge=2)
    """Servers of one engine, over which experts are spread."""
    batch: int = Field(ge=1)
    """Tokens that a server decodes in one step."""
    prefill: int = Field(ge=1)
    """Servers of a pod that prefill; the others decode."""
    prompt_tokens: int = Field(ge=1)


class TrainingSpec(Section):
    """Parallelism, batch and efficiency of the training cluster, and its share of the GPUs."""

    train_share: float = Field(gt=0, lt=1)
    """Of all GPUs; rounded down to whole replicas, the rest generates."""
    pipeline: int = Field(ge=1)
    expert: int = Field(ge=1)
    """Servers over which experts are spread; 1 keeps them inside the server."""
    deduplicate: bool = False
    """Send a token once per server that has any of its experts, not once per expert."""
    context: int = Field(default=1, ge=1)
    """Servers over which a sequence is spread; keys and values then go round in a ring."""
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

    generation: GenerationSpec | None = None


class FabricJob(NamedTuple):
    """The job on a cluster of `gpus`; raises ValueError in `place` where it has no room."""

    spec: TrainingSpec
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
        return self.data * self.spec.context * self.spec.expert * self.spec.pipeline

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

    @property
    def tokens(self) -> float:
        """Of one micro-batch, in one server."""
        return self.spec.sequence_tokens / self.spec.context

    def token_copies(self, servers: int) -> float:
        """Copies of a token that a dispatch to experts on `servers` sends, the sender's own counted: one per expert.

        With `deduplicate` one per server, handed on inside it and summed there on the way back (DeepSeek-V3, arXiv 2412.19437,
        section 3.2.2): a server with m of E experts has none of a token's k with probability C(E-m, k) / C(E, k), where k are drawn evenly.
        """
        experts, chosen = self.model.experts, self.model.experts_per_token
        if not self.spec.deduplicate:
            return chosen
        held = [(experts + i) // servers for i in range(servers)]
        return sum(1 - comb(experts - m, chosen) / comb(experts, chosen) for m in held)

    def server(self, context: int, expert: int, data: int, stage: int) -> int:
        return context + self.spec.context * (expert + self.spec.expert * (data + self.data * stage))


def place(spec: TrainingSpec, model: ModelSpec, gpu: GpuSpec, gpus: int) -> FabricJob:
    """The job with as many replicas as its share of the GPUs holds."""
    replica = spec.pipeline * spec.expert * spec.context * gpu.gpus_per_server
    data = int(gpus * spec.train_share) // replica
    if data < 1:
        raise ValueError(f"{gpus} GPUs leave no room to train: one replica takes {replica} of the share of training")
    return FabricJob(spec, model, gpu, gpus, data)


def compute_s(job: FabricJob) -> float:
    """Computation and tensor-parallel collectives of one micro-batch in one stage, forward and backward."""
    tokens, gpu, tp = job.tokens, job.gpu, job.gpu.gpus_per_server
    flops = 3 * tokens * job.model.forward_flops_per_token(job.spec.sequence_tokens / 2) / job.model.layers * job.layers
    activation = tokens * job.model.hidden * BF16
    tensor = 4 * job.layers * ring_all_reduce_s(tp, activation, gpu.nvlink_busbw_bytes_s)
    return flops * job.spec.skew / (tp * gpu.peak_flops * job.spec.compute_efficiency) + tensor


def expert_transfers(job: FabricJob) -> list[Transfer]:
    """One dispatch or combine of one layer and micro-batch, in all groups at once: each token goes to its experts' servers."""
    spec = job.spec
    sent = job.tokens * job.model.hidden * BF16 * job.token_copies(spec.expert) * spec.skew
    groups = [[job.server(c, e, d, p) for e in range(spec.expert)] for c, d, p in _all(spec.context, job.data, spec.pipeline)]
    return list(all_to_all(groups, sent / spec.expert))


def context_transfers(job: FabricJob) -> list[Transfer]:
    """One step of ring attention in one layer, in all groups at once: a server's keys and values to the next."""
    spec = job.spec
    block = 2 * BF16 * job.model.kv_heads * job.model.head_dim * job.tokens
    groups = [[job.server(c, e, d, p) for c in range(spec.context)] for e, d, p in _all(spec.expert, job.data, spec.pipeline)]
    return list(rings(groups, block)) if spec.context > 1 else []


def stage_transfers(job: FabricJob) -> list[Transfer]:
    """Activations of one micro-batch from every stage to the next, and gradients back."""
    size, spec = job.tokens * job.model.hidden * BF16, job.spec
    ahead = [
        (job.server(c, e, d, p), job.server(c, e, d, p + 1), size)
        for c, e, d, p in _all(spec.context, spec.expert, job.data, spec.pipeline - 1)
    ]
    return ahead + [(b, a, v) for a, b, v in ahead]


def gradient_transfers(job: FabricJob) -> list[Transfer]:
    """Reduce-scatter of gradients and all-gather of weights: experts among replicas, all else among replicas and expert ranks."""
    spec, model, each = job.spec, job.model, GRADIENT + BF16
    experts = model.routed_params / (spec.expert * spec.pipeline)
    dense = (model.params - model.routed_params) / spec.pipeline
    copies = list(_all(job.data, spec.context))
    narrow = [[job.server(c, e, d, p) for d, c in copies] for p, e in _all(spec.pipeline, spec.expert)]
    wide = [[job.server(c, e, d, p) for d, e, c in _all(job.data, spec.expert, spec.context)] for p in range(spec.pipeline)]
    found = list(rings(wide, ring_hop_bytes(len(wide[0]), dense * each)))
    return found + list(rings(narrow, ring_hop_bytes(len(copies), experts * each)))


def _all(*sizes: int) -> Iterator[tuple[int, ...]]:
    return product(*(range(size) for size in sizes))


def generation_pods(job: FabricJob, pod_servers: int) -> list[list[int]]:
    """The generation servers, pod by pod; each pod's first one is the first to get new weights."""
    first, last = job.train_servers, job.servers
    return [list(range(max(start, first), min(start + pod_servers, last)))
            for start in range(first // pod_servers * pod_servers, last, pod_servers)]  # fmt: skip


def weight_send(job: FabricJob, pods: list[list[int]]) -> list[Transfer]:
    """The model on its way from pod to pod, in shards from the servers of one replica."""
    return [hop for hop, between in _weight_hops(job, pods) if between]


def weight_local(job: FabricJob, pods: list[list[int]]) -> list[Transfer]:
    """From each pod's first server to the others."""
    return [hop for hop, between in _weight_hops(job, pods) if not between]


def _weight_hops(job: FabricJob, pods: list[list[int]]) -> list[tuple[Transfer, bool]]:
    """Each shard along the relay tree that planning/relay.py finds for the server that has it, and whether that hop is between pods."""
    spec = job.spec
    pod_of = {str(server): f"{at:06}" for at, pod in enumerate(pods) for server in pod}
    shard = round(job.model.weight_bytes / (spec.expert * spec.pipeline))
    sent: Counter[tuple[str, str]] = Counter()
    for e, p in _all(spec.expert, spec.pipeline):
        for source, target, size in demands(str(job.server(0, e, 0, p)), pod_of, shard, by_rings=False, pods=pod_of):
            sent[source, target] += size
    return [((int(a), int(b), float(size)), pod_of.get(a) != pod_of[b]) for (a, b), size in sent.items()]


def responses(job: FabricJob) -> list[Transfer]:
    """The iteration's responses, from every generation server to some training server."""
    generating = range(job.train_servers, job.servers)
    size = job.spec.sequences * job.spec.sequence_tokens * TOKEN_AND_LOGPROB / len(generating)
    return [(g, g % job.train_servers, size) for g in generating]


Operation = tuple[str, float, list[Transfer]]
"""Name, how often it runs in one execution phase, transfers of one run in all engines at once."""


def generation_operations(job: FabricJob, pods: Sequence[Sequence[int]]) -> list[Operation]:
    """Experts' all-to-all and attention to feed-forward, per layer and decode step; prefill to decode, per prompt."""
    spec = job.spec.generation
    if spec is None:
        return []
    engines = [list(pod[i : i + spec.expert]) for pod in pods for i in range(0, len(pod), spec.expert)]
    engines = [engine for engine in engines if len(engine) > 1]
    layers = job.model.layers * job.spec.sequence_tokens / job.spec.updates
    row = spec.batch * job.model.hidden * BF16
    exchange = [t for e in engines for t in all_to_all([e], row * job.token_copies(len(e)) / len(e))]
    halves = [(e[: len(e) // 2], e[len(e) // 2 :]) for e in engines]
    apart = [t for a, f in halves for t in _bipartite(a, f, row * job.token_copies(len(f)) / len(f))]
    apart += [t for a, f in halves for t in _bipartite(f, a, row / len(f))]
    prompts = job.spec.sequences / job.spec.updates / sum(len(pod) for pod in pods)
    cache = prompts * spec.prompt_tokens * job.model.kv_bytes_per_token
    moved: list[Transfer] = []
    for pod in pods:
        prefill, decode = pod[: spec.prefill], pod[spec.prefill :]
        moved += _bipartite(prefill, decode, cache * len(pod) / (len(prefill) * max(1, len(decode))))
    return [("gen_experts", 2 * layers, exchange), ("gen_attention_ffn", layers, apart), ("gen_prefill_decode", 1.0, moved)]


def _bipartite(sources: Sequence[int], targets: Sequence[int], size_bytes: float) -> list[Transfer]:
    return [(a, b, size_bytes) for a in sources for b in targets]

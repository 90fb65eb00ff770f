"""What the generation side sends between servers while training runs: the lower rows of the RFabric paper's Table 1."""

from collections.abc import Sequence

from sim.model import BF16
from sim.net.collectives import Transfer, all_to_all
from sim.rfabric.job import FabricJob

Operation = tuple[str, float, list[Transfer]]
"""Name, how often it runs in one execution phase, transfers of one run in all engines at once."""


def operations(job: FabricJob, pods: Sequence[Sequence[int]]) -> list[Operation]:
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
    return [
        ("gen_experts", 2 * layers, exchange),
        ("gen_attention_ffn", layers, apart),
        ("gen_prefill_decode", 1.0, moved),
    ]


def _bipartite(sources: Sequence[int], targets: Sequence[int], size_bytes: float) -> list[Transfer]:
    return [(a, b, size_bytes) for a in sources for b in targets]

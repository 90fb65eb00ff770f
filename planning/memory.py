"""Bytes that a job's processes take of the devices they compute on, by the model's shape and how it is trained and served.

What is reckoned is the highest moment of a step after the first, when optimiser states are there and gradients add up over micro-batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rubato.planning.language_model import ModelSpec

WIDE = 4
"""Bytes of a float32: of norms' inputs, logits and sums, whatever a model computes in."""

LOGITS_AT_ONCE = 2**26
"""Float32 logits that the trainer computes at once."""

RUNTIME_BYTES = {"cpu": 450 * 2**20, "cuda": 800 * 2**20}
"""What a process takes beside tensors: on a CPU Python and torch, on a GPU its context and the kernels' workspaces."""


class Bytes(NamedTuple):
    """Of one process on its device."""

    weights: int = 0
    grads: int = 0
    master: int = 0
    """Weights in the optimiser's type, where the model computes with others."""
    optimizer: int = 0
    activations: int = 0
    kv: int = 0
    other: int = 0
    """The library itself, and copies on their way to a checkpoint."""

    @property
    def total(self) -> int:
        return sum(self)


class Training(NamedTuple):
    """How a model is trained: widths in bytes, sizes in tokens and processes."""

    tokens: int
    """Of one micro-batch."""
    compute: int = WIDE
    master: int = WIDE
    shard: int = 1
    ranks: bool = False
    """Whether ranks train, which gather layers for as long as they need them."""
    checkpointing: bool = False
    offload: bool = False
    """Shares lie in host memory."""
    adapter_params: int = 0
    """Of a LoRA, which alone is trained; 0 trains the model."""
    reference: bool = False
    """A second model is held beside it."""
    on_cpu: bool = False


class Serving(NamedTuple):
    """How an engine serves it."""

    width: int
    num_slots: int
    max_len: int
    batch_tokens: int
    degree: int = 1
    """GPUs that share each layer."""
    share: float = 0.0
    """Of a device that the engine takes for itself, whatever it needs: vLLM's gpu_memory_utilization; 0 takes what it needs."""
    adapter: bool = False
    """Versions are adapters: no second copy of the weights is ever laid out."""
    on_cpu: bool = False


def layer_activations(shape: ModelSpec, width: int, *, adapter: bool = False) -> int:
    """Bytes that one layer keeps of one token for its backward pass: of `width` where it computes, of float32 within norms.

    With an `adapter` norms and projections have no gradient of their own, and keep less.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normed = 0 if adapter else width
    kept = 2 * shape.hidden * (WIDE + normed + width) + 2 * WIDE
    kept += 3 * width * q + 2 * width * kv + WIDE * shape.heads
    if shape.qk_norm:
        kept += (WIDE + normed) * (q + kv) + WIDE * (shape.heads + shape.kv_heads)
    kept += 4 * width * (shape.ffn + shape.shared_ffn)
    if shape.experts:
        kept += shape.experts_per_token * width * (4 * shape.expert_ffn + 3 * shape.hidden) + 3 * WIDE * shape.experts
    return kept


def _head(shape: ModelSpec, tokens: int, width: int, *, adapter: bool) -> int:
    """The output head's backward pass: two chunks of logits, the gradient of its matrix in float32, and of what goes into it."""
    chunk = min(tokens, max(1, LOGITS_AT_ONCE // shape.vocab))
    own = 0 if adapter else shape.vocab * shape.hidden * WIDE
    return 2 * chunk * shape.vocab * WIDE + own + 2 * tokens * shape.hidden * width


def activations(shape: ModelSpec, given: Training) -> int:
    """The highest moment of a micro-batch's backward pass, beside weights and gradients."""
    adapter = given.adapter_params > 0
    layer = layer_activations(shape, given.compute, adapter=adapter)
    widest = 2 * given.compute * max(shape.ffn, shape.experts_per_token * shape.expert_ffn, shape.heads * shape.head_dim, shape.hidden)
    head = _head(shape, given.tokens, given.compute, adapter=adapter)
    ends = given.tokens * 2 * shape.hidden * WIDE
    if given.checkpointing:
        return given.tokens * shape.layers * shape.hidden * given.compute + ends + max(head, given.tokens * (layer + widest))
    return given.tokens * shape.layers * layer + ends + max(head, given.tokens * widest)


def trained(shape: ModelSpec, given: Training) -> tuple[Bytes, int]:
    """One trainer's process, or one rank: bytes on its device, and in host memory where shares lie there."""
    params, moved = shape.params, given.adapter_params or shape.params
    narrow = given.compute < given.master
    state = given.master * moved // given.shard
    if given.ranks:
        layer = shape.always_params + shape.experts * shape.expert_params
        weights = given.compute * (shape.embedding_params + 2 * layer)
        grads, master = state, state
        gathered_grads = given.compute * layer
    else:
        weights = given.compute * params if narrow or given.adapter_params else given.master * params
        weights += given.compute * given.adapter_params
        grads, master = state, state if narrow else 0
        gathered_grads = 0
    if given.reference:
        weights += given.compute * params // given.shard
    optimizer = 2 * state
    other = RUNTIME_BYTES["cpu" if given.on_cpu else "cuda"]
    if given.on_cpu:
        other += 3 * state  # a checkpoint on its way to the disk
    found = Bytes(weights, grads, master, optimizer, activations(shape, given) + gathered_grads, 0, other)
    if given.offload and not given.on_cpu:
        return found._replace(grads=0, master=0, optimizer=0), grads + master + optimizer
    return found, 0


def served(shape: ModelSpec, given: Serving, available: int) -> Bytes:
    """One of an engine's GPUs, or the process of one that runs on the CPU."""
    copies = 1 if given.adapter or given.share else 2  # a version is laid out beside the one that is computed with
    weights = copies * given.width * shape.params // given.degree
    entry = 2 * given.width * shape.layers * shape.kv_heads * shape.head_dim
    kv = entry * given.num_slots * given.max_len // given.degree
    inner = max(shape.ffn, shape.experts_per_token * shape.expert_ffn)
    step = given.batch_tokens * given.width * (3 * inner + 6 * shape.hidden) // given.degree + 2 * given.num_slots * shape.vocab * WIDE
    other = RUNTIME_BYTES["cpu" if given.on_cpu else "cuda"]
    if given.share:
        least = entry * given.max_len // given.degree  # one request must have room, whatever waits
        room = int(given.share * available) - weights - step - other
        kv = max(least, min(kv, room) if room > 0 else least)
    return Bytes(weights, 0, 0, 0, step, kv, other)


class Process(NamedTuple):
    """One process of the job on one device; an engine of several GPUs is one for each."""

    actor: str
    pool: str
    device: str
    bytes: Bytes
    available: int
    """Of the device; 0 where it is not known, which judges nothing."""
    host_bytes: int = 0


def over(processes: Iterable[Process]) -> dict[str, int]:
    """Device → bytes by which its processes together exceed it."""
    taken: dict[str, int] = {}
    room: dict[str, int] = {}
    for each in processes:
        taken[each.device] = taken.get(each.device, 0) + each.bytes.total
        room[each.device] = each.available
    return {device: taken[device] - room[device] for device in taken if room[device] and taken[device] > room[device]}


class Change(NamedTuple):
    """A key that may be turned, as the command line takes it, and the processes that the job has then."""

    text: str
    processes: Sequence[Process]


def next_change(processes: Sequence[Process], changes: Iterable[Change]) -> str:
    """The first change under which everything fits; else the one that takes most off what is too much; empty where none helps, or
    everything fits as it is. `changes` are in the order of what they cost in time."""
    best, least = "", sum(over(processes).values())
    if not least:
        return ""
    for change in changes:
        left = sum(over(change.processes).values())
        if not left:
            return change.text
        if left < least:
            best, least = change.text, left
    return best


def report(processes: Sequence[Process], next_key: str) -> dict[str, object]:
    """As `rubato fit --json` prints it."""
    told: list[Mapping[str, object]] = [
        {
            "actor": each.actor, "pool": each.pool, "device": each.device,
            "bytes": {**each.bytes._asdict(), "total": each.bytes.total}, "available": each.available, "host_bytes": each.host_bytes,
        }
        for each in processes
    ]  # fmt: skip
    return {"processes": told, "fits": not over(processes), "next_key": next_key}

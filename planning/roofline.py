"""How long an inference engine computes: a roofline of prefill and of decode steps, its parallelism's communication, its KV room."""

from typing import NamedTuple, Self

from pydantic import Field, model_validator

from rubato.planning.hardware import GpuSpec, Spec
from rubato.planning.language_model import BF16, ModelSpec

LOAD_BYTES_S = 14.19 * (1 << 30) / 0.9
"""Host memory to one GPU: RollMux, section 3.6, has a 7B engine of one GPU start warm in 0.9 s."""

REGROUP_S = 2.0
"""Forming the process group of another degree, and its graphs: OrchestrRL reports switches of 2 to 5 s, of which loading is the rest
(Frontier measured 4.52 s). That the least of it is the part without weights is our reading."""


class Deployment(Spec):
    """One engine: `tp` x `pp` GPUs of one kind that hold one copy of a model.

    The defaults' sources: Frontier's kernel profiles on H800 (what a layer takes besides reading, at TP1 to TP8); Libra's constants
    (bandwidth use in decoding, prefill MFU, 3 us per collective, 4 % of KV lost to fragmentation, 1 GB workspace, 256 requests);
    vLLM's default share of memory.
    """

    gpu: GpuSpec
    model: ModelSpec
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel GPUs, within one server."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    expert_parallel: bool = False
    """Experts lie whole on the `tp` GPUs, and tokens travel to them, instead of each expert being split."""
    launch_s: float = Field(default=0.0, ge=0)
    """Host time of a decode step that kernels do not hide. With CUDA graphs none is published; without them Frontier's profile has
    0.16 (TP1) to 0.22 ms (TP8) a layer between the kernels and what passes: 0.006 for 32 layers."""
    bandwidth_use: float = Field(default=0.85, gt=0, le=1)
    """Of the memory's rate, while a kernel reads: Libra's, and the slope of Frontier's profile from TP1 to TP8."""
    layer_s: float = Field(default=24.4e-6, ge=0)
    """What a layer's kernels take at any degree besides reading weights: 18.4 us of those that are split, the mean of what Frontier's
    profile has beyond their bytes at TP1, 2, 4 and 8 (17.4 to 20.0), and 6.0 us of two norms that each GPU computes whole. So a degree
    that leaves a GPU few bytes a layer uses little of its bandwidth."""
    attention_s: float = Field(default=9.8e-6, ge=0)
    """The least that a layer's attention takes, whatever it reads: 7.4 us and 2.4 us for the new entry, at every degree of that profile."""
    prefill_mfu: float = Field(default=0.55, gt=0, le=1)
    decode_mfu: float = Field(default=0.55, gt=0, le=1)
    """Of the compute that bounds a large decode batch."""
    collective_s: float = Field(default=3e-6, ge=0)
    """Latency of one collective in a server."""
    prefill_chunk: int = Field(default=1024, ge=1)
    """Tokens that a pipeline passes on at once."""
    memory_use: float = Field(default=0.9, gt=0, le=1)
    workspace_bytes: float = Field(default=1e9, ge=0)
    kv_waste: float = Field(default=0.04, ge=0, lt=1)
    num_slots: int = Field(default=256, ge=1)
    """Requests decoded at once."""
    restart_s: float = Field(default=0.0, ge=0)
    """What a change of `tp` takes an engine that is started anew for it, as measured; it gives no KV away, so moved requests are prefilled.
    0: it goes on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_tokens < 1:
            raise ValueError(f"{self.model.name} does not fit {self.num_gpus} x {self.gpu.name}; give it more tp or pp")
        return self

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""
        usable = self.num_gpus * (self.gpu.hbm_bytes * self.memory_use - self.workspace_bytes)
        room = usable - self.model.weight_bytes
        return int(room * (1 - self.kv_waste) / self.model.kv_bytes_per_token)


class Roofs(NamedTuple):
    """A decode step's time at one batch size: `fixed_s` and the longer of two roofs, in the tokens held."""

    fixed_s: float
    memory_s: float
    memory_s_per_token: float
    attention_s: float
    """The least that reading what is held takes."""
    compute_s: float
    compute_s_per_token: float


class Roofline:
    """The times of one engine."""

    def __init__(self, spec: Deployment) -> None:
        self.spec = spec
        self._model = spec.model
        self._kv_bytes = spec.model.kv_bytes_per_token
        self._flops = spec.model.forward_flops_per_token(0)
        self._flops_per_context = spec.model.forward_flops_per_token(1) - self._flops
        self._roofs: dict[int, Roofs] = {}
        self.kv_tokens = spec.kv_tokens

    def step_s(self, batch: int, context: float) -> float:
        """One decode step of `batch` requests that hold `context` tokens together: memory or compute, whichever is longer."""
        roofs = self._roofs.get(batch) or self._roofs.setdefault(batch, self._roofs_of(batch))
        memory_s = roofs.memory_s + max(roofs.attention_s, roofs.memory_s_per_token * context)
        return roofs.fixed_s + max(memory_s, roofs.compute_s + roofs.compute_s_per_token * context)

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Prefill of `tokens` behind `context` whose keys and values are there already."""
        if tokens <= 0:
            return 0.0
        spec = self.spec
        flops = tokens * (self._flops + self._flops_per_context * (context + tokens / 2))
        bubble = 1 + (spec.pp - 1) / max(1.0, tokens / spec.prefill_chunk)
        compute_s = bubble * flops / (spec.num_gpus * spec.gpu.peak_flops * spec.prefill_mfu)
        return spec.launch_s + compute_s + self._communication_s(tokens)

    def swap_s(self) -> float:
        """A weight swap: each GPU takes its share of the new version from host memory, and nothing is computed meanwhile."""
        return load_s(self._model.weight_bytes, self.spec.num_gpus, LOAD_BYTES_S)

    def kv_move_s(self, tokens: int) -> float:
        """Keys and values of `tokens` to an engine of the same shape: each GPU sends its share over its own NIC."""
        return tokens * self._kv_bytes / (self.spec.num_gpus * self.spec.gpu.nic_busbw_bytes_s)

    def sleep_s(self, tokens: int) -> float:
        """Weights and the KV of `tokens` to host memory, or back: each GPU moves its share, at the rate of RollMux's warm starts."""
        size_bytes = self._model.weight_bytes + tokens * self._kv_bytes
        return load_s(size_bytes, self.spec.num_gpus, LOAD_BYTES_S)

    def reconfigure_s(self, tokens: int, other: "Roofline") -> float:
        """From this engine to the `other` one of the same model: a new process group, its weights from host memory, and the KV of
        `tokens` dealt anew among the larger number of GPUs, each its share over NVLink (OrchestrRL: drain + reload + init)."""
        if other.spec == self.spec:
            return 0.0
        if other.spec.restart_s:
            return other.spec.restart_s + other.prefill_s(tokens)
        shares = max(self.spec.num_gpus, other.spec.num_gpus)
        deal_s = tokens * self._kv_bytes / (shares * self.spec.gpu.nvlink_busbw_bytes_s)
        return REGROUP_S + other.swap_s() + deal_s

    def _roofs_of(self, batch: int) -> Roofs:
        """Pipeline stages work on a `pp`-th of the batch each, one after another, so a request's token passes all of them."""
        spec = self.spec
        micro = batch / spec.pp
        rate = spec.tp * spec.gpu.hbm_bytes_s * spec.bandwidth_use
        flops_s = spec.num_gpus * spec.gpu.peak_flops * spec.decode_mfu
        return Roofs(
            fixed_s=spec.launch_s + self._model.layers * spec.layer_s + self._communication_s(micro),
            memory_s=self._weights_read(micro) / rate,
            memory_s_per_token=self._kv_bytes / spec.pp / rate,
            attention_s=self._model.layers * spec.attention_s,
            compute_s=self._flops * batch / flops_s,
            compute_s_per_token=self._flops_per_context / flops_s,
        )

    def _weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step of `tokens` touches: all of a dense model, of experts those that some token chose."""
        model = self._model
        if not model.experts:
            return model.weight_bytes
        missed = (1 - model.experts_per_token / model.experts) ** tokens
        return model.weight_bytes - BF16 * model.routed_params * missed

    def _communication_s(self, tokens: float) -> float:
        """Two all-reduces per layer, the second of which expert parallelism replaces by two all-to-alls; stages hand on by NIC."""
        spec, model = self.spec, self._model
        row = tokens * model.hidden * BF16
        total = 0.0
        if spec.tp > 1:
            others = (spec.tp - 1) / spec.tp
            reduce_s = spec.collective_s + 2 * others * row / spec.gpu.nvlink_busbw_bytes_s
            exchange_s = spec.collective_s + others * row * model.experts_per_token / (spec.tp * spec.gpu.nvlink_busbw_bytes_s)
            second_s = 2 * exchange_s if spec.expert_parallel and model.experts else reduce_s
            total += model.layers * (reduce_s + second_s)
        return total + (spec.pp - 1) * (spec.collective_s + row / spec.gpu.nic_busbw_bytes_s)


def load_s(size_bytes: float, num_gpus: int, bytes_s: float) -> float:
    """Seconds until `num_gpus` GPUs have taken `size_bytes` from host memory, each its share at `bytes_s`."""
    return size_bytes / num_gpus / bytes_s

"""How long a training step takes: FLOPs over what the GPUs reach, the pipeline's bubble, and the gradients' all-reduce."""

from pydantic import Field

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import BF16, ModelSpec
from rubato.runtime.config import Section


class TrainerSpec(Section):
    """A training job's GPUs and parallelism. Data parallelism takes the GPUs that `tp` and `pp` leave."""

    gpu: GpuSpec
    model: ModelSpec
    gpus: int = Field(ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    micro_batches: int = Field(default=8, ge=1)
    """Per pipeline and step: they shrink its bubble."""
    mfu: float = Field(default=0.4, gt=0, le=1)
    """Model FLOPs utilisation while no stage waits; dense models in Megatron-LM reach 0.4 to 0.5."""
    recompute: bool = True
    """Activations are computed again in the backward pass: a third more FLOPs."""
    scoring_passes: int = Field(default=2, ge=0)
    """Forward passes for log-probabilities before the update: the old policy's and the reference's."""
    fixed_s: float = Field(default=0.0, ge=0)
    """Whatever else a step takes, such as loading and offloading."""

    @property
    def dp(self) -> int:
        """Replicas; at least one."""
        return max(1, self.gpus // (self.tp * self.pp))

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits for the others: 1F1B."""
        return (self.pp - 1) / (self.micro_batches + self.pp - 1)

    def step_s(self, tokens: int, sequences: int) -> float:
        """One update on `tokens` in `sequences`: scoring, forward, backward, then the gradients' ring over NICs."""
        if not tokens:
            return self.fixed_s
        # Each token attends to half of its sequence on average.
        forward = tokens * self.model.forward_flops_per_token(tokens / max(1, sequences) / 2)
        passes = self.scoring_passes + (4 if self.recompute else 3)
        rate = self.gpus * self.gpu.peak_flops * self.mfu * (1 - self.bubble)
        return self.fixed_s + passes * forward / rate + self.gradients_s

    @property
    def gradients_s(self) -> float:
        """All-reduce of BF16 gradients among the replicas, one NIC per GPU, nothing of it hidden."""
        shard = BF16 * self.model.params / (self.tp * self.pp)
        return 2 * (self.dp - 1) / self.dp * shard / self.gpu.nic_busbw_bytes_s

"""The trainer's own sections of the config."""

from pydantic import Field

from runtime.config import Section


class EvalSection(Section):
    """Held-out evaluation: greedy, on tasks that are never trained on. `eval/reward` is over those that finished; see `eval/failed`."""

    every: int = Field(default=10, ge=0)
    """Steps between evaluations; 0 leaves only the final one."""
    num_tasks: int = Field(default=64, ge=1)
    """Tasks of each evaluation."""
    final_num_tasks: int = Field(default=200, ge=0)
    """Tasks of the evaluation after the last step; 0 leaves it out."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest the final evaluation is waited for."""


class CheckpointSection(Section):
    """When the trainer makes its work durable; a step's samples are `trained` for good only then."""

    every: int = Field(default=5, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""


class CheckSection(Section):
    """The start-up check that trainer and engine agree on log-probabilities."""

    enabled: bool = True
    """Compare before the first step."""
    num_prompts: int = Field(default=16, ge=1)
    """Random prompts to sample from."""
    num_tokens: int = Field(default=32, ge=1)
    """Tokens sampled after each."""
    limit_float32: float = Field(default=1e-3, gt=0)
    """Largest mean |Δ log-prob| in float32."""
    limit_bfloat16: float = Field(default=3e-2, gt=0)
    """Largest mean |Δ log-prob| in bfloat16, whose 8-bit mantissa makes two orders of summation differ by this much."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest the engines may take to answer."""

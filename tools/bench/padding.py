"""The step hook that measures what padding would cost a job: `train.hooks: [tools/bench/padding.py:PadShare]`.

`padding/batch`: share of a step's tokens that would be padding if the sequences of each micro-batch were padded to its longest, as models are
trained that can't take rows. `padding/attention`: the same within attention alone, where it takes a row apart by buckets.
"""

from collections.abc import Mapping

import torch

from rubato.actors.training.forward import row_of
from rubato.actors.training.hooks import StepHook, TrainedStep
from rubato.actors.training.torch_train import pack


class PadShare(StepHook):
    """Adds the two figures to each row."""

    lengths: list[int]

    async def after_step(self, trained: TrainedStep) -> None:
        self.lengths = [len(segment.mask) for group in trained.groups for rollout in group for segment in rollout.segments]

    async def after_publish(self, version: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return shares(self.lengths, self.trainer.config.train.micro_batch_tokens) if version else {}


def shares(lengths: list[int], micro_batch_tokens: int) -> dict[str, float]:
    """Of one step's sequences."""
    padded = sum(len(run) * lengths[run[0]] for run in pack(lengths, micro_batch_tokens, padded=True))
    rows = [row_of([lengths[i] for i in run], torch.device("cpu")) for run in pack(lengths, micro_batch_tokens)]
    attended = sum(bucket.num * bucket.longest for row in rows for bucket in row.buckets)
    return {"padding/batch": 1 - sum(lengths) / padded, "padding/attention": 1 - sum(lengths) / attended}

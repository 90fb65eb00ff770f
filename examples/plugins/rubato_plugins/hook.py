"""StepHook: ends a run whose gradients blow up, while the checkpoint before it is still good.

rubato launch CONFIG train.hooks=[rubato_plugins.hook:GradientGuard]
"""

from collections.abc import Mapping

from rubato.actors.training.hooks import StepHook, TrainedStep
from rubato.actors.training.train_engine import TrainError

MOST = 1e4
"""Norm of the gradients from which on the run ends."""


class GradientGuard(StepHook):
    """Its figure in metrics.jsonl is the largest norm since the trainer started."""

    largest = 0.0

    async def after_step(self, trained: TrainedStep) -> None:
        norm = trained.metrics.get("optim/grad_norm", 0.0)
        self.largest = max(self.largest, norm)
        if norm > MOST:
            raise TrainError(f"step {trained.step} has gradients of norm {norm:.3g}, above {MOST:g}: lower train.lr.")

    async def after_publish(self, version: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {"guard/grad_norm": self.largest}

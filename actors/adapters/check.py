"""Whether an adapter can be trained, looked at before anything is started; and whether it arrived, looked at in what engines sample."""

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rubato.actors.adapters import shapes
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.cluster.lease import Held
from rubato.actors.messages.generation import Completion
from rubato.actors.training.checks import Difference, LogprobCheck, compare_logprobs
from rubato.actors.training.train_engine import TrainError
from rubato.runtime.errors import ConfigError

CLEARLY = 4.0
"""An adapter is missing where the engine's log-probs are so many times nearer to those of the base model than to those with it."""


def preflight(config: Any, folder: Path) -> None:
    """Targets and an adapter to begin with must fit the model. Raises ConfigError, one sentence. Blocks, reads headers alone."""
    lora, model = config.train.lora, folder / config.model.path
    newest = checkpoints.last(folder / "checkpoints")
    start = newest or (folder / lora.start if lora.start else None)
    try:
        shapes.target_modules(shapes.shapes_in(model), lora.targets)
        if start is not None:
            shapes.check_start(start, model, lora)
    except (shapes.AdapterError, ValueError) as error:
        raise ConfigError(f"{error}.") from None


class AdapterCheck(LogprobCheck):
    """Compares trainer and engines as ever, and engines with the base model too: small as an adapter's effect may be, what samples without it
    is nearer to that model."""

    @classmethod
    def check_host(cls, config: Any) -> None:
        """The package that trains adapters."""
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("train.lora needs the package peft, which is not installed: pip install 'rubato-rl[lora]'.")

    async def compared(self, held: Held, sampled: Sequence[tuple[list[int], Completion]], step: int, found: Sequence[Difference]) -> None:
        engine: Any = self.trainer.engine
        base = partial(engine.base_logprobs, temperature=self.trainer.config.rollout.temperature)
        without = await held.compute(compare_logprobs, sampled, step, base)
        if without and (said := missing_adapter(found, without, step)):
            raise TrainError(said)
        self.trainer.log.info("adapter_seen", step=step, gap=mean_gaps(found), gap_without=mean_gaps(without))


def missing_adapter(found: Sequence[Difference], without: Sequence[Difference], version: int) -> str:
    """A sentence where some engine's tokens were sampled by the base model, by its log-probs: `found` are their differences to the model with
    its adapter of that version, `without` to the model alone. Empty where none was."""
    gaps, alone = mean_gaps(found), mean_gaps(without)
    for name, gap in gaps.items():
        if gap > CLEARLY * alone[name]:
            return (
                f"trainer and engine disagree: {name} says that it has version {version} of the adapter, but samples from the base model: mean "
                f"|Δlogp| {alone[name]:.1e} to that, {gap:.1e} to the model with its adapter. Look at how its engine applies adapters"
            )
    return ""


def mean_gaps(found: Sequence[Difference]) -> dict[str, float]:
    """Mean |Δ log-prob| by engine."""
    gaps: dict[str, list[float]] = {}
    for difference in found:
        gaps.setdefault(difference.name, []).append(difference.gap)
    return {name: sum(each) / len(each) for name, each in gaps.items()}

"""What may spoil a result without any error: judged here, told to the user by the trainer. Pure."""

import math
from collections.abc import Mapping, Sequence

from actors.breakdown import SHOWN, left_out
from actors.config import CLIPS, TrainSection
from actors.messages.samples import Trajectory

SPREADLESS_STEPS = 5
"""Steps in a row without any reward spread before the user hears of it: a batch or two may be so by chance."""

ANCHORS = ((0.5e6, 1e-3), (7e9, 1e-6))
"""(parameters, learning rate): this project's quickstart, and DeepSeekMath's GRPO on 7 B (arXiv 2402.03300, section 4.2)."""

FAR = 20.0
"""Times above or below the usual rate that is worth a word: published rates for one size differ by up to ten."""


def usual_lr(num_parameters: int) -> float:
    """Learning rate of AdamW at which models of this size are usually trained by RL, all parameters trained.

    A rule of thumb: the power law through `ANCHORS`, lr ∝ parameters^-0.72. DAPO's 1e-6 at 32 B (arXiv 2503.14476, section 4.1) and the
    1e-6 in use from 0.5 B on lie within a factor of ten of it.
    """
    (small, fast), (large, slow) = ANCHORS
    return fast * (num_parameters / small) ** (math.log(slow / fast) / math.log(large / small))


def lr_concern(lr: float, num_parameters: int) -> str:
    """A sentence where `lr` is more than `FAR` times off what suits the size; else empty."""
    usual = usual_lr(num_parameters)
    if usual / FAR <= lr <= usual * FAR:
        return ""
    risk = "training is likely to collapse" if lr > usual else "little may be learned"
    size = f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e8 else f"{num_parameters / 1e6:.1f} M"
    return (
        f"train.lr={lr:g} is {max(lr / usual, usual / lr):,.0f} times {'above' if lr > usual else 'below'} what a model of {size} "
        f"parameters is usually trained with: {risk}. Around {usual:.0e} is usual."
    )


def clip_concern(train: TrainSection) -> str:
    """A sentence where a clip is so far above that of the loss's paper that it holds nothing; else empty."""
    _, usual = CLIPS.get(train.loss, (0.0, math.inf))
    if train.clip_high <= usual * FAR:
        return ""
    return (
        f"train.clip_high={train.clip_high:g} is {train.clip_high / usual:,.0f} times what the paper of {train.loss} has ({usual:g}): it will "
        "clip nothing."
    )


def best_concern(*, keep_best: bool, every: int) -> str:
    """A sentence where `checkpoint.keep_best` has no figures to go by, with `eval.every` at 0."""
    if not keep_best or every:
        return ""
    return "checkpoint.keep_best keeps no checkpoint: eval.every is 0, and no version before the last is evaluated. Set eval.every."


class SpreadWatch:
    """Looks at each step's batch; says once that nothing can be learned from the rewards.

    Where `advantage` is taken over the batch (reinforce_pp), spread between groups is enough.
    """

    def __init__(self, advantage: str) -> None:
        self._over_batch = advantage == "reinforce_pp"
        self._flat = 0
        self._told = False

    def step(self, metrics: Mapping[str, float], groups: Sequence[Sequence[Trajectory]]) -> str:
        """A sentence after `SPREADLESS_STEPS` steps in a row without spread; else empty. `metrics`: `reward/*` of the step."""
        flat = metrics.get("reward/zero_std_frac", 0.0) >= 1.0 and bool(groups)
        if self._over_batch and metrics.get("reward/std", 0.0) > 0:
            flat = False
        self._flat = self._flat + 1 if flat else 0
        if self._told or self._flat < SPREADLESS_STEPS:
            return ""
        self._told = True
        return (
            f"nothing was learned from rewards in the last {self._flat} steps: within every group all rewards are equal "
            f"(reward/zero_std_frac = 1). {spreadless_cause(groups)}"
        )


def spreadless_cause(groups: Sequence[Sequence[Trajectory]]) -> str:
    """The likely cause, where the members of every group got one reward, and what to look at."""
    if all(len({_said(t) for t in group}) == 1 for group in groups):
        return "The rollouts of a group are the same, token by token: is rollout.temperature 0?"
    rewards = {t.reward for group in groups for t in group}
    if len(rewards) > 1:
        return "Rewards differ between tasks only: does the reward look at what the model does?"
    if (reward := rewards.pop()) > 0:
        return f"Every rollout gets {reward:g}: the task is solved, or the reward does not look at what the model does."
    return f"Every rollout gets {reward:g}: the task is too hard for this model, or the reward never sees success."


def _said(trajectory: Trajectory) -> tuple[bytes, ...]:
    return tuple(segment.tokens for segment in trajectory.segments)


class InfoWatch:
    """Says once that the environment's info has more numbers than there are metrics for."""

    def __init__(self) -> None:
        self._told = False

    def step(self, groups: Sequence[Sequence[Trajectory]]) -> str:
        """The sentence, when it is to be told now."""
        gone = [] if self._told else left_out([t for group in groups for t in group])
        if not gone:
            return ""
        self._told = True
        shown = ", ".join(gone[:3]) + (", …" if len(gone) > 3 else "")
        return f"the environment's info has {SHOWN + len(gone)} numbers: env/… shows the first {SHOWN} by name, without {shown}"

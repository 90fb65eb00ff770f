"""What may spoil a result without any error: judged here, told to the user by the trainer. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence

from actors.breakdown import SHOWN, left_out
from actors.config import CLIPS, TrainSection
from actors.messages.samples import SPREAD, Trajectory

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
    """Looks at each step's batch; says once that nothing can be learned from the rewards."""

    def __init__(self) -> None:
        self._flat = 0
        self._told = False

    def step(self, metrics: Mapping[str, float], groups: Sequence[Sequence[Trajectory]]) -> str:
        """A sentence after `SPREADLESS_STEPS` steps in a row whose advantages are all 0; else empty. `metrics`: those of the step."""
        self._flat = self._flat + 1 if is_flat(metrics) and groups else 0
        if self._told or self._flat < SPREADLESS_STEPS:
            return ""
        self._told = True
        return (
            f"nothing was learned from rewards in the last {self._flat} steps: in no group do they have any spread "
            f"(policy/taught_frac = 0). {spreadless_cause(groups)}"
        )


def is_flat(metrics: Mapping[str, float]) -> bool:
    """Whether the rewards of a step have no spread that its advantage could use. False where the trainer does not say."""
    return metrics.get("policy/taught_frac", 1.0) <= 0.0


def spreadless_cause(groups: Sequence[Sequence[Trajectory]]) -> str:
    """The likely cause, where the rewards of no group have spread, and what to look at."""
    rewards = [[t.reward for t in group] for group in groups]
    if (widest := max(max(rewards_G) - min(rewards_G) for rewards_G in rewards)) >= SPREAD:
        return "train.overlong_penalty evens out what rewards say: lower it, or set train.overlong=mask."
    every = [reward for rewards_G in rewards for reward in rewards_G]
    if widest > ROUNDING * max(1.0, *map(abs, every)):
        return f"Rewards of a group differ by {widest:.2g} at most, and less than {SPREAD:g} counts as equal: scale the reward up."
    same = all(len({_said(t) for t in group}) == 1 for group in groups)
    if same and all(t.temperature == 0 for group in groups for t in group):
        return "The rollouts of a group are the same, token by token, as their temperature is 0: set it above 0."
    if max(every) - min(every) >= SPREAD:
        return _differ_between(groups, same=same)
    reward = every[0]
    if same and reward <= 0:
        return f"Every rollout gets {reward:g}, and those of a group are the same, token by token: {COLLAPSED}."
    if reward > 0:
        return f"Every rollout gets {reward:g}: the task is solved, or the reward does not look at what the model does."
    return f"Every rollout gets {reward:g}: the task is too hard for this model, or the reward never sees success."


ROUNDING = 1e-12
"""Sums of the same numbers in another order may differ by this share."""

COLLAPSED = (
    "the policy gives one answer all of its probability (policy/entropy), and a lower train.lr may keep it from that"
)


def _differ_between(groups: Sequence[Sequence[Trajectory]], *, same: bool) -> str:
    """The cause where each group has a reward of its own."""
    if same:
        return f"The rollouts of a group are the same, token by token: {COLLAPSED}."
    by_task: dict[str, list[float]] = {}
    for group in groups:
        by_task.setdefault(group[0].ticket.task, []).append(group[0].reward)
    what = "tasks" if all(max(rewards) - min(rewards) < SPREAD for rewards in by_task.values()) else "prompts"
    return f"Rewards differ between {what} only: each is solved always or never, or the reward does not look at what the model does."


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


IDLE_TOLD = 3
"""Steps in a row that change no weight before the user hears of it."""


class UpdateWatch:
    """Looks for steps that had something to teach and changed no weight. One without reward spread is neither idle nor an update.

    All figures that it goes by stand in the rows of metrics.jsonl: a restarted trainer goes through those that are kept.
    """

    def __init__(self, train: TrainSection, max_idle_steps: int) -> None:
        self._train, self._most = train, max_idle_steps
        self._steps = self._idle = self._skipped = 0
        self._tells_at_skips = 1
        self._told, self._always_idle = False, True
        self._why = ""

    def replay(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Go on after the steps of these rows."""
        for row in rows:
            self.step(row)
            if self.nothing_learned():  # the run ended with that: it was resumed for another try
                self._idle = 0

    def step(self, metrics: Mapping[str, float]) -> list[str]:
        """What is to be told of the step with these metrics."""
        self._steps += 1
        if why := idle_cause(metrics, self._train):
            self._idle += 1
            self._why = why
        else:
            self._always_idle = False
            if metrics.get("optim/updates", 1.0) > 0:
                self._idle = 0
        said: list[str] = []
        self._skipped += int(metrics.get("optim/skipped", 0.0))
        if self._skipped >= self._tells_at_skips:  # the first, the tenth, the hundredth: it may be so at every step
            what = "1 optimiser step was" if self._skipped == 1 else f"{self._skipped} optimiser steps were"
            said.append(f"{what} left out so far, for a gradient that was not finite (optim/skipped)")
            self._tells_at_skips = 10 ** len(str(self._skipped))
        if self._idle >= IDLE_TOLD and not self._told:
            self._told = True
            end = f" After {self._most} such steps in a row the run ends (run.max_idle_steps)." if self._most else ""
            said.append(f"no weight has changed in {self._idle} steps: {self._why}{end}")
        return said

    def nothing_learned(self, *, ended: bool = False) -> str:
        """The sentence with which the run fails: after `max_idle_steps` idle steps in a row, or where it has `ended` and each step was one."""
        num = self._steps if ended and self._always_idle else self._idle if self._idle >= self._most else 0
        if not self._most or not num:
            return ""
        where = "1 step" if num == 1 else f"{num} steps in a row"
        return f"nothing was learned: no weight has changed in {where}. {self._why[:1].upper()}{self._why[1:]}"


def idle_cause(metrics: Mapping[str, float], train: TrainSection) -> str:
    """Why a step with these metrics changed no weight, and what to do; empty where it did, where no reward has spread, and where the
    trainer does not say."""
    if metrics.get("optim/updates", 1.0) > 0:
        return ""
    own = f"train.loss={train.loss}" if ":" in train.loss else ""
    if metrics.get("optim/skipped", 0.0) > 0:
        look = (
            f"look for NaN and infinity in what {own} returns" if own else "lower train.lr, or try train.dtype=float32"
        )
        return f"every optimiser step was left out, as its gradient was not finite (optim/skipped): {look}."
    if is_flat(metrics):
        return ""
    if not metrics.get("optim/minibatches", 0.0):
        if train.overlong == "mask":
            return (
                "every sample with something to teach was cut at its token limit (rollout/cut_frac), and train.overlong=mask leaves out "
                "such samples. Raise rollout.max_new_tokens, or set train.overlong=penalty or keep."
            )
        return "no sample has a sampled token to train on: look at what the environment sends (rubato samples)."
    if metrics.get("policy/clip_frac", 0.0) >= 1.0:
        return "every token is clipped (policy/clip_frac = 1), which leaves no gradient: lower train.lr, or raise train.clip_high."
    if train.importance.mode == "mask" and metrics.get("policy/is_capped_frac", 0.0) >= 1.0:
        return "every token weighs more than train.importance.cap, and mode mask leaves out such tokens: raise the cap, or lower staleness.alpha."
    return f"the gradient of the loss is 0: {f'look at what {own} returns' if own else 'see policy/ in metrics.jsonl'}."

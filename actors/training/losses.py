"""Losses, advantages and importance weights as pure functions, each with its source; docs/learning.md has the formulas. `Objective` puts
them together as `train` says.

Shapes: N sampled tokens of one micro-batch; G rollouts of a group. π is the policy that learns, μ the one that sampled, p the proximal
policy, around which ratios are clipped. `sequence_N` numbers each token's sequence from 0; a micro-batch holds whole sequences.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from rubato.actors.config import LOSSES, TrainSection
from rubato.actors.messages.samples import SPREAD, has_spread
from rubato.actors.training.train_engine import TrainError
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import load_configured, load_object

Rewards = Sequence[Sequence[float]]
"""Of each group of a batch, in the order of its rollouts."""

# -- advantages ------------------------------------------------------------------------------------------------------


def group_advantages(rewards_G: Sequence[float], *, scaled: bool = True) -> list[float]:
    """(reward - mean) / standard deviation within one group; zeros where there is no spread. Without `scaled` it stays reward - mean.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision; the deviation is the sample one (G - 1). Unscaled:
    Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    count = len(rewards_G)
    mean = sum(rewards_G) / count
    if not has_spread(rewards_G):
        return [0.0] * count
    if not scaled:
        return [r - mean for r in rewards_G]
    deviation = (sum((r - mean) ** 2 for r in rewards_G) / (count - 1)) ** 0.5
    return [(r - mean) / (deviation + SPREAD) for r in rewards_G]


def rloo_advantages(rewards_G: Sequence[float]) -> list[float]:
    """reward - mean of the group's other rewards; zeros where there is no spread.

    Source: REINFORCE leave-one-out, Back to Basics (arXiv 2402.14740), its RLOO estimator.
    """
    if not has_spread(rewards_G):
        return [0.0] * len(rewards_G)
    total = sum(rewards_G)
    return [r - (total - r) / (len(rewards_G) - 1) for r in rewards_G]


def batch_advantages(rewards: Rewards) -> list[list[float]]:
    """(reward - mean) / standard deviation over the whole batch, whatever the groups; zeros where the batch has no spread.

    Source: REINFORCE++ (arXiv 2501.03262), global advantage normalisation, without its divergence in the reward: that is `kl_coef` here.
    """
    flat = group_advantages([r for rewards_G in rewards for r in rewards_G])
    found = iter(flat)
    return [[next(found) for _ in rewards_G] for rewards_G in rewards]


def advantages_of(kind: str, rewards: Rewards, *, loss: str) -> list[list[float]]:
    """What `train.advantage=kind` makes of the rewards of a batch. With the loss dr_grpo a group's advantages are not scaled."""
    if kind == "reinforce_pp":
        return batch_advantages(rewards)
    if kind == "rloo":
        return [rloo_advantages(rewards_G) for rewards_G in rewards]
    return [group_advantages(rewards_G, scaled=loss != "dr_grpo") for rewards_G in rewards]


# -- losses ----------------------------------------------------------------------------------------------------------


class TokenLoss(NamedTuple):
    """`loss_N` is what each token adds, to be weighed by `token_weights`; `clipped_N` is 1 where the upper clip decides it, -1 where
    the lower one does, and else 0."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor


def clipped_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) with r = π/p of the token: of GRPO, Dr. GRPO and DAPO, which differ in the tokens' weights.

    Sources: PPO (arXiv 1707.06347), section 3; its two separate bounds: DAPO (arXiv 2503.14476), section 3.1.
    """
    return clipped((logprobs_N - proximal_N).exp(), advantages_N, clip_low, clip_high)


def clipped(ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) of ratios r."""
    free_N, held_N = ratio_N * advantages_N, ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    side_N = (ratio_N.detach() - 1.0).sign() * (free_N > held_N)
    return TokenLoss(-torch.minimum(free_N, held_N), side_N)


def token_weights(mean_over: str, counts_S: Sequence[int], lengths_S: Sequence[int], *, budget: int) -> list[float]:
    """What each token of sequence s counts in the loss of a minibatch, of which this is told the S sequences, all of them.

    `counts_S` are the trained tokens of each; `lengths_S` those of the trajectory that it is part of, whose number is T.
    trajectories: 1/(length·T), the mean over trajectories of the mean over tokens (DeepSeekMath, section 4.1.1; GSPO, section 4.1).
    budget: 1/(budget·T) (Dr. GRPO, section 3.2). tokens: 1/tokens (DAPO, section 3.3).
    """
    trajectories = sum(count / length for count, length in zip(counts_S, lengths_S, strict=True) if count)
    if mean_over == "trajectories":
        return [1.0 / (length * trajectories) if length else 0.0 for length in lengths_S]
    if mean_over == "budget":
        return [1.0 / (budget * max(1.0, trajectories))] * len(counts_S)
    return [1.0 / max(1, sum(counts_S))] * len(counts_S)


# -- between policies ------------------------------------------------------------------------------------------------

MOST_LOG_WEIGHT = 20.0
"""Importance weights end at e^±20, so that sums of their squares stay finite in float32."""


def importance_weights(policy_N: torch.Tensor, behaviour_N: torch.Tensor, sequence_N: torch.Tensor, *, level: str) -> torch.Tensor:
    """π/μ of each token, or with level=sequence the product of these over its sequence; from log-probabilities.

    Source: decoupled objective, Batch size-invariance (arXiv 2110.00641), section 3, and AReaL (arXiv 2505.24298), section 5.2.
    """
    difference_N = policy_N - behaviour_N
    if level == "sequence":
        difference_N = sequence_sums(difference_N, sequence_N)
    return difference_N.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()


def bounded(weights_N: torch.Tensor, *, mode: str, cap: float) -> torch.Tensor:
    """truncate: min(w, cap); mask: w, and 0 where it is above `cap`.

    Sources: truncation, IMPALA (arXiv 1802.01561), section 4.1; masking, IcePop in Every Step Evolves (arXiv 2510.18855), its upper bound.
    """
    return weights_N.clamp(max=cap) if mode == "truncate" else torch.where(weights_N <= cap, weights_N, 0.0)


def k3(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """r - 1 - ln r of each token, never negative: its mean over samples of q estimates KL(q ‖ p) for r = p/q.

    Source: Schulman, Approximating KL Divergence (2020), the estimator k3; as a loss: DeepSeekMath, section 4.1.1, equation 4.
    """
    return log_ratio_N.exp() - 1.0 - log_ratio_N


def sequence_sums(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """Of each token's sequence."""
    if not len(values_N):
        return values_N
    sums_S = values_N.new_zeros(int(sequence_N.max()) + 1).index_add(0, sequence_N, values_N)
    return sums_S[sequence_N]


# -- what a step minimises ---------------------------------------------------------------------------------------------


class LossTokens(Protocol):
    """The N tokens of a micro-batch: what is known of each before the model is asked. Tensors of shape [N]."""

    @property
    def rows_N(self) -> torch.Tensor: ...
    @property
    def behaviour_N(self) -> torch.Tensor: ...
    @property
    def advantages_N(self) -> torch.Tensor: ...
    @property
    def fresh_N(self) -> torch.Tensor: ...
    @property
    def weights_N(self) -> torch.Tensor: ...


class Policies(NamedTuple):
    """Log-probabilities of the N tokens by policy; only the first carries a gradient."""

    now_N: torch.Tensor
    start_N: torch.Tensor | None
    """Of the policy that the step began with, where it is known."""
    reference_N: torch.Tensor | None


class Figures:
    """Sums over the tokens of a step."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        """By the name under which they are added."""
        self.num_updates = 0

    def add(self, **values: "float | torch.Tensor") -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def mean(self, name: str, over: str = "n", *, default: float | None = None) -> dict[str, float]:
        """`name` over as many as `over` says; nothing where that is none."""
        count = self.sums.get(over, 0.0)
        if name not in self.sums or not count:
            return {} if default is None else {f"policy/{name}": default}
        return {f"policy/{name}": self.sums[name] / count}

    def metrics(self) -> dict[str, float]:
        """By their names in metrics.jsonl. What says nothing is left out: docs/learning.md has which, and when."""
        sums = self.sums
        found = {"policy/loss": sums.get("loss", 0.0) / max(1, self.num_updates)}
        for name in ("entropy", "clip_frac", "clip_high_frac"):
            found |= self.mean(name, default=0.0)
        found |= self.mean("kl", "known", default=0.0) | self.mean("ratio_mean", "known", default=1.0)
        found |= self.mean("fresh_frac", "known", default=0.0) | self.mean("mismatch_kl", "fresh_frac")
        found |= self.mean("is_mean", "weighed") | self.mean("is_capped_frac", "weighed") | self.mean("kl_ref")
        if "router_imbalance" in sums:
            found["policy/router_imbalance"] = sums["router_imbalance"] / max(1, self.num_updates)
        if squares := sums.get("squares", 0.0):
            found["policy/ess"] = sums["weights"] ** 2 / (sums["known"] * squares)
        return found


class Objective:
    """The configured advantage, loss, importance weights and divergence from a reference."""

    def __init__(self, section: TrainSection) -> None:
        self._section = section
        self._loss = _load(section)

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Of each rollout of each group, from its reward."""
        return advantages_of(self._section.advantage, rewards, loss=self._section.loss)

    def weights(self, counts_S: Sequence[int], lengths_S: Sequence[int]) -> list[float]:
        """What each token of a sequence counts: of all sequences of a minibatch, so that no cut into micro-batches matters."""
        known = LOSSES.get(self._section.loss)
        over = known.mean_over if known else "tokens"
        return token_weights(over, counts_S, lengths_S, budget=self._section.budget_tokens)

    def loss(self, tokens: LossTokens, policies: Policies, figures: Figures) -> torch.Tensor:
        """What the tokens of a micro-batch add to the minibatch's loss, a scalar with a gradient; measured into `figures`."""
        section, (now_N, start_N, reference_N) = self._section, policies
        if start_N is not None:
            _measure(tokens, start_N, figures)
        proximal_N, factor_N = self._corrected(tokens, policies, figures)
        loss_N, clipped_N = self._loss(now_N, proximal_N, tokens.advantages_N, tokens.rows_N)
        if reference_N is not None:
            divergence_N = k3(reference_N - now_N)
            loss_N = loss_N + section.kl_coef * divergence_N
            figures.add(kl_ref=divergence_N.detach().sum())
        total = (loss_N * factor_N * tokens.weights_N).sum()
        above, all_clipped = (clipped_N > 0).sum(), clipped_N.count_nonzero()
        figures.add(n=len(now_N), loss=total.detach(), clip_frac=all_clipped, clip_high_frac=above)
        return total

    def _corrected(self, tokens: LossTokens, policies: Policies, figures: Figures) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Log-probs of the policy that ratios are taken to, and a constant that the loss of each token is multiplied by.

        Around the policy that sampled, the ratio is the importance weight itself: a weight that is cut is a ratio to a policy closer by.
        """
        section, behaviour_N = self._section.importance, tokens.behaviour_N
        start_N = policies.start_N if self._section.proximal == "recomputed" else None
        if section.mode in ("auto", "off"):
            return (behaviour_N if start_N is None else start_N), 1.0
        policy_N = policies.now_N.detach() if start_N is None else start_N
        weights_N = importance_weights(policy_N, behaviour_N, tokens.rows_N, level=section.level)
        bounded_N = bounded(weights_N, mode=section.mode, cap=section.cap)
        figures.add(weighed=len(bounded_N), is_mean=bounded_N.sum(), is_capped_frac=(weights_N > section.cap).sum())
        if start_N is not None:
            return start_N, bounded_N
        if section.mode == "truncate":
            return behaviour_N + (weights_N / bounded_N).log(), 1.0
        return behaviour_N, bounded_N.sign()


def _measure(tokens: LossTokens, start_N: torch.Tensor, figures: Figures) -> None:
    """How far the policies that sampled are from the one that the step began with."""
    difference_N = start_N - tokens.behaviour_N
    weights_N = importance_weights(start_N, tokens.behaviour_N, tokens.rows_N, level="token")
    figures.add(
        known=len(start_N),
        ratio_mean=difference_N.exp().sum(),
        kl=k3(difference_N).sum(),
        fresh_frac=tokens.fresh_N.sum(),
        mismatch_kl=k3(difference_N)[tokens.fresh_N > 0].sum(),
        weights=weights_N.sum(),
        squares=weights_N.square().sum(),
    )


class LossFunction(Protocol):
    """A loss with its clips set."""

    def __call__(
        self, logprobs_N: torch.Tensor, proximal_N: torch.Tensor, advantages_N: torch.Tensor, sequence_N: torch.Tensor, /
    ) -> TokenLoss: ...


def _load(section: TrainSection) -> LossFunction:
    clips: dict[str, Any] = {"clip_low": section.clip_low, "clip_high": section.clip_high}
    if section.loss in LOSSES:
        dual = {"dual_clip": section.dual_clip} if section.loss == "ppo" else {}
        return partial(load_object(LOSSES[section.loss].function), **clips, **dual)
    try:
        own = load_configured(section.loss, key="train.loss")
    except ConfigError as error:
        raise TrainError(str(error)) from error
    return partial(load_object("rubato.actors.training.variants:own_loss"), section.loss, own, clips)

"""What a step minimises, as `train` in the config puts it together, and what is measured of it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch

from actors.config import TrainSection
from actors.training.engine import TrainError
from actors.training.losses import LOSSES, TokenLoss, advantages_of, bounded, importance_weights, k3, token_weights
from runtime.errors import ConfigError
from runtime.importer import load_configured


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
        self._sums: dict[str, float] = {}
        self.num_updates = 0

    def add(self, **values: "float | torch.Tensor") -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def mean(self, name: str, over: str = "n", *, default: float | None = None) -> dict[str, float]:
        """`name` over as many as `over` says; nothing where that is none."""
        count = self._sums.get(over, 0.0)
        if name not in self._sums or not count:
            return {} if default is None else {f"policy/{name}": default}
        return {f"policy/{name}": self._sums[name] / count}

    def metrics(self) -> dict[str, float]:
        """By their names in metrics.jsonl. What says nothing is left out: docs/learning.md has which, and when."""
        sums = self._sums
        found = {"policy/loss": sums.get("loss", 0.0) / max(1, self.num_updates)}
        for name in ("entropy", "clip_frac", "clip_high_frac"):
            found |= self.mean(name, default=0.0)
        found |= self.mean("kl", "known", default=0.0) | self.mean("ratio_mean", "known", default=1.0)
        found |= self.mean("fresh_frac", "known", default=0.0) | self.mean("mismatch_kl", "fresh_frac")
        found |= self.mean("is_mean", "weighed") | self.mean("is_capped_frac", "weighed") | self.mean("kl_ref")
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
        return token_weights(self._section.loss, counts_S, lengths_S, budget=self._section.budget_tokens)

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

    def _corrected(
        self, tokens: LossTokens, policies: Policies, figures: Figures
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
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
        self,
        logprobs_N: torch.Tensor,
        proximal_N: torch.Tensor,
        advantages_N: torch.Tensor,
        sequence_N: torch.Tensor,
        /,
    ) -> TokenLoss: ...


def _load(section: TrainSection) -> LossFunction:
    clips: Mapping[str, Any] = {"clip_low": section.clip_low, "clip_high": section.clip_high}
    if section.loss == "ppo":
        return partial(LOSSES["ppo"], **clips, dual_clip=section.dual_clip)
    if section.loss in LOSSES:
        return partial(LOSSES[section.loss], **clips)
    try:
        own = load_configured(section.loss, key="train.loss")
    except ConfigError as error:
        raise TrainError(str(error)) from error
    return partial(_own_loss, section.loss, own, clips)


def _own_loss(name: str, own: Any, clips: Mapping[str, Any], *tensors_N: torch.Tensor) -> TokenLoss:
    """A user's function: it gets what ours get, and returns [N] numbers, or such and where it clipped."""
    try:
        found = own(*tensors_N, **clips)
    except Exception as error:
        raise TrainError(f"train.loss={name} raised {type(error).__name__}: {error}") from error
    loss_N, clipped_N = cast("Any", found) if isinstance(found, tuple) else (found, torch.zeros_like(tensors_N[0]))
    if not isinstance(loss_N, torch.Tensor) or loss_N.shape != tensors_N[0].shape or not loss_N.requires_grad:
        what = tuple(loss_N.shape) if isinstance(loss_N, torch.Tensor) else type(loss_N).__name__
        wanted = f"one number with a gradient for each of the {len(tensors_N[0])} tokens"
        raise TrainError(f"train.loss={name} returned {what}, not {wanted}")
    return TokenLoss(loss_N, clipped_N)

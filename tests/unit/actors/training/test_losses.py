"""Each loss against its paper's formula in plain loops, and its gradient against finite differences of that."""

import math
import random

import pytest
import torch

from rubato.actors.config import LOSSES
from rubato.actors.training.losses import bounded, clipped_loss, importance_weights, k3, token_weights
from rubato.runtime.importer import load_object

BUDGET = 16
DUAL = 1.2
LOW, HIGH = 0.03, 0.05
"""Narrow, so that some tokens are clipped on either side."""


class Output:
    """One trajectory: log-probabilities of its tokens under the policy and the proximal one, and its advantage."""

    def __init__(self, chance, length, advantage):
        self.proximal = [-chance.uniform(0.1, 3.0) for _ in range(length)]
        self.policy = [p + chance.uniform(-0.4, 0.4) for p in self.proximal]
        self.advantage = advantage


@pytest.fixture(params=range(5))
def outputs(request):
    chance = random.Random(request.param)
    return [Output(chance, chance.randrange(1, 7), chance.uniform(-2, 2)) for _ in range(12)]


# -- the papers' formulas, one output and one token at a time; all are objectives to be maximised ----------------------


def clip(ratio):
    return max(1 - LOW, min(1 + HIGH, ratio))


def surrogate(policy, proximal, advantage):
    ratio = math.exp(policy - proximal)
    return min(ratio * advantage, clip(ratio) * advantage)


def grpo(outputs, frozen):
    """DeepSeekMath, equation 3 without its divergence."""
    total = 0.0
    for o in outputs:
        inner = 0.0
        for policy, proximal in zip(o.policy, o.proximal, strict=True):
            inner += surrogate(policy, proximal, o.advantage)
        total += inner / len(o.policy)
    return total / len(outputs)


def dr_grpo(outputs, frozen):
    """Dr. GRPO, section 3.2: the sum over tokens, over a constant."""
    total = 0.0
    for o in outputs:
        for policy, proximal in zip(o.policy, o.proximal, strict=True):
            total += surrogate(policy, proximal, o.advantage) / BUDGET
    return total / len(outputs)


def dapo(outputs, frozen):
    """DAPO, equation 8."""
    total, tokens = 0.0, 0
    for o in outputs:
        for policy, proximal in zip(o.policy, o.proximal, strict=True):
            total += surrogate(policy, proximal, o.advantage)
            tokens += 1
    return total / tokens


def gspo(outputs, frozen):
    """GSPO, equations 5 and 7."""
    total = 0.0
    for o in outputs:
        log_ratio = 0.0
        for policy, proximal in zip(o.policy, o.proximal, strict=True):
            log_ratio += policy - proximal
        ratio = math.exp(log_ratio / len(o.policy))
        total += min(ratio * o.advantage, clip(ratio) * o.advantage)
    return total / len(outputs)


def cispo(outputs, frozen):
    """MiniMax-M1, equations 4 and 5; `frozen` is where the weights stand still."""
    total, tokens = 0.0, 0
    for o, still in zip(outputs, frozen, strict=True):
        for policy, at, proximal in zip(o.policy, still, o.proximal, strict=True):
            total += clip(math.exp(at - proximal)) * o.advantage * policy
            tokens += 1
    return total / tokens


def ppo(outputs, frozen):
    """Dual-clip PPO, the mean over tokens."""
    total, tokens = 0.0, 0
    for o in outputs:
        for policy, proximal in zip(o.policy, o.proximal, strict=True):
            inner = surrogate(policy, proximal, o.advantage)
            total += max(inner, DUAL * o.advantage) if o.advantage < 0 else inner
            tokens += 1
    return total / tokens


FORMULAS = {"grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "cispo": cispo, "ppo": ppo}


def ours(name, outputs):
    """The loss of the whole minibatch in float64, and its gradient by token."""
    lengths = [len(o.policy) for o in outputs]
    policy_N = torch.tensor([p for o in outputs for p in o.policy], dtype=torch.float64, requires_grad=True)
    proximal_N = torch.tensor([p for o in outputs for p in o.proximal], dtype=torch.float64)
    advantages_N = torch.tensor([o.advantage for o in outputs for _ in o.policy], dtype=torch.float64)
    sequence_N = torch.tensor([i for i, o in enumerate(outputs) for _ in o.policy])
    extra = {"dual_clip": DUAL} if name == "ppo" else {}
    found = load_object(LOSSES[name].function)(policy_N, proximal_N, advantages_N, sequence_N, clip_low=LOW, clip_high=HIGH, **extra)
    weights = token_weights(LOSSES[name].mean_over, lengths, lengths, budget=BUDGET)
    total = (found.loss_N * torch.tensor(weights, dtype=torch.float64)[sequence_N]).sum()
    total.backward()
    return total.item(), policy_N.grad.tolist(), found.clipped_N


def test_every_loss_has_a_formula_here_and_clips_of_its_paper():
    assert set(FORMULAS) == set(LOSSES)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_its_papers_formula(name, outputs):
    total, _, clipped_N = ours(name, outputs)

    assert total == pytest.approx(-FORMULAS[name](outputs, [list(o.policy) for o in outputs]), abs=1e-12)
    assert clipped_N.abs().sum() > 0


@pytest.mark.parametrize("name", FORMULAS)
def test_a_losses_gradient_is_that_of_finite_differences(name, outputs):
    _, gradient, _ = ours(name, outputs)
    frozen = [list(o.policy) for o in outputs]
    expected = []
    for o in outputs:
        for at, before in enumerate(o.policy):
            sides = []
            for step in (1e-6, -1e-6):
                o.policy[at] = before + step
                sides.append(-FORMULAS[name](outputs, frozen))
            o.policy[at] = before
            expected.append((sides[0] - sides[1]) / 2e-6)

    assert gradient == pytest.approx(expected, abs=1e-8)


def test_a_trajectory_in_two_contexts_counts_as_one_in_a_mean_over_trajectories():
    whole = token_weights("trajectories", [6, 3], [6, 3], budget=1)
    cut = token_weights("trajectories", [2, 4, 3], [6, 6, 3], budget=1)

    assert whole == pytest.approx([1 / 12, 1 / 6])
    assert cut == pytest.approx([1 / 12, 1 / 12, 1 / 6])


def test_the_side_of_a_clip_is_told():
    logprobs_N = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantages_N = torch.tensor([1.0, -1.0, -1.0, 1.0])

    found = clipped_loss(logprobs_N, torch.zeros(4), advantages_N, torch.arange(4), clip_low=0.2, clip_high=0.28)

    assert found.clipped_N.tolist() == [1.0, -1.0, 0.0, 0.0]


# -- between policies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_ratios_of_probabilities(level, outputs):
    policy_N = torch.tensor([p for o in outputs for p in o.policy], dtype=torch.float64)
    behaviour_N = torch.tensor([p for o in outputs for p in o.proximal], dtype=torch.float64)
    sequence_N = torch.tensor([i for i, o in enumerate(outputs) for _ in o.policy])
    expected = []
    for o in outputs:
        product = 1.0
        for policy, behaviour in zip(o.policy, o.proximal, strict=True):
            product *= math.exp(policy) / math.exp(behaviour)
        for policy, behaviour in zip(o.policy, o.proximal, strict=True):
            expected.append(product if level == "sequence" else math.exp(policy) / math.exp(behaviour))

    found = importance_weights(policy_N, behaviour_N, sequence_N, level=level)

    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_weights_are_cut_at_the_cap_or_left_out_above_it():
    weights_N = torch.tensor([0.5, 2.0, 2.5])

    assert bounded(weights_N, mode="truncate", cap=2.0).tolist() == [0.5, 2.0, 2.0]
    assert bounded(weights_N, mode="mask", cap=2.0).tolist() == [0.5, 2.0, 0.0]


def test_a_weight_beyond_any_number_stays_one():
    far_N = importance_weights(torch.tensor([0.0]), torch.tensor([-200.0]), torch.tensor([0]), level="token")

    assert math.isfinite(far_N.square().item())


def test_k3_is_never_negative_and_its_mean_is_the_divergence():
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]

    found = k3(torch.tensor([math.log(a / b) for a, b in zip(p, q, strict=True)], dtype=torch.float64))

    assert min(found.tolist()) >= 0.0
    expected = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert sum(b * each for b, each in zip(q, found.tolist(), strict=True)) == pytest.approx(expected)

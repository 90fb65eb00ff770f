import math

import pytest
import torch

from actors.training.losses import clipped_policy_loss


def loss_of(ratios, advantages):
    behaviour = torch.full((len(ratios),), -1.0)
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    found = clipped_policy_loss(logprobs, behaviour, torch.tensor(advantages), clip_low=0.2, clip_high=0.28)
    found.total.backward()
    return found, logprobs.grad


def test_on_policy_tokens_give_minus_the_advantage_and_ratio_one():
    found, gradient = loss_of([1.0, 1.0], [2.0, -0.5])

    assert found.total.item() == pytest.approx(-1.5)
    assert found.ratio.item() / 2 == pytest.approx(1.0)
    assert found.kl.item() == pytest.approx(0.0, abs=1e-6)
    assert gradient.tolist() == pytest.approx([-2.0, 0.5])


def test_a_ratio_beyond_the_clip_in_the_good_direction_gets_no_gradient():
    found, gradient = loss_of([1.5, 0.5], [1.0, -1.0])

    # -(min(1.5, 1.28)·1) - (min(-0.5, -0.8)) = -1.28 + 0.8
    assert found.total.item() == pytest.approx(-0.48)
    assert gradient.tolist() == [0.0, 0.0]
    assert found.clipped.item() == 2


def test_a_ratio_beyond_the_clip_in_the_bad_direction_is_still_corrected():
    found, gradient = loss_of([0.5, 1.5], [1.0, -1.0])

    assert found.total.item() == pytest.approx(-0.5 + 1.5)
    assert gradient.tolist() == pytest.approx([-0.5, 1.5])
    assert found.clipped.item() == 0


def test_the_upper_clip_is_wider_than_the_lower_one():
    _, gradient = loss_of([1.25, 0.75], [1.0, -1.0])

    assert gradient.tolist() == pytest.approx([-1.25, 0.0])


def test_kl_is_the_k3_estimator():
    found, _ = loss_of([2.0], [0.0])

    assert found.kl.item() == pytest.approx(2.0 - 1.0 - math.log(2.0))

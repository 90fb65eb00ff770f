from hypothesis import given
from hypothesis import strategies as st

from actors.training.losses import group_advantages
from actors.training.torch_train import TokenSequence, micro_batch, pack

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(LENGTHS, st.integers(1, 2000))
def test_packing_keeps_every_sequence_once_and_stays_within_the_limit(lengths, limit):
    runs = pack(lengths, limit)

    assert sorted(index for run in runs for index in run) == list(range(len(lengths)))
    for run in runs:
        assert len(run) == 1 or len(run) * max(lengths[i] for i in run) <= limit


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=8))
def test_a_micro_batch_preserves_every_sampled_token(masks):
    import torch

    sequences = [
        TokenSequence(
            tokens=[10 * row + i for i in range(len(mask))],
            trained=[int(m) for m in mask],
            behaviour=[0.0] * len(mask),
            fresh=[0] * len(mask),
            advantage=1.0,
            length=len(mask),
        )
        for row, mask in enumerate(masks)
    ]

    batch = micro_batch(sequences, torch.device("cpu"))

    expected = [10 * row + i for row, mask in enumerate(masks) for i, sampled in enumerate(mask) if sampled and i]
    assert batch.targets_N.tolist() == expected
    assert batch.tokens_BT[batch.rows_N, batch.cols_N + 1].tolist() == expected


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards):
    advantages = group_advantages(rewards)

    assert abs(sum(advantages)) < 1e-3
    assert all(
        a <= b for (_, a), (_, b) in zip(*[iter(sorted(zip(rewards, advantages, strict=True)))] * 2, strict=False)
    )

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from rubato.actors.training.forward import row_of
from rubato.actors.training.losses import group_advantages
from rubato.actors.training.torch_train import TokenSequence, micro_batch, pack

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
CPU = torch.device("cpu")
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(LENGTHS, st.integers(1, 2000), st.booleans())
def test_packing_keeps_every_sequence_once_and_stays_within_the_limit(lengths, limit, padded):
    runs = pack(lengths, limit, padded=padded)

    assert sorted(index for run in runs for index in run) == list(range(len(lengths)))
    for run in runs:
        size = len(run) * max(lengths[i] for i in run) if padded else sum(lengths[i] for i in run)
        assert len(run) == 1 or size <= limit
    if not padded:  # two runs that follow each other would not fit into one
        assert all(sum(lengths[i] for i in one) + lengths[other[0]] > limit for one, other in itertools.pairwise(runs))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=8))
def test_a_micro_batch_preserves_every_sampled_token(masks):
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

    batch = micro_batch(sequences, CPU)

    expected = [10 * row + i for row, mask in enumerate(masks) for i, sampled in enumerate(mask) if sampled and i]
    assert batch.targets_N.tolist() == expected
    assert batch.tokens_L[batch.places_N + 1].tolist() == expected
    assert batch.row.rows_L[batch.places_N].tolist() == batch.rows_N.tolist()


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards):
    advantages = group_advantages(rewards)

    assert abs(sum(advantages)) < 1e-3
    assert all(a <= b for (_, a), (_, b) in zip(*[iter(sorted(zip(rewards, advantages, strict=True)))] * 2, strict=False))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_buckets_hold_a_row_once_and_pad_it_by_less_than_a_third(lengths):
    row = row_of(lengths, CPU)

    assert [bucket.begin for bucket in row.buckets] == [0, *(bucket.end for bucket in row.buckets[:-1])]
    assert row.buckets[-1].end == sum(lengths)
    for bucket in row.buckets:
        size = bucket.num * bucket.longest
        assert 3 * size <= 4 * (bucket.end - bucket.begin)
        places = range(size) if bucket.places_L is None else bucket.places_L.tolist()
        assert len(set(places)) == bucket.end - bucket.begin
        of = row.rows_L[bucket.begin : bucket.end] - row.rows_L[bucket.begin]
        assert list(places) == (of * bucket.longest + row.positions_L[bucket.begin : bucket.end]).tolist()

import torch

from actors.training.torch_train import micro_batch, pack, sequences_of

CPU = torch.device("cpu")


def test_a_micro_batch_points_at_the_position_before_each_sampled_token(trajectory):
    (first,) = sequences_of(trajectory([5, 6, 7, 8], [0, 0, 1, 1], [0, 0, -0.5, -0.25]), 1.5, 0)
    (second,) = sequences_of(trajectory([9, 10], [0, 1], [0, -1.0]), -1.0, 0)

    batch = micro_batch([first, second], CPU)

    assert batch.tokens_BT.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert list(zip(batch.rows_N.tolist(), batch.cols_N.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 0)]
    assert batch.targets_N.tolist() == [7, 8, 10]
    assert batch.behaviour_N.tolist() == [-0.5, -0.25, -1.0]
    assert batch.advantages_N.tolist() == [1.5, 1.5, -1.0]


def test_a_sampled_first_token_is_left_out(trajectory):
    (sequence,) = sequences_of(trajectory([5, 6], [1, 1]), 1.0, 0)

    assert micro_batch([sequence], CPU).targets_N.tolist() == [6]


def test_only_tokens_of_the_present_version_count_as_fresh(trajectory):
    (old,) = sequences_of(trajectory([5, 6], [0, 1], version=2), 1.0, 3)
    (new,) = sequences_of(trajectory([5, 6], [0, 1], version=3), 1.0, 3)

    assert (old.fresh, new.fresh) == ([0, 0], [0, 1])


def test_sequences_of_like_length_share_a_run():
    runs = pack([10, 100, 11, 99], 200)

    assert [sorted(run) for run in runs] == [[1, 3], [0, 2]]

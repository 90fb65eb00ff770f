"""Sequences are shared out among ranks by their tokens."""

import pytest

from rubato.planning.shares import shares


@pytest.mark.parametrize(
    ("lengths", "num", "expected"),
    [
        ([5, 3, 2, 2], 2, [[0, 3], [1, 2]]),
        ([9, 1, 1, 1], 2, [[0], [1, 2, 3]]),
        ([4, 4, 4], 2, [[0, 2], [1]]),
        ([7], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_the_longest_left_goes_to_the_rank_with_the_fewest_tokens(lengths, num, expected):
    found = shares(lengths, num)

    assert found == expected


def test_every_sequence_is_one_ranks_and_no_rank_has_more_than_the_longest_beyond_another():
    lengths = [(7 * i) % 23 + 1 for i in range(101)]

    found = shares(lengths, 4)

    assert sorted(index for share in found for index in share) == list(range(101))
    tokens = _tokens(found, lengths)
    assert max(tokens) - min(tokens) <= max(lengths)


def _tokens(found, lengths):
    return [sum(lengths[index] for index in share) for share in found]

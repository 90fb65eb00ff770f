"""Packed tokens: cut, shifted and joined without losing a span."""

import pytest

from actors.engines.sequence import joined, pack, shifted, unpack_ids, unpack_logprobs
from actors.messages.generation import Tokens, VersionSpan


def test_ids_and_logprobs_come_back_as_they_went_in():
    tokens = pack([1, -2, 70000], [-0.5, 0.0, -8.25], [VersionSpan(3, 0, 3)])

    assert unpack_ids(tokens.ids) == (1, -2, 70000)
    assert unpack_logprobs(tokens.logprobs) == (-0.5, 0.0, -8.25)


def test_joining_merges_neighbouring_spans_of_one_version_and_keeps_others_apart():
    first = pack([1, 2], [0.0, 0.0], [VersionSpan(1, 0, 2)])
    second = pack([3, 4, 5], [0.0] * 3, [VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)])

    both = joined(joined(Tokens(), first), second)

    assert unpack_ids(both.ids) == (1, 2, 3, 4, 5)
    assert both.spans == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))


def test_shifted_moves_positions_only():
    tokens = pack([1], [0.0], [VersionSpan(1, 0, 1)])

    assert shifted(tokens, 7) == Tokens(tokens.ids, tokens.logprobs, (VersionSpan(1, 7, 8),))


def test_bytes_that_are_not_whole_values_are_refused():
    with pytest.raises(ValueError, match="3 bytes"):
        unpack_ids(b"abc")
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_logprobs(b"abcde")

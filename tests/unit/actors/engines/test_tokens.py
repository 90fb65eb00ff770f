"""Packed tokens: cut, shifted and joined without losing a span."""

from rubato.actors.messages.generation import Tokens, VersionSpan
from rubato.bus.message import pack_f32, pack_i32, unpack_i32


def pack(ids, spans):
    return Tokens(pack_i32(ids), pack_f32([0.0] * len(ids)), tuple(spans))


def test_joining_merges_neighbouring_spans_of_one_version_and_keeps_others_apart():
    first = pack([1, 2], [VersionSpan(1, 0, 2)])
    second = pack([3, 4, 5], [VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)])

    both = Tokens() + first + second

    assert unpack_i32(both.ids) == [1, 2, 3, 4, 5]
    assert both.spans == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))


def test_shifted_moves_positions_only():
    tokens = pack([1], [VersionSpan(1, 0, 1)])

    assert tokens.shifted(7) == Tokens(tokens.ids, tokens.logprobs, (VersionSpan(1, 7, 8),))

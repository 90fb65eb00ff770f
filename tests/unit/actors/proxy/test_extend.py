"""Tokens of a request that moves."""

from rubato.actors.messages.generation import Tokens, VersionSpan


def test_a_report_adds_the_tokens_after_those_known(tokens):
    known = tokens([1, 2], version=3)

    more = known.extended(tokens([3], version=3, start=2))

    assert more == tokens([1, 2, 3], version=3)


def test_a_new_version_begins_a_new_span(tokens):
    more = tokens([1, 2], version=3).extended(tokens([3], version=4, start=2))

    assert more.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))


def test_an_overlapping_report_is_cut(tokens):
    more = tokens([1, 2]).extended(tokens([2, 3], start=1))

    assert more == tokens([1, 2, 3])


def test_a_report_after_a_gap_or_without_news_changes_nothing(tokens):
    known = tokens([1, 2])

    assert known.extended(tokens([4], start=3)) is known
    assert known.extended(tokens([1, 2])) is known
    assert known.extended(Tokens()) is known

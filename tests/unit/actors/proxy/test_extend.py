"""Tokens of a request that moves."""

from actors.messages.generation import Tokens, VersionSpan
from actors.proxy.proxy import extend


def test_a_report_adds_the_tokens_after_those_known(tokens):
    known = tokens([1, 2], version=3)

    more = extend(known, tokens([3], version=3, start=2))

    assert more == tokens([1, 2, 3], version=3)


def test_a_new_version_begins_a_new_span(tokens):
    more = extend(tokens([1, 2], version=3), tokens([3], version=4, start=2))

    assert more.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))


def test_an_overlapping_report_is_cut(tokens):
    more = extend(tokens([1, 2]), tokens([2, 3], start=1))

    assert more == tokens([1, 2, 3])


def test_a_report_after_a_gap_or_without_news_changes_nothing(tokens):
    known = tokens([1, 2])

    assert extend(known, tokens([4], start=3)) is known
    assert extend(known, tokens([1, 2])) is known
    assert extend(known, Tokens()) is known

"""Tokens of a request that moves, and results for lost replies."""

from actors.messages.generation import Completion, Generate, Sampling, Tokens, VersionSpan
from actors.proxy.inflight import InFlight, extend


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


def test_results_are_bounded_in_number_and_bytes(tokens):
    table = InFlight(max_results=2, max_bytes=100)

    for i in range(4):
        flight = table.open(Generate(f"r{i}", "s", b"", Sampling(1)))
        table.finish(flight, Completion(f"r{i}", tokens([1]), "stop", "engine-1"))
        table.leave(flight)
    assert [table.result(f"r{i}") is not None for i in range(4)] == [False, False, True, True]
    flight = table.open(Generate("big", "s", b"", Sampling(1)))
    table.finish(flight, Completion("big", tokens([1] * 100), "stop", "engine-1"))
    table.leave(flight)

    assert [table.result(r) is not None for r in ("r3", "big")] == [False, True]
    assert table.idle.is_set()

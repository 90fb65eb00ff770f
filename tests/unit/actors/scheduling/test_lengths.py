"""Lengths as the orchestrator learns them."""

from actors.messages.orchestration import RequestEnded, RequestSeen
from actors.scheduling.lengths import Lengths


def seen(sampled, limit=10_000):
    return RequestSeen("r", "engine-1", "math", 1, 100, sampled, limit, 0)


def ended(*lengths, version=0):
    return [RequestEnded("math", place, each, version) for place, each in enumerate(lengths)]


def test_what_ended_while_others_run_says_how_much_is_left():
    lengths = Lengths()
    lengths.note(ended(*range(100, 1100, 100)), [seen(50)])

    assert lengths.left([seen(50)])["r"] == 500
    assert lengths.left([seen(50, limit=60)])["r"] == 10


def test_a_step_ends_where_nothing_runs_or_newer_weights_are_asked_for():
    lengths = Lengths()
    lengths.note(ended(100, 200), [])
    lengths.note(ended(300), [seen(1)])
    lengths.note(ended(400, version=1), [])

    assert [len(step) for step in lengths._steps] == [2, 1, 1]


def running(*names, sampled=0, limit=10_000):
    return [RequestSeen(name, "engine-1", "math", place, 100, sampled, limit, 0) for place, name in enumerate(names)]


def test_a_step_begins_where_all_that_runs_is_new():
    lengths = Lengths()

    assert lengths.note([], running("a", "b"))
    assert not lengths.note(ended(10), running("b", "c"))
    assert lengths.note(ended(10, 20), running("d", "e"))
    assert not lengths.note(ended(5, 5), [])
    assert lengths.note([], running("f"))
    assert [len(step) for step in lengths._steps] == [3, 2]


def test_a_step_s_lengths_are_spread_as_those_before_were_and_within_each_limit():
    lengths = Lengths()
    names = [f"r{number}" for number in range(200)]
    assert lengths.drawn(running(*names)) is None

    lengths.note(ended(*range(100, 1100, 10)), [])
    drawn = lengths.drawn(running(*names))
    short = lengths.drawn(running(*names, sampled=50, limit=60))

    assert drawn is not None
    assert short is not None
    assert set(drawn) == set(names)
    assert drawn == lengths.drawn(running(*names))
    assert 500 < sum(drawn.values()) / len(drawn) < 700
    assert min(drawn.values()) < 200
    assert max(drawn.values()) > 1000
    assert all(1 <= left <= 10 for left in short.values())

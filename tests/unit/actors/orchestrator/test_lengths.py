"""Lengths as the orchestrator learns them."""

from rubato.actors.messages.orchestration import RequestEnded, RequestSeen, Surveyed, TrajectorySeen
from rubato.actors.orchestrator.lengths import Lengths, underway


def seen(sampled, limit=10_000):
    return looked([RequestSeen("r", "engine-1", "math", 1, 100, sampled, limit, 0)])[0]


def looked(requests=(), trajectories=()):
    return underway(Surveyed(tuple(requests), (), (), 0, tuple(trajectories)))


def ended(*lengths, version=0):
    return [RequestEnded("math", place, each, version) for place, each in enumerate(lengths)]


def test_what_ended_while_others_run_says_how_much_is_left():
    lengths = Lengths()
    lengths.note(ended(*range(100, 1100, 100)), [seen(50)])

    assert lengths.left([seen(50)]).left["r"].tokens == 500
    assert lengths.left([seen(50, limit=60)]).left["r"].tokens == 10


def test_a_step_ends_where_nothing_runs_or_newer_weights_are_asked_for():
    lengths = Lengths()
    lengths.note(ended(100, 200), [])
    lengths.note(ended(300), [seen(1)])
    lengths.note(ended(400, version=1), [])

    assert [len(step.over.seen) for step in lengths._steps] == [2, 1, 1]


def running(*names, sampled=0, limit=10_000):
    return looked(RequestSeen(name, "engine-1", "math", place, 100, sampled, limit, 0) for place, name in enumerate(names))


def test_a_step_begins_where_all_that_runs_is_new():
    lengths = Lengths()

    assert lengths.note([], running("a", "b"))
    assert not lengths.note(ended(10), running("b", "c"))
    assert lengths.note(ended(10, 20), running("d", "e"))
    assert not lengths.note(ended(5, 5), [])
    assert lengths.note([], running("f"))
    assert [len(step.over.seen) for step in lengths._steps] == [3, 2]


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
    tokens = [each.tokens for each in drawn.values()]
    assert 500 < sum(tokens) / len(tokens) < 700
    assert min(tokens) < 200
    assert max(tokens) > 1000
    assert all(1 <= left.tokens <= 10 for left in short.values())


def turns(*parts, whole=True):
    """Rollouts that ended: 100 tokens and two seconds in their environments each turn, at 50 tokens a second."""
    return [RequestEnded("swe", place, 100 * num, 0, 2.0 * num, 2.0 * num, whole) for place, num in enumerate(parts)]


def rollout(name, num, away=False, limit=10_000):
    return TrajectorySeen(name, "swe", 99, 100 * num, 2.0 * num, limit, 0, away)


def turn(of, sampled=0):
    return RequestSeen(f"{of}.turn", "engine-1", "swe", 7, 5000, sampled, 200, 0, session=of)


def test_of_a_rollout_the_turns_to_come_are_forecast_with_their_time_in_environments():
    lengths = Lengths()
    lengths.note(turns(*[10] * 50), [])

    left = lengths.left(looked([turn("a", sampled=50)], [rollout("a", 4)])).left["a.turn"]

    # 1,000 tokens and 20 s in all: half of the work at 50 tokens a second is sampled, and so is half of what is left.
    assert 525 < left.tokens < 600
    assert 10.5 < left.env_s < 12
    assert lengths.left(looked([turn("a", sampled=50)], [rollout("a", 4, limit=460)])).left["a.turn"].tokens == 10
    assert lengths.left(looked([turn("alone", sampled=50)])).left["alone.turn"].tokens == 150


def test_rollouts_in_their_environments_are_waited_for_too():
    lengths = Lengths()
    lengths.note(turns(*[10] * 50), [])

    found = lengths.left(looked([turn("a")], [rollout("a", 9), rollout("b", 4, away=True)]))

    assert set(found.left) == {"a.turn"}
    assert 23 < found.away_s < 25
    drawn = lengths.drawn(looked([turn("a")], [rollout("a", 9), rollout("b", 4, away=True)]))
    assert drawn is not None
    assert set(drawn) == {"a.turn"}


def test_a_step_goes_on_while_all_of_its_rollouts_are_in_their_environments():
    lengths = Lengths()

    assert lengths.note([], looked([turn("a")], [rollout("a", 0)]))
    assert not lengths.note([], looked([], [rollout("a", 1, away=True)]))
    assert not lengths.note(turns(3), looked([turn("a")], [rollout("a", 1)]))
    assert lengths.note(turns(3), looked([turn("b")], [rollout("b", 0)]))


def test_rollouts_that_were_given_up_are_long_ones_as_far_as_is_known():
    lengths, censored = Lengths(), Lengths()
    lengths.note(turns(*[1] * 50), [])
    censored.note([*turns(*[1] * 50), *turns(*[5] * 50, whole=False)], [])

    def far(known):
        return known.left(looked([turn("a", sampled=0)], [rollout("a", 0)])).left["a.turn"].tokens

    assert far(lengths) == 100
    assert far(censored) > 300

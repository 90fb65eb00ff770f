"""Which engine takes a request, by example."""

from rubato.planning.engine_info import EngineInfo, WeightsId, WeightsNeed
from rubato.planning.routing import EngineView, Wait, capacity, choose


def engine(name, in_flight=0, *, num_slots=8, version=0, suspended=False, resting=False, held=False, asleep=False):
    info = EngineInfo(name, num_slots, (WeightsId(version),), suspended, held, asleep)
    return EngineView(info, in_flight, resting)


def route(engines, sticky=None, *, session="s", version=0, exact=False):
    return choose(engines, session, WeightsNeed(version, exact=exact), sticky)


def test_the_least_loaded_engine_is_chosen():
    chosen = route([engine("a", 3), engine("b", 1), engine("c", 2)])

    assert chosen == ("b", "least loaded")


def test_load_is_relative_to_the_slots():
    chosen = route([engine("small", 2, num_slots=4), engine("big", 8, num_slots=64)])

    assert chosen.engine == "big"


def test_the_sessions_engine_is_kept_while_it_is_little_more_loaded():
    chosen = route([engine("a", 3), engine("b", 1)], "a")

    assert chosen == ("a", "sticky")


def test_an_overloaded_engine_loses_its_session():
    chosen = route([engine("a", 6), engine("b", 1)], "a")

    assert chosen == ("b", "session's engine is overloaded")


def test_a_session_whose_engine_is_gone_or_suspended_goes_elsewhere():
    assert route([engine("b")], "a") == ("b", "session's engine is gone")
    assert route([engine("a", suspended=True), engine("b", 5)], "a").engine == "b"
    assert route([engine("a", resting=True), engine("b", 5)], "a").engine == "b"


def test_one_that_is_asleep_gets_nothing_unless_all_are():
    sleeper = engine("a", asleep=True)

    assert route([sleeper, engine("b", 5)], "a") == ("b", "session's engine is gone")
    assert route([sleeper, engine("b", 9)]) is Wait.NO_ROOM
    assert route([sleeper, engine("b", 1, asleep=True)], "b") == ("b", "sticky")
    held = engine("b", held=True, version=2, asleep=True)
    assert route([engine("a"), held], version=2, exact=True).engine == "b"


def test_engines_that_hold_the_version_come_first():
    chosen = route([engine("old", 0, version=1), engine("new", 5, version=2)], version=2)

    assert chosen.engine == "new"


def test_an_engine_that_must_pull_is_better_than_waiting():
    chosen = route([engine("old", version=1), engine("new", 9, version=2)], version=2)

    assert chosen.engine == "old"


def test_without_room_nobody_is_chosen():
    assert route([engine("a", 9), engine("b", suspended=True)]) is Wait.NO_ROOM
    assert route([]) is Wait.NO_ROOM


def test_a_small_queue_is_allowed_beyond_the_slots():
    assert [capacity(engine("a", num_slots=n)) for n in (1, 8, 64)] == [2, 9, 72]


def test_idle_engines_are_shared_out_by_session():
    engines = [engine(name) for name in ("engine-1", "engine-2", "engine-3")]

    chosen = [route(engines, session=f"session-{i}").engine for i in range(3000)]

    for view in engines:
        assert 900 < chosen.count(view.name) < 1100


def test_an_exact_request_goes_to_an_engine_that_is_held_at_its_version_alone():
    def exact(*engines):
        return route(engines, version=2, exact=True)

    assert exact(engine("a", 5, version=2, held=True), engine("b", version=2)).engine == "a"
    assert exact(engine("a", 9, version=2, held=True), engine("b", version=2)) is Wait.NO_ROOM
    assert exact(engine("a", version=1, held=True), engine("b", version=2)) is Wait.NEVER


def test_an_engine_that_is_held_serves_what_needs_nothing_newer():
    held = engine("held", version=2, held=True)

    assert route([held, engine("b", 5, version=3)], version=2).engine == "held"
    assert route([held, engine("b", 5, version=2)], version=3).engine == "b"
    assert route([held, engine("b", 9, version=3)], version=3) is Wait.PINNED


def test_an_engine_that_has_none_of_an_adapter_must_pull_it_first():
    info = EngineInfo("b", 8, (WeightsId(7), WeightsId(3, "tuned")))
    engines = [engine("a", version=9), EngineView(info, in_flight=5)]

    chosen = choose(engines, "s", WeightsNeed(2, adapter="tuned"))

    assert chosen.engine == "b"

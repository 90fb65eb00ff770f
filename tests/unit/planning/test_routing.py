"""Which engine takes a request, by example."""

from planning.routing import EngineView, RequestView, capacity, choose, goes_first


def engine(name, in_flight=0, *, num_slots=8, version=0, suspended=False, held=False, asleep=False):
    return EngineView(name, version, num_slots, in_flight, suspended, held, asleep)


def test_the_least_loaded_engine_is_chosen():
    route = choose(RequestView("s"), [engine("a", 3), engine("b", 1), engine("c", 2)])

    assert route == ("b", "least loaded")


def test_load_is_relative_to_the_slots():
    route = choose(RequestView("s"), [engine("small", 2, num_slots=4), engine("big", 8, num_slots=64)])

    assert route.engine == "big"


def test_the_sessions_engine_is_kept_while_it_is_little_more_loaded():
    route = choose(RequestView("s"), [engine("a", 3), engine("b", 1)], "a")

    assert route == ("a", "sticky")


def test_an_overloaded_engine_loses_its_session():
    route = choose(RequestView("s"), [engine("a", 6), engine("b", 1)], "a")

    assert route == ("b", "session's engine is overloaded")


def test_a_session_whose_engine_is_gone_or_suspended_goes_elsewhere():
    assert choose(RequestView("s"), [engine("b")], "a") == ("b", "session's engine is gone")
    assert choose(RequestView("s"), [engine("a", suspended=True), engine("b", 5)], "a").engine == "b"


def test_one_that_is_asleep_gets_nothing_unless_all_are():
    sleeper = engine("a", asleep=True)

    assert choose(RequestView("s"), [sleeper, engine("b", 5)], "a") == ("b", "session's engine is gone")
    assert choose(RequestView("s"), [sleeper, engine("b", 9)]) == (None, "no room")
    assert choose(RequestView("s"), [sleeper, engine("b", 1, asleep=True)], "b") == ("b", "sticky")
    held = engine("b", held=True, version=2)
    assert choose(RequestView("s", 2, exact=True), [engine("a"), held._replace(asleep=True)]).engine == "b"


def test_engines_that_hold_the_version_come_first():
    route = choose(RequestView("s", min_version=2), [engine("old", 0, version=1), engine("new", 5, version=2)])

    assert route.engine == "new"


def test_an_engine_that_must_pull_is_better_than_waiting():
    route = choose(RequestView("s", min_version=2), [engine("old", version=1), engine("new", 9, version=2)])

    assert route.engine == "old"


def test_without_room_nobody_is_chosen():
    assert choose(RequestView("s"), [engine("a", 9), engine("b", suspended=True)]) == (None, "no room")
    assert choose(RequestView("s"), []) == (None, "no room")


def test_a_small_queue_is_allowed_beyond_the_slots():
    assert [capacity(engine("a", num_slots=n)) for n in (1, 8, 64)] == [2, 9, 72]


def test_idle_engines_are_shared_out_by_session():
    engines = [engine(name) for name in ("engine-1", "engine-2", "engine-3")]

    chosen = [choose(RequestView(f"session-{i}"), engines).engine for i in range(3000)]

    for view in engines:
        assert 900 < chosen.count(view.name) < 1100


def test_a_request_that_has_tokens_waits_at_the_head():
    assert goes_first(RequestView("s", num_resumed=1))
    assert not goes_first(RequestView("s", min_version=3))


def test_an_exact_request_goes_to_an_engine_that_is_held_at_its_version_alone():
    exact = RequestView("s", min_version=2, exact=True)

    assert choose(exact, [engine("a", 5, version=2, held=True), engine("b", version=2)]).engine == "a"
    assert choose(exact, [engine("a", 9, version=2, held=True), engine("b", version=2)]) == (None, "no room")
    assert choose(exact, [engine("a", version=1, held=True), engine("b", version=2)]) == (
        None,
        "no engine holds its version",
    )


def test_an_engine_that_is_held_serves_what_needs_nothing_newer():
    held = engine("held", version=2, held=True)

    assert choose(RequestView("s", min_version=2), [held, engine("b", 5, version=3)]).engine == "held"
    assert choose(RequestView("s", min_version=3), [held, engine("b", 5, version=2)]).engine == "b"
    assert choose(RequestView("s", min_version=3), [held, engine("b", 9, version=3)]) == (
        None,
        "engines with room are held",
    )

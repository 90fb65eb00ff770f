"""Routing: what holds for every set of engines."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.engine_info import EngineInfo, WeightsId, WeightsNeed
from rubato.planning.routing import STICKY_SLACK, Choice, EngineView, Wait, capacity, choose

NAMES = [f"engine-{i}" for i in range(6)]


def view(name, version, num_slots, in_flight, suspended, pinned, asleep, resting):
    return EngineView(EngineInfo(name, num_slots, (WeightsId(version),), suspended, pinned, asleep), in_flight, resting)


views = st.lists(
    st.builds(
        view,
        st.sampled_from(NAMES),
        st.integers(0, 5),
        st.integers(1, 16),
        st.integers(0, 20),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda view: view.name,
    max_size=6,
)
sessions = st.text(max_size=5)
needs = st.builds(WeightsNeed, st.integers(0, 5), st.booleans())
stickies = st.one_of(st.none(), st.sampled_from(NAMES))


def usable(need, engines):
    """Name → engine of those that may take it: one that is pinned to a version serves what that version may, and exact requests no other does.

    While one that serves it is awake, whether it has room or not, none that sleeps.
    """

    def serves(engine):
        version = engine.info.version
        if not engine.info.pinned:
            return not need.exact
        return version == need.version if need.exact else version >= need.version

    able = [e for e in engines if serves(e)]
    awake = [e for e in able if not e.info.asleep]
    return {e.name: e for e in awake or able if not e.info.suspended and not e.resting and e.in_flight < capacity(e)}


@given(sessions, needs, views, stickies)
def test_a_suspended_resting_full_pinned_sleeping_or_dead_engine_is_never_chosen(session, need, engines, sticky):
    found = choose(engines, session, need, sticky)

    able = usable(need, engines)
    assert found.engine in able if able else isinstance(found, Wait)


@given(sessions, needs, views, stickies, st.randoms())
def test_the_choice_depends_on_nothing_but_the_views_and_not_on_their_order(session, need, engines, sticky, random):
    shuffled = list(engines)
    random.shuffle(shuffled)

    assert choose(engines, session, need, sticky) == choose(shuffled, session, need, sticky)


@given(sessions, needs, views, st.sampled_from(NAMES))
def test_a_session_keeps_its_engine_unless_that_is_unfair(session, need, engines, sticky):
    found = choose(engines, session, need, sticky)

    able = usable(need, engines)
    if sticky in able:
        own = able[sticky]
        least = min(e.in_flight / e.info.num_slots for e in able.values())
        fair = own.in_flight / own.info.num_slots - least <= max(STICKY_SLACK, 1 / own.info.num_slots)
        assert (found.why == "sticky") == fair
        assert (found.engine == sticky) or not fair


@given(sessions, needs, views)
def test_an_engine_that_holds_the_version_is_preferred(session, need, engines):
    found = choose(engines, session, need)

    fresh = {name for name, e in usable(need, engines).items() if e.info.version >= need.version}
    assert not fresh or found.engine in fresh


@given(st.integers(1, 6), st.integers(1, 16), st.lists(st.integers(0, 9), max_size=60))
def test_equal_engines_never_differ_by_more_than_the_slack(num_engines, num_slots, sessions):
    held = dict.fromkeys(NAMES[:num_engines], 0)
    served: dict[int, str] = {}
    for session in sessions:
        engines = [EngineView(EngineInfo(name, num_slots), n) for name, n in held.items()]
        route = choose(engines, str(session), WeightsNeed(), served.get(session))
        if not isinstance(route, Choice):
            assert all(n == capacity(engines[0]) for n in held.values())
            break
        held[route.engine] += 1
        served[session] = route.engine

        assert max(held.values()) - min(held.values()) <= max(STICKY_SLACK * num_slots, 1) + 1


@given(st.integers(1, 6), st.lists(st.text(max_size=8), unique=True, max_size=40))
def test_new_sessions_alone_are_spread_evenly(num_engines, sessions):
    held = dict.fromkeys(NAMES[:num_engines], 0)
    for session in sessions:
        engines = [EngineView(EngineInfo(name, 64), n) for name, n in held.items()]
        route = choose(engines, session, WeightsNeed())
        assert isinstance(route, Choice)
        held[route.engine] += 1

    assert max(held.values()) - min(held.values()) <= 1

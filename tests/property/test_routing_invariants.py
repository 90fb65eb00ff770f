"""Routing: what holds for every set of engines."""

from hypothesis import given
from hypothesis import strategies as st

from planning.routing import STICKY_SLACK, EngineView, RequestView, capacity, choose

NAMES = [f"engine-{i}" for i in range(6)]

views = st.lists(
    st.builds(
        EngineView,
        st.sampled_from(NAMES),
        st.integers(0, 5),
        st.integers(1, 16),
        st.integers(0, 20),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda view: view.name,
    max_size=6,
)
requests = st.builds(RequestView, st.text(max_size=5), st.integers(0, 5))
stickies = st.one_of(st.none(), st.sampled_from(NAMES))


def usable(request, engines):
    """Name → engine of those that may take it: one that is held at a version serves what that version may, and exact requests no other does.

    While one that serves it is awake, whether it has room or not, none that sleeps.
    """

    def serves(engine):
        if not engine.held:
            return not request.exact
        return engine.version == request.min_version if request.exact else engine.version >= request.min_version

    able = [e for e in engines if serves(e)]
    awake = [e for e in able if not e.asleep]
    return {e.name: e for e in awake or able if not e.suspended and e.in_flight < capacity(e)}


@given(requests, views, stickies)
def test_a_suspended_full_held_sleeping_or_dead_engine_is_never_chosen(request, engines, sticky):
    route = choose(request, engines, sticky)

    able = usable(request, engines)
    assert route.engine in able if able else route.engine is None


@given(requests, views, stickies, st.randoms())
def test_the_choice_depends_on_nothing_but_the_views_and_not_on_their_order(request, engines, sticky, random):
    shuffled = list(engines)
    random.shuffle(shuffled)

    assert choose(request, engines, sticky) == choose(request, shuffled, sticky)


@given(requests, views, st.sampled_from(NAMES))
def test_a_session_keeps_its_engine_unless_that_is_unfair(request, engines, sticky):
    route = choose(request, engines, sticky)

    able = usable(request, engines)
    if sticky in able:
        own = able[sticky]
        least = min(e.in_flight / e.num_slots for e in able.values())
        fair = own.in_flight / own.num_slots - least <= max(STICKY_SLACK, 1 / own.num_slots)
        assert (route.why == "sticky") == fair
        assert (route.engine == sticky) or not fair


@given(requests, views)
def test_an_engine_that_holds_the_version_is_preferred(request, engines):
    route = choose(request, engines)

    fresh = {name for name, e in usable(request, engines).items() if e.version >= request.min_version}
    assert not fresh or route.engine in fresh


@given(st.integers(1, 6), st.integers(1, 16), st.lists(st.integers(0, 9), max_size=60))
def test_equal_engines_never_differ_by_more_than_the_slack(num_engines, num_slots, sessions):
    held = dict.fromkeys(NAMES[:num_engines], 0)
    served: dict[int, str] = {}
    for session in sessions:
        engines = [EngineView(name, 0, num_slots, n) for name, n in held.items()]
        route = choose(RequestView(str(session)), engines, served.get(session))
        if route.engine is None:
            assert all(n == capacity(engines[0]) for n in held.values())
            break
        held[route.engine] += 1
        served[session] = route.engine

        assert max(held.values()) - min(held.values()) <= max(STICKY_SLACK * num_slots, 1) + 1


@given(st.integers(1, 6), st.lists(st.text(max_size=8), unique=True, max_size=40))
def test_new_sessions_alone_are_spread_evenly(num_engines, sessions):
    held = dict.fromkeys(NAMES[:num_engines], 0)
    for session in sessions:
        route = choose(RequestView(session), [EngineView(name, 0, 64, n) for name, n in held.items()])
        assert route.engine is not None
        held[route.engine] += 1

    assert max(held.values()) - min(held.values()) <= 1

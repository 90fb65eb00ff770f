"""A pool's size is within its bounds, enough for what waits, calm, and settles."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.autoscale import KEPT_STARTS, LEAST_START_S, PoolBounds, PoolLoad, WorkersWanted, autoscale

COUNTS = st.integers(0, 200)
SECONDS = st.floats(0, 1e4)
BOUNDS = st.tuples(st.integers(0, 20), st.integers(1, 40)).map(lambda b: PoolBounds(min(b), max(b)))
LOADS = st.builds(
    PoolLoad,
    now_s=SECONDS,
    waiting=COUNTS,
    running=COUNTS,
    workers=COUNTS,
    rate_hz=st.floats(0, 1e4),
    service_s=st.none() | SECONDS,
    start_s=SECONDS,
)
BEFORE = st.builds(WorkersWanted, COUNTS, st.just(""), st.none() | SECONDS, COUNTS)


@given(LOADS, BOUNDS, BEFORE)
def test_a_plan_is_within_bounds_serves_whoever_is_there_and_says_why(load, bounds, before):
    plan = autoscale(load, bounds, before)

    assert bounds.least <= plan.workers <= bounds.most
    assert plan.workers >= 1 or not load.waiting + load.running
    assert plan.why
    assert plan == autoscale(load, bounds, before)


@given(LOADS, BOUNDS, BEFORE, st.integers(1, 50))
def test_more_that_wait_never_get_fewer_workers(load, bounds, before, more):
    longer = load._replace(waiting=load.waiting + more)

    assert autoscale(longer, bounds, before).workers >= autoscale(load, bounds, before).workers


@given(st.lists(st.tuples(st.floats(0, 3), LOADS), min_size=2, max_size=30), BOUNDS, st.floats(0, 5))
def test_it_never_shrinks_within_ten_starts_of_a_need_for_all_that_was_there(looks, bounds, start_s):
    now, needed_all_at, plan = 0.0, None, WorkersWanted(0, "")
    keep_s = KEPT_STARTS * max(start_s, LEAST_START_S)
    for passed, load in looks:
        now += passed
        workers = plan.workers
        plan = autoscale(load._replace(now_s=now, start_s=start_s, workers=workers), bounds, plan)
        if plan.workers < workers:
            assert needed_all_at is None or now - needed_all_at >= keep_s - 1e-6
            needed_all_at = None
        elif plan.workers > workers:
            needed_all_at = now


@given(LOADS, BOUNDS, BEFORE)
def test_under_a_load_that_stays_it_settles(load, bounds, before):
    plan, sizes = before, []
    for look in range(6):
        now = load.now_s + look * 2 * KEPT_STARTS * max(load.start_s, LEAST_START_S)
        workers = plan.workers if look else load.workers
        plan = autoscale(load._replace(now_s=now, workers=workers), bounds, plan)
        sizes.append(plan.workers)

    assert len(set(sizes[3:])) == 1


@given(LOADS, BOUNDS)
def test_without_a_load_it_comes_down_to_the_least(load, bounds):
    idle = load._replace(waiting=0, running=0, rate_hz=0.0)
    plan = autoscale(idle, bounds, WorkersWanted(0, ""))

    while plan.again_s is not None:
        plan = autoscale(idle._replace(now_s=plan.again_s, workers=plan.workers), bounds, plan)

    assert plan.workers == bounds.least

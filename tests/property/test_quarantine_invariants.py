"""When one worker is set aside: never where all fail, the sooner and the longer the more it failed."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.failures import FIRST, HUNG, PAUSE_MAX_S, PAUSE_S, STREAK, QuarantineView, quarantine

views = st.builds(QuarantineView, st.integers(0, 100), st.booleans(), st.integers(0, 10_000))


@given(view=views)
def test_a_pause_is_bounded_said_why_and_only_for_one_that_fails_where_others_do_not(view):
    plan = quarantine(view)

    assert plan == quarantine(view)
    assert plan.pause_s == 0 or PAUSE_S <= plan.pause_s <= PAUSE_MAX_S
    assert plan.pause_s == 0 or (view.others_good and view.failed)
    assert plan.why


@given(view=views, failed=st.integers(0, 100), pauses=st.integers(0, 100))
def test_more_failures_and_more_pauses_never_shorten_it(view, failed, pauses):
    worse = QuarantineView(view.failed + failed, view.others_good, view.pauses + pauses)

    assert quarantine(worse).pause_s >= quarantine(view).pause_s


def test_one_is_set_aside_before_it_makes_the_whole_job_hopeless():
    assert quarantine(QuarantineView(STREAK, others_good=True)).pause_s > 0
    assert min(FIRST, HUNG) > STREAK

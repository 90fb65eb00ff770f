"""Advice: what holds for every run."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.planning.advice import PROCESSES, WORTH, AdviceView, advise, what_if

QUIET = settings(deadline=None)

shares = st.floats(0, 1)
ANY_ALPHA, OVERLAPPED = st.integers(-1, 4), st.sampled_from([-1, 1, 2, 4])


@st.composite
def views(draw, alphas=ANY_ALPHA):
    step_s = draw(st.floats(0.01, 1000))
    waited_s = step_s * draw(shares)
    engines, managers = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return AdviceView(
        step_s=step_s,
        waited_s=waited_s,
        train_s=(step_s - waited_s) * draw(shares),
        alpha=draw(alphas),
        batch=draw(st.integers(1, 512)),
        rollout_s=step_s * draw(st.floats(0.001, 20)),
        env_share=draw(shares),
        engines=engines,
        slots=engines * draw(st.integers(1, 256)),
        managers=managers,
        room=managers * draw(st.integers(1, 256)),
        pause_s=step_s * draw(shares),
        env_workers=managers * draw(st.integers(0, 8)),
        manager_busy=draw(shares),
        host_busy=draw(shares),
        reward_share=draw(shares),
        reward_workers=draw(st.integers(0, 8)),
        reward_services=draw(st.integers(0, 2)),
        reward_each_s=step_s * draw(shares),
        reward_alone_s=step_s * draw(shares),
    )


def gains(view):
    return {change.name: change.gain for change in what_if(view)}


ROLLOUT = ("concurrency", "env_manager", "alpha", "engine", "reward_workers")


def rollout_gain(view):
    return max(gains(view).get(name, 0.0) for name in ROLLOUT)


@QUIET
@given(views())
def test_the_same_view_gives_the_same_advice(view):
    assert advise(view) == advise(replace(view))


@QUIET
@given(views())
def test_changes_are_ranked_by_their_gain_and_none_is_below_what_is_worth_a_word(view):
    advice = advise(view)

    found = [change.gain for change in advice.changes]
    assert found == sorted(found, reverse=True) or max(found) - min(found) < 1e-5
    assert all(gain >= WORTH for gain in found)
    assert bool(advice.changes) == bool(advice.bound)
    assert advice.why
    assert "\n" not in advice.why


@QUIET
@given(views())
def test_twice_of_something_at_most_doubles_the_throughput(view):
    assert all(0.0 <= change.gain <= 1.0 + 1e-6 for change in what_if(view) if change.name != "alpha")


@QUIET
@given(views(OVERLAPPED), shares)
def test_a_trainer_that_waits_longer_never_lowers_the_advice_to_add_rollout(view, share):
    longer = view.waited_s + (view.step_s - view.waited_s) * share
    idler = replace(view, waited_s=longer, train_s=min(view.train_s, view.step_s - longer))

    assert rollout_gain(idler) >= rollout_gain(view) - 1e-6


@QUIET
@given(views(), shares)
def test_updates_that_take_more_of_the_wait_never_lower_the_advice_of_a_faster_trainer(view, share):
    longer = view.waited_s * (1.0 - share) if view.alpha else view.waited_s
    busier = replace(view, waited_s=longer, train_s=view.train_s + view.waited_s - longer)

    assert gains(busier)["trainer"] >= gains(view)["trainer"] - 1e-6


@QUIET
@given(views(OVERLAPPED), st.integers(2, 8))
def test_engines_with_more_slots_are_never_wanted_more(view, times):
    assert gains(replace(view, slots=view.slots * times))["engine"] <= gains(view)["engine"] + 1e-6


@QUIET
@given(views())
def test_a_crowded_host_is_told_where_processes_are_advised(view):
    advice = advise(replace(view, host_busy=0.95))

    processes = any(change.name in PROCESSES for change in advice.changes)
    assert ("put new processes on another" in advice.why) == processes

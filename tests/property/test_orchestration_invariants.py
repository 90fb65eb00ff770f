"""Forecast, parallelism, rebalancing: what holds for every load."""

from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.planning.forecast import Seen, fit, past
from rubato.planning.makespan import Instance, Load, finish_s, left_after
from rubato.planning.parallelism import coming, within
from rubato.planning.rebalance import MARGIN, rebalance
from rubato.planning.roofline import Deployment, Roofline

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GPU = yaml.safe_load((CONFIGS / "hardware/h800.yaml").read_text())
MODEL = yaml.safe_load((CONFIGS / "models/qwen2.5-14b.yaml").read_text())


def engine(degree: int, **more: float) -> Roofline:
    return Roofline(Deployment.model_validate({"gpu": GPU, "model": MODEL, "tp": degree, "num_slots": 4, **more}))


ENGINES = {degree: engine(degree) for degree in (1, 2, 4, 8)}

few = settings(max_examples=50, deadline=None)
sizes = st.tuples(st.integers(1, 4000), st.floats(0, 9000), st.floats(0, 1), st.sampled_from((0.0, 3.0)))


def named(parts: list[tuple[int, float, float, float]]) -> list[Load]:
    return [Load(f"r{i}", c, left, int(c * known), wait) for i, (c, left, known, wait) in enumerate(parts)]


loads = st.lists(sizes, max_size=12).map(named)


@st.composite
def pools(draw: st.DrawFn) -> list[Instance]:
    degrees = draw(st.lists(st.sampled_from((1, 2, 4)), min_size=1, max_size=5))
    held: list[list[Load]] = [[] for _ in degrees]
    for load in draw(loads):
        held[draw(st.integers(0, len(degrees) - 1))].append(load)
    return [
        Instance(f"e{i}", degree, tuple(own), draw(st.sampled_from("ab")), draw(st.booleans()))
        for i, (degree, own) in enumerate(zip(degrees, held, strict=True))
    ]


seen = st.builds(Seen, st.sampled_from(("math", "code")), st.sampled_from("pqrs"), st.integers(0, 500), st.floats(0, 20), st.booleans())
histories = st.lists(st.lists(seen, max_size=15), max_size=4)


@few
@given(loads, sizes, st.sampled_from((1, 2, 4)))
def test_one_more_request_never_brings_an_engine_through_earlier_and_more_bandwidth_never_later(own, more, degree):
    added = [*own, *named([more])]

    assert finish_s(added, ENGINES[degree]) >= finish_s(own, ENGINES[degree]) - 1e-9
    assert finish_s(own, engine(degree, bandwidth_use=0.9)) <= finish_s(own, ENGINES[degree]) + 1e-9


@few
@given(loads, st.integers(1, 16), st.sampled_from(((), (1, 1), (2,), (2, 4), (8,))), st.sampled_from((1, 2, 8)))
def test_a_step_s_plan_uses_all_gpus_holds_each_request_once_and_is_no_slower_than_any_even_one(own, num_gpus, current, steps):
    num_gpus = sum(current) or num_gpus
    there = [Instance(f"e{at}", degree, tuple(own[at :: len(current)])) for at, degree in enumerate(current)]
    plan = coming(own, num_gpus, ENGINES, there, steps=steps)

    assert sum(plan.degrees) == num_gpus
    assert list(plan.degrees) == sorted(plan.degrees)
    assert sorted(name for names in plan.assigned for name in names) == sorted(load.name for load in own)
    assert len(plan.assigned) == len(plan.degrees)
    assert plan.switched == (bool(current) and Counter(plan.degrees) != Counter(current))
    assert plan.why
    assert coming(own[::-1], num_gpus, ENGINES, there[::-1], steps=steps) == plan
    if not current:
        assert coming(own, num_gpus, ENGINES) == plan
    if not current and own:
        ordered = sorted(own, key=lambda load: (-load.remaining, load))
        one = [finish_s(ordered, ENGINES[d]) for d in ENGINES if d == num_gpus]
        assert all(plan.predicted_s <= each + 1e-9 for each in one)


@few
@given(pools())
def test_a_switch_keeps_gpus_and_requests_stays_in_a_server_and_pays(instances):
    plan = within(instances, ENGINES)
    by_name = {each.name: each for each in instances}
    touched = [name for change in plan.changes for name in change.old]

    assert len(touched) == len(set(touched))
    for change in plan.changes:
        old = [by_name[name] for name in change.old]
        assert all(each.settled for each in old)
        assert len({each.server for each in old}) == 1
        assert sum(each.degree for each in old) == change.degree * len(change.parts)
        given_names = sorted(load.name for each in old for load in each.loads)
        assert sorted(name for part in change.parts for name in part) == given_names
        assert change.costs_s > 0
        assert change.saves_s > change.costs_s
        assert f"costs {change.costs_s:.1f} s" in change.why
    assert bool(plan.changes) == (plan.after_s < plan.before_s)
    assert not plan.changes or plan.after_s <= (1 - MARGIN) * plan.before_s
    assert within(instances[::-1], ENGINES) == plan
    assert plan.why


@few
@given(pools(), st.floats(0, 60))
def test_requests_that_wait_put_no_merge_off_that_still_pays(instances, wait_s):
    def waiting(seconds: float) -> list[Instance]:
        return [each._replace(loads=tuple(load._replace(wait_s=seconds) for load in each.loads), settled=True) for each in instances]

    plain, plan = within(waiting(0.0), ENGINES), within(waiting(wait_s), ENGINES)

    if plain.before_s - plain.after_s > MARGIN * (plain.before_s + wait_s) + 1e-6:
        assert plan.changes
    assert bool(plain.changes) or not plan.changes


@few
@given(pools(), st.integers(0, 5), st.floats(0, 30))
def test_moves_are_of_requests_that_are_there_at_most_once_per_interval_and_pay(instances, most, later_s):
    plan = rebalance(instances, ENGINES, now_s=0.0, most=most)
    at = {load.name: each.name for each in instances for load in each.loads}
    names = [move.request for move in plan.moves]

    assert len(names) == len(set(names)) <= most
    assert all(at[move.request] == move.source != move.target and move.why for move in plan.moves)
    assert {move.target for move in plan.moves} <= {each.name for each in instances}
    assert bool(plan.moves) == (plan.after_s < plan.before_s)
    assert not plan.moves or plan.after_s <= (1 - MARGIN) * plan.before_s
    assert rebalance(instances[::-1], ENGINES, now_s=0.0, most=most) == plan

    again = rebalance(instances, ENGINES, now_s=later_s, moved_s=dict.fromkeys(names, 0.0), interval_s=10.0)
    assert later_s >= 10 or not {move.request for move in again.moves} & set(names)


@few
@given(histories, st.lists(seen, max_size=10), st.floats(0.01, 0.99), st.floats(0.01, 0.99), seen)
def test_what_remains_rises_with_the_quantile_within_the_limit_and_never_shrinks_in_whole(steps, now, low, high, request_):
    forecast = fit(past(steps), now, limit=400)
    low, high = sorted((low, high))
    request_ = request_._replace(tokens=min(400, request_.tokens))
    first, second = forecast.remaining(request_, low), forecast.remaining(request_, high)

    assert 0 <= first.tokens <= second.tokens <= 400 - request_.tokens
    assert 0 <= first.env_s <= second.env_s
    assert first.why
    assert fit(past(steps), now, limit=400).remaining(request_, low) == first
    least, most = (forecast.remaining(request_, quantile).tokens for quantile in (0.01, 0.99))
    assert least - 1e-6 <= forecast.expected(request_).tokens <= most + 1e-6


@few
@given(histories, seen, st.integers(1, 100), st.floats(0.05, 0.95))
def test_a_request_that_came_further_is_not_expected_to_be_shorter_in_whole(steps, request_, more, quantile):
    forecast = fit(past(steps))
    curve = forecast.curves.get(request_.task)
    if not curve:
        return
    whole = [work + curve.left(request_.prompt, work, quantile) for work in (request_.tokens, request_.tokens + more)]

    assert whole[1] >= whole[0] - 1e-6


@few
@given(loads, st.sampled_from((1, 2, 8)), st.floats(0, 1))
def test_what_is_left_after_a_while_takes_the_rest_of_the_time(own, degree, share):
    own = [load._replace(wait_s=0.0) for load in own]
    whole_s = finish_s(own, ENGINES[degree])
    left = left_after(own, ENGINES[degree], share * whole_s)

    rest_s = finish_s(left, ENGINES[degree])
    # Contexts are whole tokens, and a prefill under way counts as not begun.
    prefills_s = sum(ENGINES[degree].prefill_s(load.context) for load in own)
    assert share * whole_s + rest_s == pytest.approx(whole_s, abs=2e-3 * whole_s + prefills_s)
    assert {load.name for load in left} <= {load.name for load in own}


def test_what_no_engine_can_hold_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="can't hold every request"):
        coming([Load("r", 10, 1e9)], 2, ENGINES)

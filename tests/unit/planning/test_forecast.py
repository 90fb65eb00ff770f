"""Forecast of remaining lengths: calibrated on the repository's length distributions, with drift, prompts and environments."""

import math
from random import Random

import pytest

from rubato.planning.forecast import Forecast, Over, Seen, fit, past
from rubato.sim.admission.job import distributions

QUANTILES = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95)
CURVES = distributions()
LIMITS = {name: CURVES[name].points[-1][1] for name in ("math", "code", "judge", "7B-4k", "7B-8k")}


def draw(task: str, chance: Random) -> float:
    (low, first), *rest = CURVES[task].points
    share = chance.random()
    for high, second in rest:
        if share <= high:
            return first + (second - first) * (share - low) / max(high - low, 1e-12)
        low, first = high, second
    return first


def misses(forecast: Forecast, running: list[tuple[Seen, float]]) -> dict[float, float]:
    """By quantile, by how much the share of `running` (request and its final length) within it is off.

    Of a length that many have, such as the limit, any share between "below" and "at most" is right.
    """
    found: dict[float, float] = {}
    for quantile in QUANTILES:
        within = [seen.tokens + forecast.remaining(seen, quantile).tokens for seen, _ in running]
        below = sum(final < most - 1e-6 for (_, final), most in zip(running, within, strict=True)) / len(running)
        at_most = sum(final <= most + 1e-6 for (_, final), most in zip(running, within, strict=True)) / len(running)
        found[quantile] = max(below - quantile, quantile - at_most, 0.0)
    return found


@pytest.mark.parametrize("task", sorted(CURVES))
@pytest.mark.parametrize("come_as_far_as", [0.0, 0.5, 0.8])
def test_predicted_quantiles_hold_within_5_points_on_every_csv(task: str, come_as_far_as: float):
    chance = Random(f"{task} {come_as_far_as}")
    steps = [[Seen(task, f"{step}/{i}", draw(task, chance)) for i in range(512)] for step in range(16)]
    forecast = fit(past(steps), limit=LIMITS.get(task, math.inf))
    ordered = sorted(draw(task, chance) for _ in range(8000))
    far = ordered[int(come_as_far_as * len(ordered))] * (come_as_far_as > 0)
    running = [(Seen(task, "new", far, done=False), final) for final in ordered if final > far]

    off = misses(forecast, running)

    print(task, come_as_far_as, {quantile: round(100 * each, 1) for quantile, each in off.items()})
    assert running
    assert max(off.values(), default=0.0) <= 0.05


@pytest.mark.parametrize("growth", [0.9, 1.1])
def test_they_hold_while_lengths_drift(growth: float):
    chance = Random(f"drift {growth}")
    steps = [[Seen("7B-8k", "", growth**at * draw("7B-8k", chance)) for _ in range(512)] for at in range(8)]
    running = [(Seen("7B-8k", "new", 0.0, done=False), growth**8 * draw("7B-8k", chance)) for _ in range(4000)]

    assert max(misses(fit(past(steps)), running).values()) <= 0.05
    frozen = fit(past([[seen for step in steps for seen in step]]))
    assert max(misses(frozen, running).values()) > 0.05


def test_they_hold_while_a_model_learns_and_its_tail_shrinks_faster_than_its_middle():
    chance = Random("learns")

    def lengths(step: int, num: int) -> list[float]:
        return [math.exp(5 - 0.05 * step + (1.6 - 0.06 * step) * chance.gauss(0, 1)) for _ in range(num)]

    steps = [[Seen("math", f"{at}/{i}", each) for i, each in enumerate(lengths(at, 512))] for at in range(16)]
    running = [(Seen("math", "new", 0.0, done=False), each) for each in lengths(16, 4000)]

    assert max(misses(fit(past(steps)), running).values()) <= 0.05
    all_alike = fit([each._replace(apart={}) for each in past(steps)])
    assert max(misses(all_alike, running).values()) > 0.05


def test_a_task_that_was_away_keeps_the_curve_of_all_its_steps():
    steps = [Over((Seen("math", "", 100.0 * at),), {"math": (3.0, 2.0, 1.0, 0.0)}, {}) for at in range(1, 9)]

    assert fit(steps).curves["math"].works == (800.0,)
    assert len(fit([*steps, Over((Seen("code", "", 5000.0),), {}, {})]).curves["math"].works) == 7


def test_running_requests_are_evidence_that_the_short_ones_came_first():
    chance = Random("censored")
    lengths = [draw("math", chance) for _ in range(4000)]
    half = sorted(lengths)[2400]
    now = [Seen("math", "", min(each, half), done=each <= half) for each in lengths]
    running = [(Seen("math", "", 200.0, done=False), each) for each in lengths if each > 200]

    at_once = fit([], now, limit=16384)
    naive = fit([], [seen for seen in now if seen.done], limit=16384)

    assert misses(at_once, running)[0.25] <= 0.05 < misses(naive, running)[0.5]


def test_requests_of_one_prompt_are_alike_and_its_quantiles_hold_and_are_narrower():
    chance = Random("prompts")

    def of(prompt: float) -> float:
        return math.exp(6 + 0.8 * prompt + 0.6 * chance.gauss(0, 1))

    prompts = {f"p{i}": chance.gauss(0, 1) for i in range(1000)}
    steps = [[Seen("math", name, of(each)) for name, each in prompts.items()] for _ in range(4)]
    forecast = fit(past(steps))
    running = [(Seen("math", name, 0.0, done=False), of(each)) for name, each in prompts.items()]

    assert forecast.curves["math"].likeness == pytest.approx(0.64, abs=0.06)
    assert max(misses(forecast, running).values()) <= 0.05

    def width(prompt: str) -> float:
        seen = Seen("math", prompt, 0.0, done=False)
        return math.log(forecast.remaining(seen, 0.9).tokens / forecast.remaining(seen, 0.1).tokens)

    assert sum(width(name) for name in prompts) / len(prompts) < 0.75 * width("unknown")


def test_of_one_prompt_quantiles_hold_while_all_grow_too_little_to_be_a_trend():
    chance = Random("slow")
    prompts = {f"p{i}": chance.gauss(0, 1) for i in range(40)}

    def of(step: int, name: str) -> float:
        return math.exp(5 + 0.015 * step + 0.8 * prompts[name] + 0.5 * chance.gauss(0, 1))

    def shown(step: int) -> list[str]:
        return [f"p{(8 * step + i) % 40}" for i in range(8) for _ in range(8)]

    off: dict[float, float] = dict.fromkeys(QUANTILES, 0.0)
    steps = [[Seen("math", name, of(step, name)) for name in shown(step)] for step in range(32)]
    for at in range(16, 32):
        forecast = fit(past(steps[at - 16 : at]))
        running = [(Seen("math", name, 0.0, done=False), of(at, name)) for name in shown(at) for _ in range(20)]
        for quantile in QUANTILES:
            within = sum(final <= forecast.remaining(seen, quantile).tokens for seen, final in running)
            off[quantile] += (within / len(running) - quantile) / 16

    assert max(map(abs, off.values())) <= 0.05


def test_without_likeness_a_prompt_s_history_changes_little():
    chance = Random("unlike")
    steps = [[Seen("code", f"p{i}", draw("code", chance)) for i in range(300)] for _ in range(4)]
    forecast = fit(past(steps), limit=16384)

    assert forecast.curves["code"].likeness <= 0.05


def test_time_in_environments_counts_and_quantiles_of_the_whole_hold():
    chance = Random("turns")

    def trajectory() -> Seen:
        turns = 1 + int(chance.expovariate(0.25))
        return Seen("swe", "", sum(draw("7B-4k", chance) for _ in range(turns)), sum(chance.expovariate(0.5) for _ in range(turns)))

    forecast = fit(past([[trajectory() for _ in range(256)] for _ in range(8)], tokens_s=50), tokens_s=50)
    finals = [trajectory() for _ in range(2000)]

    for quantile in QUANTILES:
        left = forecast.remaining(Seen("swe", "new", 0.0, done=False), quantile)
        held = sum(each.tokens / 50 + each.env_s <= left.tokens / 50 + left.env_s for each in finals) / len(finals)
        assert abs(held - quantile) <= 0.05
        assert left.env_s > 0


def test_a_task_that_nobody_finished_has_the_length_of_all_and_a_beginning_as_much_again():
    known = fit(past([[Seen("math", f"{each}", float(each)) for each in range(1, 101)]]))

    assert known.remaining(Seen("new task", "", 0.0, done=False)).tokens == 50
    assert fit([]).remaining(Seen("math", "", 30.0, done=False)) == (30.0, 0.0, "no request came further")
    assert fit([], limit=40).remaining(Seen("math", "", 30.0, done=False)).tokens == 10
    assert "of 100, trend" in known.remaining(Seen("math", "", 0.0, done=False)).why


@pytest.mark.parametrize("quantile", [0.0, 1.0, math.nan])
def test_a_quantile_outside_0_and_1_is_refused(quantile: float):
    with pytest.raises(ValueError, match="between 0 and 1"):
        fit([]).remaining(Seen("math", "", 1.0), quantile)


def test_a_rate_or_limit_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        fit([], limit=0)


def test_spread_over_many_requests_their_remaining_tokens_are_distributed_as_forecast():
    chance = Random(5)
    steps = [[Seen("math", f"{step}/{i}", draw("math", chance)) for i in range(512)] for step in range(8)]
    forecast = fit(past(steps), limit=LIMITS["math"])
    left = forecast.spread({f"n{i}": Seen("math", f"new/{i}", 0) for i in range(2000)})
    spread = sorted(each.tokens for each in left.values())

    for quantile in QUANTILES:
        expected = forecast.remaining(Seen("math", "new", 0), quantile).tokens
        assert sum(tokens <= expected for tokens in spread) / len(spread) == pytest.approx(quantile, abs=0.04)

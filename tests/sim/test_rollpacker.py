"""RollPacker's scenarios: a run is the same twice, and what a round trains is what the planner says."""

from pathlib import Path
from statistics import fmean

import pytest

from rubato.planning.tail import TailRound, TailRules
from rubato.runtime.errors import ConfigError
from rubato.sim.outcome import silent
from rubato.sim.rollpacker.rollout import RoundCount, RoundDone, RoundRun, periods_of
from rubato.sim.rollpacker.stream import left_s
from rubato.sim.scenario import load

SCENARIOS = Path(__file__).parents[2] / "configs" / "sim"
SMALL = {"rollpacker_stream": ["prompts=8", "size.engines=2"], "rollpacker_tail": ["prompts=8", "updates=2", "sensitivity=[]"]}


@pytest.mark.parametrize("name", SMALL)
def test_a_run_is_the_same_twice_and_has_the_figures_of_its_claims(name):
    loaded = load(SCENARIOS / f"{name}.yaml", SMALL[name])

    first, second = loaded.kind.run(loaded.scenario, silent), loaded.kind.run(loaded.scenario, silent)

    assert first.figures == second.figures
    assert first.tables == second.tables
    assert {claim.name for claim in loaded.scenario.claims} <= set(first.figures)


@pytest.mark.parametrize("key", ["prompts", "responses"])
def test_speculation_below_1_is_refused_in_a_sentence(key):
    with pytest.raises(ConfigError, match=rf"arms.0.{key} is 0.5; it must be at least 1"):
        load(SCENARIOS / "rollpacker_tail.yaml", ["arms=[{name: a, prompts: 1, responses: 1}]".replace(f"{key}: 1", f"{key}: 0.5")])


@pytest.fixture
def size():
    return load(SCENARIOS / "rollpacker_tail.yaml").scenario.sizes["8k"]


def test_a_round_trains_whole_groups_and_ends_with_the_last(size):
    round_ = TailRound(0, "short", tuple(range(10)), 5, 8, 4, 0, "")

    done = RoundRun(size.engine, 2).run(round_, size.lengths, 1)

    assert len(set(done.trained)) == 8
    assert len(done.ended) == 32
    assert done.ended[-1][0] == done.seconds


def test_short_rounds_are_shorter_and_no_prompt_waits_at_a_periods_end(size):
    done = periods_of(TailRules(8, 4), 5, size.engine, 2, size.lengths, 1)

    assert [each.kind for each in done] == ["short"] * 4 + ["long"]
    assert fmean(each.seconds for each in done[:4]) < done[4].seconds
    assert sorted(prompt for each in done for prompt in each.trained) == list(range(40))


def test_freeing_half_of_the_engines_loses_no_response(size):
    round_ = TailRound(0, "long", tuple(range(8)), 4, 8, 4, 0, "")

    plain = RoundRun(size.engine, 4).run(round_, size.lengths, 1)
    freed = RoundRun(size.engine, 4, 0.25).run(round_, size.lengths, 1)

    assert sorted(tokens for _, tokens in freed.ended) == sorted(tokens for _, tokens in plain.ended)
    assert freed.freed_s is not None
    assert freed.seconds > plain.seconds


def test_what_the_freed_half_trained_is_not_left():
    done = RoundDone("long", 10.0, ((1.0, 1), (2.0, 1), (9.0, 2)), (0,), freed_s=2.0)

    assert left_s(done, 4.0, 0.0) == pytest.approx(2.0)  # two of one second each, at half of the speed; the third came too late
    assert left_s(done, 4.0, 7.0) == pytest.approx(4.0)
    assert left_s(done._replace(seconds=20.0), 4.0, 0.0) == 0.0
    assert left_s(done._replace(seconds=20.0), 4.0, 0.0, once=True) == pytest.approx(2.0)
    assert left_s(done._replace(freed_s=None), 4.0, 0.0) == 4.0


def test_no_stream_takes_the_fixed_part_of_training():
    loaded = load(SCENARIOS / "rollpacker_stream.yaml", SMALL["rollpacker_stream"])
    fixed = loaded.scenario.fixed
    none = fixed.model_copy(update={"load_s": 0.0, "sync_s": 0.0})

    gained = [
        loaded.kind.run(loaded.scenario.model_copy(update={"fixed": each}), silent).figures["stream_20_over_none"] for each in (none, fixed)
    ]

    assert fixed.seconds == pytest.approx(none.seconds + 5.0)
    assert 0 < none.seconds < 0.5  # gradients over NICs, and a pass over the states
    assert gained[0] < gained[1] < 1


def test_a_fixed_part_above_training_s_share_is_refused_in_a_sentence():
    loaded = load(SCENARIOS / "rollpacker_stream.yaml", [*SMALL["rollpacker_stream"], "fixed.load_s=1e4"])

    with pytest.raises(ValueError, match=r"the fixed part of training takes 10001\.\d s, and training's share is"):
        loaded.kind.run(loaded.scenario, silent)


def counted(kind: str = "short", launch: int = 3) -> RoundCount:
    return RoundCount(TailRound(0, "short" if kind == "short" else "long", (7, 8, 9), launch, 2, 2, 0, ""))


def test_nothing_of_an_aborted_response_is_trained() -> None:
    count = counted()

    assert [count.finished(7, "a"), count.finished(7, "b"), count.finished(7, "late")] == [False, True, False]
    assert not count.finished(9, "c")
    assert [count.finished(8, "d"), count.finished(8, "e")] == [False, True]
    assert count.over
    assert not count.finished(9, "f")

    assert count.complete == {7: ("a", "b"), 8: ("d", "e")}


def test_a_failed_trajectory_is_replaced_only_when_the_group_needs_it() -> None:
    count = counted()

    assert not count.failed(7)  # the speculated one takes its place
    assert count.failed(7)
    count.finished(7, "a")
    assert count.finished(7, "b")
    assert not count.failed(7)

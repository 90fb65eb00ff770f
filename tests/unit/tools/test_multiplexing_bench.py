"""tools/bench/multiplexing.py: prices and phases are those that it says."""

from itertools import pairwise

import pytest

from rubato.actors.cluster.board import HeldTime
from rubato.actors.engines.pace import deployment_of
from rubato.actors.engines.section import PaceSection
from rubato.planning.roofline import Roofline
from tools.bench.multiplexing import BESIDE, CASES, EVEN, PACE, ROWS, SCALE, WARM_START, _seen, simulated
from tools.bench.peers.phase_gantt import draw, durations, worst_deviation


def test_the_prices_are_those_of_rollmux():
    ratios = {name: case.price_ratio for name, case in CASES.items()}

    assert ratios == pytest.approx({"two": 2.0, "three": 1.975, "environments": 2.0}, abs=1e-3)


def test_a_batch_of_the_tokens_lasts_as_long_as_its_rollout_is_said_to():
    roofline = Roofline(deployment_of(PaceSection.model_validate(PACE)))
    for phases in {phases for case in CASES.values() for phases, _ in case.jobs}:
        lasts_s = SCALE * sum(roofline.step_s(ROWS, ROWS * tokens) for tokens in range(1, phases.tokens + 1))
        assert lasts_s == pytest.approx(phases.rollout_s, rel=0.01)


def test_steps_are_split_as_the_cases_say():
    assert EVEN.rollout_s / sum(EVEN) == pytest.approx(0.52)
    # The reward service takes a step's 256 responses in five calls, one after another.
    outside_s = BESIDE.reset_s + 5 * BESIDE.judge_s
    assert outside_s / (outside_s + BESIDE.rollout_s + BESIDE.train_s) == pytest.approx(0.3, abs=0.01)


def test_a_step_is_the_mean_of_those_measured():
    rows = [{"time/step": 2.0, "paced/outlasted_frac": 0.1}, {"time/step": 4.0, "time/wait_for_permit": 1.0}]

    seen = _seen(rows)

    assert (seen.step_s, seen.parts["time/wait_for_permit"], seen.outlasted) == (3.0, 0.5, 0.1)


@pytest.mark.parametrize("name", CASES)
def test_phases_of_the_simulation_last_what_is_set(name):
    switch_s = 2 * SCALE * Roofline(deployment_of(PaceSection.model_validate(PACE))).sleep_s(0)
    jobs = {f"job-{number}": each for number, each in enumerate(CASES[name].jobs)}
    rollouts = {(pool, job): phases.rollout_s + switch_s for job, (phases, pool) in jobs.items()}
    updates = {("training", job): phases.train_s * (1 + WARM_START) for job, (phases, _) in jobs.items()}

    held = simulated(CASES[name])

    assert durations(held) == pytest.approx(rollouts | updates)
    for times in held.values():
        assert all(one.ended_s <= other.began_s for one, other in pairwise(times))


def turns(*seconds: float) -> list[HeldTime]:
    """Of one job, each time that it held a pool."""
    return [HeldTime("job-0", 20.0 * at, 20.0 * at + took) for at, took in enumerate(seconds)]


def test_the_deviation_is_the_worst_phases_without_first_and_last_turns():
    simulated = {"rollout": turns(10, 10, 10), "training": turns(5, 5, 5)}
    live = {"rollout": turns(14, 9.5, 10.5, 2), "training": turns(1, 4.5, 4.5, 1)}

    assert worst_deviation(live, simulated) == pytest.approx(0.1)


def test_both_are_drawn_side_by_side(tmp_path):
    held = {"rollout": turns(10, 10, 10, 10), "training": turns(5, 5, 5, 5)}

    draw({"two": (held, held)}, tmp_path / "gantt.png")

    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")

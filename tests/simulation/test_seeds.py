"""The whole system under seeded faults: a few fixed seeds here; tools/simtest.py runs as many as one likes."""

import pytest

from rubato.sim.simtest import mutations, setup
from rubato.sim.simtest.faults import DEFAULT
from rubato.sim.simtest.run import Bench, faults_of, run
from rubato.sim.simtest.search import first_catch

pytestmark = pytest.mark.slow

SEEDS = (3, 7, 14)
"""Nothing special about them: they run on every check, fresh ones in CI."""

WITH_AGENTS = (0, 1)
"""Nothing special either, but that agents from outside play them."""


@pytest.fixture(scope="module")
def bench():
    held = Bench()
    yield held
    held.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_invariant_holds_under_the_faults_of_a_seed(bench, seed):
    outcome = run(bench, seed, faults_of(seed, DEFAULT))

    assert outcome.violation is None
    assert outcome.steps >= 20
    assert outcome.fired >= 3


@pytest.mark.parametrize("seed", WITH_AGENTS)
def test_every_invariant_holds_where_agents_from_outside_play(bench, seed):
    outcome = run(bench, seed, faults_of(seed, DEFAULT), keep=True)

    assert setup.draw(seed).sessions
    assert outcome.violation is None
    assert any("complete: 200" in line for line in outcome.lines)


def test_a_job_with_agents_replays_to_the_last_answer(bench):
    faults = faults_of(0, DEFAULT)
    first, second = run(bench, 0, faults), run(bench, 0, faults)

    assert (first.hash, first.events, first.virtual_s) == (second.hash, second.events, second.virtual_s)


def test_more_rounds_bring_more_faults(bench):
    once, thrice = faults_of(5, DEFAULT), faults_of(5, DEFAULT, 3)

    outcome = run(bench, 5, thrice)

    assert len(once) <= 7 < 9 <= len(thrice) <= 21
    assert outcome.violation is None
    assert outcome.fired > len(once)


def test_a_seed_replays_to_the_last_event(bench):
    faults = faults_of(2, DEFAULT)
    first, second = run(bench, 2, faults), run(bench, 2, faults)

    assert (first.hash, first.events, first.virtual_s) == (second.hash, second.events, second.virtual_s)


def test_other_faults_leave_another_trace(bench):
    faults = faults_of(2, DEFAULT)

    assert run(bench, 2, faults[:-1]).hash != run(bench, 2, faults).hash


@pytest.mark.parametrize("name", ["answer", "credit", "digest"])
def test_a_removed_safeguard_is_noticed(bench, name):
    """Those that nearly every seed misses; tools/simtest.py --mutations shows it of all."""
    outcome, _ = first_catch(bench, name, start=0, most=10, kinds=DEFAULT)

    assert outcome is not None
    assert outcome.violation is not None


def test_a_move_without_its_number_is_noticed(bench):
    outcome, _ = first_catch(bench, "move", start=0, most=40, kinds=mutations.MUTATIONS["move"].faults)

    assert outcome is not None
    assert outcome.violation is not None
    assert outcome.violation.invariant == "one engine per request"


@pytest.mark.parametrize(
    ("name", "invariant"),
    [("branch", "a history is gone on with"), ("under_way", "scored as trained"), ("session_name", "tokens as sampled")],
)
def test_a_removed_safeguard_of_sessions_is_noticed(bench, name, invariant):
    outcome, _ = first_catch(bench, name, start=0, most=60, kinds=mutations.MUTATIONS[name].faults or DEFAULT)

    assert outcome is not None
    assert outcome.violation is not None
    assert outcome.violation.invariant == invariant

"""`staleness.alpha: auto` under drawn faults: every invariant of a run holds, and no restart forgets the α that was reached."""

import json

import pytest

from rubato.sim.simtest import faults, setup
from rubato.sim.simtest.faults import DEFAULT
from rubato.sim.simtest.run import Bench, run

pytestmark = pytest.mark.slow

STEPS, MOST = 60, 3


@pytest.fixture(scope="module")
def bench():
    held = Bench()
    yield held
    held.close()


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_alpha_moves_stays_within_its_bounds_and_outlives_every_restart(bench, seed):
    job = setup.draw(seed, sessions=False)._replace(auto=True, tail=False, drops=False, alpha=MOST, steps=STEPS)

    outcome = run(bench, seed, faults.draw(seed, job.names, STEPS, DEFAULT, 1), setup=job)

    rows = [json.loads(line) for line in (bench.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    alphas = [row["staleness/alpha"] for row in rows]
    assert outcome.violation is None
    assert outcome.fired >= 3
    assert len(alphas) == STEPS
    assert alphas[0] == 1
    assert alphas[-1] in (2, 3)
    assert alphas == sorted(alphas), "a restart went back to where a job begins"

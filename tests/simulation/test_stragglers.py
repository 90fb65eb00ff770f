"""`staleness.stragglers: drop` under drawn faults: every invariant of a run holds, the bound on age first, and stragglers are dropped."""

import json
from collections import Counter

import pytest

from rubato.sim.simtest import faults, setup
from rubato.sim.simtest.faults import DEFAULT
from rubato.sim.simtest.run import Bench, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench():
    held = Bench()
    yield held
    held.close()


@pytest.mark.parametrize(("seed", "alpha"), [(14, 1), (21, 1), (24, 2)])
def test_stragglers_are_dropped_and_nothing_too_old_is_trained(bench, seed, alpha):
    job = setup.draw(seed, sessions=False)._replace(tail=False, drops=True, alpha=alpha)

    outcome = run(bench, seed, faults.draw(seed, job.names, job.steps, DEFAULT, 1), setup=job)

    assert outcome.violation is None
    assert outcome.fired >= 3
    lines = [json.loads(line) for line in (bench.folder / "run" / "samples.jsonl").read_text().splitlines()]
    ends = Counter((line["fate"], "staleness.stragglers=drop" in line["reason"]) for line in lines)
    print(f"seed {seed}: {dict(ends)}")
    assert ends["stale", True] > 0


def test_seeds_draw_both_rules():
    assert len({setup.draw(seed).drops for seed in range(20)}) == 2

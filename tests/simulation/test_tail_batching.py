"""`tail_batching` under drawn faults: every invariant of a run holds, and each prompt is trained once, whoever dies."""

import json
from collections import defaultdict

import pytest

from rubato.actors.samples.sample import TRAINED
from rubato.sim.simtest import faults, setup
from rubato.sim.simtest.faults import DEFAULT
from rubato.sim.simtest.run import Bench, run

pytestmark = pytest.mark.slow

SEEDS = (0, 3, 7, 128)
"""With α from 0 to 3, one to three groups in a batch, and turns of two."""


@pytest.fixture(scope="module")
def bench():
    held = Bench()
    yield held
    held.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_each_prompt_is_trained_once_and_what_was_put_off_comes_back(bench, seed):
    job = setup.draw(seed, sessions=False)._replace(tail=True)

    outcome = run(bench, seed, faults.draw(seed, job.names, job.steps, DEFAULT, 1), setup=job)

    assert outcome.violation is None
    assert outcome.fired >= 3
    lines = [json.loads(line) for line in (bench.folder / "run" / "samples.jsonl").read_text().splitlines()]
    groups = defaultdict(set)
    for line in lines:
        if line["fate"] in TRAINED:
            groups[line["row"]].add(line["group_id"])
    put_off = {line["row"] for line in lines if "waits for a long round" in line["reason"]}
    given_up = {line["row"] for line in lines if line["fate"] in ("group_too_small", "poisoned", "filtered")}
    assert all(len(names) == 1 for names in groups.values())
    assert len(groups) == job.steps * job.batch_groups
    assert set(range(max(groups))) <= set(groups) | given_up
    assert put_off
    assert put_off <= set(groups) | given_up

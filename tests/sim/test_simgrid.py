"""SimGrid, which shares no code with ours, ends the same flows at the same times."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rubato.sim.net.maxmin import Paths
from rubato.sim.net.network import Flows, Network, complete

ORACLE = Path(__file__).with_name("simgrid_oracle.py")
PYTHON = "/usr/bin/python3"
NUM_SETS = 200


@pytest.fixture(scope="module")
def simgrid():
    """The system's Python, where SimGrid is installed for it."""
    found = Path(PYTHON).exists() and not subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True).returncode
    if not found:
        pytest.skip("SimGrid is not installed: apt-get install python3-simgrid")
    return PYTHON


def random_set(seed):
    rng = np.random.default_rng(seed)
    num_flows, num_links = int(rng.integers(2, 13)), int(rng.integers(2, 9))
    hops = [rng.choice(num_links, size=rng.integers(1, min(4, num_links) + 1), replace=False) for _ in range(num_flows)]
    return {
        "capacity": rng.uniform(1e6, 9e6, num_links).tolist(),
        "hops": [h.tolist() for h in hops],
        "sizes": rng.integers(10**6, 10**8, num_flows).tolist(),
    }


def ours(one):
    start = np.concatenate([[0], np.cumsum([len(h) for h in one["hops"]])])
    paths = Paths(start, np.concatenate(one["hops"]).astype(int))
    number = len(one["sizes"])
    network = Network([], np.array(one["capacity"]), lambda source, target: paths)
    wanted = Flows(np.zeros(number, int), np.ones(number, int), np.array(one["sizes"], float), np.ones(number))
    return complete(network, wanted).finish_s


@pytest.mark.slow
def test_flows_end_when_simgrid_says(simgrid):
    sets = [random_set(seed) for seed in range(NUM_SETS)]

    judged = subprocess.run([simgrid, ORACLE], input=json.dumps(sets), capture_output=True, text=True, check=True)

    for seed, (one, theirs) in enumerate(zip(sets, json.loads(judged.stdout), strict=True)):
        np.testing.assert_allclose(ours(one), theirs, rtol=1e-6, err_msg=f"flow set {seed}")

"""Bytes feel the circuits: racks as network namespaces, whose links the emulated switch makes as fast as it has circuits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.rack_bed import CIRCUIT_MBPS, SIZE, TRICKLE_MBPS
from tests.jobs import clean_environment

ROOT = Path(__file__).parents[2]
FACTOR = 5.0
"""By rate it is 20: this tells a circuit from a trickle on any machine."""
QUEUED = 1 << 20
"""More than burst and queue of a link together: what may still pass after its circuit is gone."""
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all")
POWERLESS = ("setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all")
"""Root without root's rights: as little to the kernel as another user, but it may read its own files. To be root in a user namespace, root
needs that one."""


@pytest.fixture(params=["as we are", "without rights"])
def play(request):
    words = ()
    if request.param == "without rights":
        if os.geteuid() != 0:
            pytest.skip("the tests have no rights themselves")
        words = powerless()

    def run(name):
        done = subprocess.run(
            [*words, sys.executable, Path(__file__).with_name("rack_bed.py"), name],
            env={**clean_environment(), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 77:
            pytest.skip(done.stdout.strip())
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def powerless():
    """What to put before a command so that it may do nothing that other users may not: nobody can't look for Python in root's home."""
    tried = subprocess.run([*NOBODY, "sh", "-c", '"$0" -c ""', sys.executable], capture_output=True, check=False)
    return POWERLESS if tried.returncode else NOBODY


def test_a_pull_runs_at_the_circuits_rate_and_a_wrong_plan_leaves_it_the_trickle(play):
    found = play("pulls")

    assert found["lit_bytes"] > SIZE
    assert found["dark_bytes"] > SIZE
    assert SIZE * 8 / found["lit_s"] <= CIRCUIT_MBPS * 1e6 * 1.2
    assert SIZE * 8 / found["dark_s"] <= TRICKLE_MBPS * 1e6 * 1.2
    assert found["dark_s"] > FACTOR * found["lit_s"]


def test_nothing_beyond_the_trickle_passes_a_circuit_that_went_dark_under_way(play):
    found = play("darkens")

    assert found["passed"] <= TRICKLE_MBPS * 1e6 / 8 * found["dark_s"] + QUEUED
    assert found["all"] > SIZE
    assert found["stray"] < SIZE // 16

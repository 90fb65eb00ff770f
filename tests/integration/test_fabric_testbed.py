"""Bytes feel the circuits: racks as network namespaces, whose links the emulated switch makes as fast as it has circuits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.pod_bed import NUM, by_pods
from tests.integration.rack_bed import CIRCUIT_MBPS, SIZE, TRICKLE_MBPS
from tests.jobs import clean_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FACTOR = 5.0
"""By rate it is 20: this tells a circuit from a trickle on any machine."""
QUEUED = 1 << 20
"""More than burst and queue of a link together: what may still pass after its circuit is gone."""
QUIET = 1 << 20
"""More than control has for another rack meanwhile, and less than any weights or caches."""
HEADERS = 1.1
"""Times as much passes a link as what it carries: Ethernet, IP and TCP are 5 % of full frames, acknowledgements and what is sent again the rest."""
ROUNDED = 8
"""Requests whose caches lack their last token, which is not computed yet when they are announced."""
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all")
POWERLESS = ("setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all")
"""Root without root's rights: as little to the kernel as another user, but it may read its own files. To be root in a user namespace, root
needs that one."""


@pytest.fixture(params=["as we are", pytest.param("without rights", marks=pytest.mark.nightly)])
def play(request):
    words = ()
    if request.param == "without rights":
        if os.geteuid() != 0:
            pytest.skip("the tests have no rights themselves")
        words = powerless()

    def run(name, bed="rack_bed.py"):
        done = subprocess.run(
            [*words, sys.executable, Path(__file__).with_name(bed), name],
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


def test_weights_and_caches_cross_the_circuits_that_are_planned_by_pods_for_them(play):
    found = play("moves", "pod_bed.py")

    weights, moves = found["weights"], found["moves"]
    assert set(weights["announced"].values()) == {weights["weights_bytes"]}
    assert weights["lit"] == by_pods(weights["announced"])
    assert crossed(weights["sent"]) == weights["announced"].keys()
    assert all(size <= weights["sent"][pair] <= HEADERS * size + QUIET for pair, size in weights["announced"].items())

    asked = moves["asked"][0]
    announced = {f"{a} {b}": size for a, b, size in asked["traffic"]}
    assert asked["promised"], asked["why"]
    assert asked["lit"]
    assert moves["circuits"] >= 1
    assert moves["lit"] == by_pods(announced) != moves["lit_before"]
    assert {"rack-1 rack-0", "rack-1 rack-2", "rack-1 rack-3"} == announced.keys() <= moves["lit"].keys()
    assert all(asked["passed"][pair] > size - ROUNDED * found["kv_bytes_per_token"] for pair, size in announced.items())
    assert all(moves["caches"][pair] > size - ROUNDED * found["kv_bytes_per_token"] for pair, size in announced.items())
    check_moves(moves)


@pytest.mark.parametrize("play", ["as we are"], indirect=True)
def test_caches_cross_without_light_where_the_circuits_that_were_promised_for_them_fail(play):
    found = play("stalled", "pod_bed.py")

    moves = found["moves"]
    asked = moves["asked"][0]
    dark = {f"{a} {b}" for a, b, _ in asked["traffic"]} - moves["lit"].keys() - moves["lit_after"].keys()
    assert asked["promised"], asked["why"]
    assert not asked["lit"]
    assert moves["electrical"] >= 1
    assert moves["circuits"] == 0
    assert "rack-1 rack-2" in dark
    assert all(moves["caches"][pair] > SIZE for pair in dark)
    check_moves(moves)


def check_moves(moves):
    """Every request has its whole answer, and between racks went what caches they took along, and nothing else of that size."""
    assert moves["whole"] == NUM
    assert moves["moves"] >= len(moves["caches"])
    assert crossed(moves["sent"]) == moves["caches"].keys()
    assert all(size <= moves["sent"][pair] <= HEADERS * size + QUIET for pair, size in moves["caches"].items())


def crossed(sent):
    return {pair for pair, size in sent.items() if size > QUIET}

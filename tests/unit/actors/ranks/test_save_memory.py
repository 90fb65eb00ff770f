"""A save, and a version that is published, take of a rank's host memory what its shares need."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_saves_take_no_more_than_a_fifth_beyond_one_ranks_shares(tmp_path):
    measure = [sys.executable, "-m", "tests.unit.actors.ranks.save_memory", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": str(2**20)}

    done = subprocess.run(measure, env=environment, stdout=subprocess.PIPE, check=True, timeout=180)

    for saved, shares, published, rows in json.loads(done.stdout):
        assert shares > 50 * 2**20
        assert 0.8 * shares < saved <= 1.2 * shares
        assert rows > 15 * 2**20
        assert published <= 0.2 * rows  # beyond the memory of the blob

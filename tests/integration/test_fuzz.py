"""Twenty thousand mutated frames against a live endpoint, by the tool that sends a million by hand."""

import json
import os
from pathlib import Path

import pytest

from tests.jobs import python

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "fuzz.py"
SEED = os.environ.get("RUBATO_SEED", "1")


def test_an_endpoint_outlives_twenty_thousand_mutated_frames(tmp_path):
    ended = python(TOOL, "--frames", 20_000, "--seed", SEED, "--json", "told.json", cwd=tmp_path)

    assert ended.code == 0, ended.out + ended.err
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["answered"] == told["asked"] >= 100
    assert told["refused"]["frame"] > 1000
    assert told["refused"]["handshake"] > 10
    assert told["raised"] == 0

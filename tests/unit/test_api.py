"""What users' programs may rely on changes only together with its record."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_public_names_are_those_on_record():
    lines = runpy.run_path(str(ROOT / "tools" / "api.py"))["lines"]

    now, recorded = sorted(lines()), (ROOT / "docs" / "api.txt").read_text().splitlines()

    missing, new = sorted(set(recorded) - set(now)), sorted(set(now) - set(recorded))
    assert (missing, new) == ([], []), "a change of what users rely on: record it with tools/api.py > docs/api.txt"

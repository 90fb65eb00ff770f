"""Simulate a scenario: `python tools/rlsim.py configs/sim/rfabric_cost.yaml --out runs/cost`. See docs/rlsim.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rubato.runtime.cli import guarded
from rubato.sim.rlsim import main

if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))

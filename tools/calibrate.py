"""Fit the simulator to a live run: `python tools/calibrate.py RUN_DIR --out FILE.yaml`. See docs/rlsim.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rubato.runtime.cli import guarded
from rubato.sim.calibration.command import main

if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))

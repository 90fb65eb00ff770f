"""Start, resume, extend, drain and stop runs: `python tools/launch.py configs/quickstart.yaml`."""

import sys

from rubato.runtime.cli import guarded
from rubato.runtime.launch.commands import main

if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))

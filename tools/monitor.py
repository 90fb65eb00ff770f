"""Watch a run: `python tools/monitor.py RUN [--once | --json | --why]`."""

import sys

from rubato.runtime.cli import guarded
from rubato.runtime.monitor.command import main

if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))

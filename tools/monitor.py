"""Watch a run: `python tools/monitor.py RUN [--once | --json | --why]`."""

import sys

from runtime.monitor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Start, resume, extend, drain and stop runs: `python tools/launch.py configs/quickstart.yaml`."""

import sys

from runtime.launch.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

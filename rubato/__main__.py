"""`python -m rubato …`, as the command `rubato`."""

import sys

from rubato.runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())

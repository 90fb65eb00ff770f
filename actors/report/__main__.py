"""`python -m rubato.actors.report RUN_DIR`, which `report.finish` names."""

import sys

from rubato.actors.report.summary import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

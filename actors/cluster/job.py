"""`python -m rubato.actors.cluster.job FOLDER [override …]`: one life of a job of a cluster, launched or gone on with.

It outlives the scheduler that started it, and says in a file how it ended, for whichever scheduler is there then. The lock that it
inherits is held until it is gone; what it started dies with it.
"""

import os
import sys
from pathlib import Path

from rubato.runtime.cli import main
from rubato.runtime.launch.folder import is_held


def files(folder: Path) -> "JobFiles":
    """Those of the job whose run folder is CLUSTER/jobs/NAME."""
    return JobFiles(folder.parent.parent / "submitted" / folder.name)


class JobFiles:
    """What a cluster keeps of a job beside its run folder."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self.name = stem.name

    @property
    def config(self) -> Path:
        """As it was submitted, 0600."""
        return self._stem.with_name(f"{self.name}.yaml")

    @property
    def lock(self) -> Path:
        """Held while the job's launcher lives; has its process id."""
        return self._stem.with_name(f"{self.name}.lock")

    @property
    def ended(self) -> Path:
        """Exit code of its last life; not there where it was killed."""
        return self._stem.with_name(f"{self.name}.ended")

    @property
    def output(self) -> Path:
        """What it printed."""
        return self._stem.with_name(f"{self.name}.log")

    @property
    def errors(self) -> Path:
        """Sentences of its last life."""
        return self._stem.with_name(f"{self.name}.stderr")


def run(folder: Path, overrides: list[str]) -> int:
    """Its exit code, which is on record then."""
    kept = files(folder)
    kept.lock.write_text(str(os.getpid()))  # also where its starter was killed before it could
    resumed = (folder / "config.yaml").exists() and not is_held(folder)
    what = ["--resume", str(folder)] if resumed else [str(kept.config), "--run-dir", str(folder)]
    code = int(main(["launch", *what, *overrides]))
    partial = kept.ended.with_suffix(".partial")
    partial.write_text(str(code))
    partial.replace(kept.ended)
    return code


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))

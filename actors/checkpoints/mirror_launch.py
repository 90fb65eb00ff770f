"""The launcher's part of a mirror: what is wrong with it shows before anything starts, and a run whose disk is gone comes back from it.

Both ask in a process of their own, which may be ended however long the other side is silent.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.mirror import KEY, Looked, check_url, lineage_of, shown
from rubato.runtime.errors import ConfigError
from rubato.runtime.launch.children import die_with_parent

LOOK_S = 60.0


def preflight(config: Any, folder: Path) -> None:
    """Look whether the mirror can be written, and is that of the run in `folder`. Raises ConfigError."""
    url = config.checkpoint.mirror
    check_url(url)
    path = Path(url.removeprefix("file://"))
    if path.is_absolute() and path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{KEY}={shown(url)} lies in the run's own folder, and goes with its disk. Name another place for the copies.")
    found = _asked(url, "look", folder, LOOK_S)
    here = folder / "checkpoints"
    if found.step < 0 or found.lineage == lineage_of(here):
        return
    holds = f"{KEY}={shown(url)} holds checkpoints of another run, up to step {found.step}"
    if checkpoints.last(here) is None:
        raise ConfigError(f"{holds}. Go on with that one with: rubato launch CONFIG {KEY}=… --resume, or name another place.")
    raise ConfigError(f"{holds}. Name another place for the copies of {folder}.")


def bring_back(config: Any, folder: Path) -> str:
    """Bring the newest whole checkpoint into `folder`; a sentence on what the run goes on from. Raises ConfigError."""
    url = config.checkpoint.mirror
    check_url(url)
    found = _asked(url, "bring", folder, None)
    if found.seed not in (None, config.run.seed):
        why = f"run.seed is {config.run.seed}, and the run whose checkpoints {KEY}={shown(url)} holds has {found.seed}"
        raise ConfigError(f"{why}: groups under way would mix two tasks. Give run.seed={found.seed}, or start another run elsewhere.")
    passed = "".join(f"{sentence}. " for sentence in found.passed_over)
    return (
        f"{passed}going on after step {found.step} with the checkpoint from {shown(url)}; samples that were under way are lost, and the steps "
        "after it are trained again"
    )


def _asked(url: str, verb: str, folder: Path, limit_s: float | None) -> Looked:
    command = [sys.executable, "-m", "rubato.actors.checkpoints.mirror", verb, str(folder)]
    try:
        done = subprocess.run(
            command, input=url.encode(), capture_output=True, timeout=limit_s, check=False, preexec_fn=die_with_parent
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{KEY}={shown(url)} can't be reached: no answer within {limit_s:.0f} s") from None
    try:
        found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Looked)
    except (IndexError, msgspec.MsgspecError):
        raise ConfigError(f"{KEY}={shown(url)} could not be looked at: the process that did ended with {done.returncode}") from None
    if found.error:
        raise ConfigError(found.error if found.error.endswith(".") else f"{found.error}.")
    return found

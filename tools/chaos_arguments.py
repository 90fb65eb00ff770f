"""What tools/chaos.py is asked to do, checked before anything is started."""

import argparse
import math
import signal
from pathlib import Path

from rubato.runtime.config import Config
from rubato.runtime.errors import RubatoError

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "restart": signal.SIGTERM}


def parsed(argv: list[str]) -> argparse.Namespace:
    """Raises RubatoError for what can't be done; `--json` is there to be written then."""
    parser = argparse.ArgumentParser("chaos", description="Kill, stop and restart processes of a run, then check it.")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="change single keys of the config")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the chaos lasts; then the run ends in peace")
    parser.add_argument("--rest", type=int, metavar="STEPS", help="steps after the chaos, where the run has more left")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", default="all", metavar="ROLES", help="roles, `redis`, `launcher`, `warm_parent`, `worker`, by commas")
    parser.add_argument("--kinds", default="kill,stop,restart", help="what is done to them, by commas")
    parser.add_argument("--pause", nargs=2, type=float, default=(2.0, 10.0), metavar="S", help="between two events")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--run-dir", type=Path, help="keep the run there; what is in it is overwritten")
    given = parser.parse_intermixed_args(argv)
    given.kinds = given.kinds.split(",")
    _check(given)
    return given


def _check(given: argparse.Namespace) -> None:
    if unknown := [kind for kind in given.kinds if kind not in KINDS]:
        raise RubatoError(f"--kinds: {unknown[0]!r} is no kind. Kinds are {', '.join(KINDS)}.")
    if not (math.isfinite(given.seconds) and given.seconds > 0):
        raise RubatoError(f"--seconds is {given.seconds:g}; it must be a finite number above 0.")
    if given.rest is not None and given.rest < 0:
        raise RubatoError(f"--rest is {given.rest}; it must be a whole number at least 0.")
    least, most = given.pause
    if not (math.isfinite(most) and 0 <= least <= most):
        raise RubatoError(f"--pause is {least:g} {most:g}; it must be two finite numbers, the smaller first.")
    if given.json is not None:
        try:
            given.json.open("a").close()
        except OSError as error:
            raise RubatoError(f"--json: {given.json} can't be written: {error.strerror}.") from error


def chosen(kill: str, config: Config) -> list[str]:
    """The roles to hit. Raises RubatoError for one that the job does not have."""
    known = [*(role for role, spec in config.actors.items() if spec.count), "redis", "launcher", "warm_parent", "worker"]
    if config.state.url:
        known.remove("redis")
    roles = known if kill == "all" else kill.split(",")
    if unknown := [role for role in roles if role not in known]:
        raise RubatoError(f"--kill: {unknown[0]!r} is not a role of this job. Its roles are {', '.join(known)}, or all.")
    return roles

"""`rubato launch`, `add`, `drain` and `stop`, and the same under tools/launch.py."""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.clock import wall_s
from runtime.errors import ExitCode, LaunchError, RubatoError, first_cause

if TYPE_CHECKING:
    from bus.message import Request
    from runtime.config import Config


def main(argv: Sequence[str]) -> int:
    """Run one command; RubatoError is one sentence on stderr."""
    try:
        verb = argv[0] if argv else ""
        if verb in VERBS:
            return VERBS[verb](list(argv[1:]))
        return launch(list(argv))
    except RubatoError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return ExitCode.REFUSED


def launch(argv: list[str]) -> int:
    """Start a run, or go on with one."""
    parser = argparse.ArgumentParser("rubato launch", description="Run the job that a config describes.")
    parser.add_argument("config", type=Path, help="a YAML file, e.g. configs/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="change single keys of the config"
    )
    parser.add_argument("--run-dir", type=_run_dir, help="folder of the run (default: runs/NAME-DATE)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --run-dir, under its own config.yaml and the overrides given here",
    )
    parser.add_argument(
        "--update-code",
        action="store_true",
        help="with --resume: take your own files as they are now, not as the run keeps them",
    )
    parser.add_argument("--force", action="store_true", help="replace the run in the folder; other files there stay")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    given = parser.parse_intermixed_args(argv)
    config, folder = _chosen(given)
    if given.dry_run:
        print(config.dump(), end="")  # noqa: T201
        return ExitCode.DONE
    import uvloop

    from runtime.launch.launcher import Launcher

    async def run() -> int:
        started = Launcher(config, folder, resume=given.resume, force=given.force, update_code=given.update_code)
        return await started.run()

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_flat(run()))


def _chosen(given: argparse.Namespace) -> "tuple[Config, Path]":
    """The config to run and the run's folder; says so where a resumed run's own config differs from the one named."""
    from runtime.config import load
    from runtime.config.source import differing, parse, read
    from runtime.kept_code import FOLDER as CODE
    from runtime.kept_code import absolute

    config, folder = None, given.run_dir
    if given.update_code and not given.resume:
        raise LaunchError("--update-code goes with --resume: a new run takes your files as they are.")
    if folder is None:
        config = load(given.config, given.overrides)
        folder = Path(config.run.dir) if config.run.dir else _fresh_folder(config.run.name)
    own = folder / "config.yaml"
    if not (given.resume and os.path.exists(own)):  # unlike Path.exists, it takes a name too long for an answer
        return config or load(given.config, given.overrides), folder
    if not given.update_code:
        _use_kept(folder.resolve() / CODE)
    config = load(own, given.overrides)
    keys = differing(absolute(read(given.config, given.overrides).tree), parse(config.dump(), str(own)).tree)
    if keys:
        told = f"{given.config} differs from {own} in {', '.join(keys)}: the run goes on under its own config."
        print(f"{told} Give what shall change as key.sub=value.", file=sys.stderr)  # noqa: T201
    return config, folder


def _use_kept(code: Path) -> None:
    """Go on under the user's files as the run keeps them; says so where they have changed since."""
    from runtime.kept_code import KeptCode, use

    changed = KeptCode(code).changed()
    if changed:
        told = ", ".join(map(str, changed[:3])) + (", …" if len(changed) > 3 else "")
        verb = "have" if len(changed) > 1 else "has"
        print(  # noqa: T201
            f"{told} {verb} changed since the run began: it goes on under the code kept in {code}. "
            "Add --update-code to take the changed files.",
            file=sys.stderr,
        )
    use(code)


def _run_dir(text: str) -> Path:
    if not text:
        raise LaunchError("--run-dir is empty. Name a folder, or leave it out for one of its own.")
    return Path(text)


def add(argv: list[str]) -> int:
    """Start more actors of a role in a running job, on its first host or on this one."""
    parser = argparse.ArgumentParser("rubato add", description="Start more actors of a role in a running job.")
    parser.add_argument("role")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="with --join: what differs on this host"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, help="folder of a run on this host")
    where.add_argument(
        "--join", metavar="TOKEN", help="of rubato keys join-token on the run's first host; - reads it from stdin"
    )
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("--host", default="", help="with --join: this host's address as the others reach it")
    parser.add_argument("--run-dir", type=_run_dir, help="with --join: folder for this host's part of the run")
    given = parser.parse_intermixed_args(argv)
    if given.join is not None:
        return _join(given)
    if alone := [*given.overrides, *(["--host"] if given.host else []), *(["--run-dir"] if given.run_dir else [])]:
        raise LaunchError(f"{alone[0]} goes with --join alone: on the run's own host its config holds for all actors.")
    from runtime.messages import AddActors

    return _ask(given.run, AddActors(given.role, given.n), "added")


def _join(given: argparse.Namespace) -> int:
    """Stay in the foreground as this host's node agent until the job ends or Ctrl-C."""
    import uvloop

    from runtime.launch.join import Joiner
    from runtime.launch.token import read_token

    token = read_token(sys.stdin.readline() if given.join == "-" else given.join)
    folder = given.run_dir or _fresh_folder(token.run_id)

    async def run() -> int:
        return await Joiner(token, given.role, given.n, folder, given.host, tuple(given.overrides)).run()

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_flat(run()))


def drain(argv: list[str]) -> int:
    """Drain actors of a running job; nothing they hold is lost."""
    parser = argparse.ArgumentParser("rubato drain", description="Drain actors of a running job.")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--run", type=Path, required=True)
    given = parser.parse_args(argv)
    from runtime.messages import DrainActors

    return _ask(given.run, DrainActors(tuple(given.names)), "drained")


def stop(argv: list[str]) -> int:
    """Drain and save a running job."""
    parser = argparse.ArgumentParser("rubato stop", description="Drain and save a running job; --now stops it at once.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--now", action="store_true")
    given = parser.parse_args(argv)
    from runtime.messages import StopJob

    return _ask(given.run, StopJob(given.now), "stopping")


VERBS = {"add": add, "drain": drain, "stop": stop}


def _ask(folder: Path, request: "Request[Any]", done: str) -> int:
    from runtime.guest import ask_node
    from runtime.messages import Added

    async def ask() -> int:
        reply = await ask_node(folder, request)
        print(f"{done}: {', '.join(reply.names)}" if isinstance(reply, Added) else done)  # noqa: T201
        return ExitCode.DONE

    return asyncio.run(_flat(ask()))


async def _flat(work: Awaitable[int]) -> int:
    """Await `work`; a RubatoError buried in exception groups is raised as itself."""
    try:
        return await work
    except ExceptionGroup as group:
        error = first_cause(group)
        if isinstance(error, RubatoError):
            raise error from None
        raise
    except asyncio.CancelledError:  # a signal before there was anything to drain
        return ExitCode.INTERRUPTED


def _fresh_folder(name: str) -> Path:
    from datetime import datetime

    stamp = datetime.fromtimestamp(wall_s()).strftime("%m%d-%H%M%S")  # noqa: DTZ006 - a folder name in the user's own time
    return Path("runs") / f"{name}-{stamp}"

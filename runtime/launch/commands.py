"""`rubato launch`, `add`, `drain` and `stop`, and the same under tools/launch.py."""

import argparse
import asyncio
import importlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rubato.bus.message import Request
from rubato.runtime.config import Config
from rubato.runtime.config.compose import bring_back, keeps_copies, load, pinned, problems
from rubato.runtime.config.differences import differing
from rubato.runtime.config.overrides import read
from rubato.runtime.config.source import parse
from rubato.runtime.errors import ConfigError, ExitCode, LaunchError, RubatoError, first_cause
from rubato.runtime.guest import ask_node
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.importer import KeptCode, use
from rubato.runtime.launch.agent_messages import AddActors, Added, DrainActors, StopJob
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.children import until_gone
from rubato.runtime.launch.folder import RunFolder
from rubato.runtime.launch.token import read_token
from rubato.runtime.observe.trace import wall_s
from rubato.runtime.places import HostPlaces
from rubato.runtime.registry import NODE

FIXED = {"run.seed": "{key} is {old} in this run and can't become {new}: groups under way would mix two tasks. Start another run for it."}
"""Keys that a run keeps for its life, and why."""

LoadBy = Callable[[Path, Sequence[str]], Config]
"""Makes a job of a file and of changes of single keys."""


def main(argv: Sequence[str]) -> int:
    """Run one command; RubatoError is the caller's to print."""
    command = VERBS.get(argv[0]) if argv else None
    return command(list(argv[1:])) if command else launch(list(argv))


def launch(argv: list[str], name: str = "launch", load_by: LoadBy = load) -> int:
    """Start a run, or go on with one. `name` is the command's, which makes the job of a new run by `load_by`."""
    parser = argparse.ArgumentParser(
        f"rubato {name}",
        usage="%(prog)s CONFIG [key.sub=value …] [options]\n       %(prog)s --resume RUN [key.sub=value …] [options]",
        description="Run the job that a config describes, or go on with a run.",
    )
    help_words = "a YAML file, e.g. configs/quickstart.yaml; with --resume the run's folder; changes of single keys"
    parser.add_argument("words", nargs="*", default=[], metavar="CONFIG, RUN, key.sub=value", help=help_words)
    parser.add_argument("--run-dir", type=_run_dir, help="folder of the run (default: runs/NAME-DATE)")
    for flag, text in {
        "--resume": "go on with the run in the folder named, under its own config.yaml and the changes given here",
        "--update-code": "with --resume: take your own files as they are now, not as the run keeps them",
        "--force": "replace the run in the folder; other files there stay",
        "--dry-run": "print the resolved config, say all that is wrong with it or missing, and stop",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    given = parser.parse_intermixed_args(argv)
    config, folder, told = _chosen(given, load_by)
    comes_back = given.resume and not os.path.exists(folder / "config.yaml") and keeps_copies(config)
    if given.dry_run:
        return _dry_run(config, folder, told, resume=given.resume and not comes_back, force=given.force, brought=comes_back)
    from rubato.runtime.launch.launcher import Launcher

    with _unless_used(folder, made=given.run_dir is None and not config.run.dir and (comes_back or not given.resume)):
        if comes_back:
            told += RunFolder(folder.resolve()).bring(partial(bring_back, config), config.dump(), config.model_path)
        config, said = pinned(config, folder.resolve())

        async def run() -> int:
            flags = {"resume": given.resume, "force": given.force, "update_code": given.update_code}
            return await Launcher(config, folder, **flags, told=[*told, *said]).run()

        return _run(run())


def _dry_run(config: Config, folder: Path, told: list[str], *, resume: bool, force: bool, brought: bool) -> int:
    """Print the resolved config, and everything that a launch would be refused for."""
    from rubato.runtime.launch.placer import placer_problems
    from rubato.runtime.store import fitness

    unnamed: list[str] = []
    try:
        config, said = pinned(config, folder.resolve())
        told = [*told, *said]
    except ConfigError as error:
        unnamed = str(error).splitlines()
    print(config.dump(), end="")  # noqa: T201
    held = RunFolder(folder.resolve())
    wrong = [
        *held.problems(resume=resume, force=force, model=config.model_path),
        *HostPlaces.here(config).problems(),
        *placer_problems(config),
        *fitness.problems(config.state),
        *unnamed,
        *problems(config, held.path, replaced=force, pinned=not unnamed, brought=brought),
    ]
    if config.report.fit and not wrong:
        lines, wrong = importlib.import_module(config.report.fit).told(config, held.path)
        print("".join(f"# {line}\n" for line in lines), end="")  # noqa: T201
    for sentence in (*told, *wrong):
        print(sentence, file=sys.stderr)  # noqa: T201
    return ExitCode.REFUSED if wrong else ExitCode.DONE


def _is_path(word: str, *, first: bool) -> bool:
    """Whether a word of the command line names a file or a folder. Behind the first, what is not there and has a key's form is a key."""
    if os.path.exists(word):
        return True
    is_key = "." in word and word.replace(".", "").isidentifier() and Path(word).suffix not in (".yaml", ".yml")
    return "=" not in word and (first or not is_key)


def _places(given: argparse.Namespace) -> tuple[Path | None, Path | None, list[str]]:
    """The config file and the run folder that were named, and the changes of keys."""
    words, folder = list(given.words), given.run_dir
    named: list[Path] = []
    while words and _is_path(words[0], first=not named):
        named.append(Path(words.pop(0)))
    if given.resume and folder is None:
        runs = [path for path in named if not os.path.isfile(path)]
        if not runs and len(named) > 1:
            runs = [path for path in named if path.name == "config.yaml"]
        if runs:
            named.remove(runs[-1])
            folder = runs[-1].parent if os.path.isfile(runs[-1]) else runs[-1]
    if len(named) > 1:
        both = " and ".join(map(str, named))
        raise LaunchError(
            f"launch takes one config, and {both} are named. A run's folder is named by --run-dir, and to go on with it "
            "by --resume RUN; changes of keys are written key.sub=value."
        )
    return next(iter(named), None), folder, words


def _chosen(given: argparse.Namespace, load_by: LoadBy) -> tuple[Config, Path, list[str]]:
    """The config to run, the run's folder, and sentences on what a resumed run does not follow, or follows from here on."""
    file, folder, overrides = _places(given)
    if given.update_code and not given.resume:
        raise LaunchError("--update-code goes with --resume: a new run takes your files as they are.")
    if given.resume:
        if folder is None and file is not None:
            folder = file.parent if file.name == "config.yaml" else Path(load(file, overrides).run.dir)
        if folder in (None, Path()) and file is not None and keeps_copies(load(file, overrides)):
            folder = None  # a new one
        elif folder in (None, Path()):
            raise LaunchError("--resume: which run? Name its folder: rubato launch --resume runs/NAME-DATE")
        elif os.path.exists(folder / "config.yaml"):  # unlike Path.exists, it takes a name too long for an answer
            return _resumed(folder, file, overrides, update_code=given.update_code)
    if file is None:
        if given.resume:
            why = "holds no run to resume" if os.path.exists(folder or "") else "does not exist: there is no run to resume"
            raise LaunchError(f"{folder} {why}. A run is started with: rubato launch CONFIG")
        raise LaunchError("launch needs a config, e.g. rubato launch configs/quickstart.yaml, or --resume and a run's folder.")
    config = load_by(file, overrides)
    if folder is None:
        fresh = Path(config.run.dir or f"runs/{config.run.name}-DATE")
        folder = fresh if config.run.dir or given.dry_run else _fresh_folder(config.run.name)
    return config, folder, [*config.notes]


def _resumed(folder: Path, file: Path | None, overrides: list[str], *, update_code: bool) -> tuple[Config, Path, list[str]]:
    """The run's own config with `overrides`; what differs from before, or in `file`, is told. Raises ConfigError for what can't change."""
    own = folder / "config.yaml"
    told = [] if update_code else _use_kept(folder.resolve() / CODE)
    config = load(own, overrides, resumed=True)
    told += config.notes
    tree = parse(config.dump(), str(own)).tree
    changed = [each for each in differing(read(own).tree, tree) if each.old is not None]
    if fixed := [each for each in changed if each.key in FIXED]:
        raise ConfigError(fixed[0].sentence(FIXED[fixed[0].key]))
    if changed:
        told.append("changed from here on: " + "; ".join(each.sentence("{key} was {old}, is {new}") for each in changed))
    if file is not None and file.resolve() != own.resolve():
        keys = differing(tree, parse(load(file, overrides).dump(), str(file)).tree)
        if keys:
            said = "; ".join(each.sentence("{key} is {old}, not {new}") for each in keys)
            told.append(
                f"{file} differs from the run's own config, under which it goes on: {said}. Give what shall change as key.sub=value."
            )
    return config, folder, told


def _use_kept(code: Path) -> list[str]:
    """Go on under the user's files as the run keeps them; a sentence where they have changed since."""
    changed = KeptCode(code).changed()
    use(code)
    if not changed:
        return []
    files = ", ".join(map(str, changed[:3])) + (", …" if len(changed) > 3 else "")
    return [
        f"{files} {'have' if len(changed) > 1 else 'has'} changed since the run began: it goes on under the code kept "
        f"in {code}. Add --update-code to take the changed files."
    ]


def _run_dir(text: str) -> Path:
    if not text:
        raise LaunchError("--run-dir is empty. Name a folder, or leave it out for one of its own.")
    return Path(text)


def add(argv: list[str]) -> int:
    """Start more actors of a role in a running job, on the folder's host, on `--host`, or on this one, which joins."""
    parser = argparse.ArgumentParser("rubato add", description="Start more actors of a role in a running job.")
    help_words = "the role; with --join: what differs on this host"
    parser.add_argument("words", nargs="*", default=[], metavar="ROLE, key.sub=value", help=help_words)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, help="folder of a run, or of this host's part of it: its host starts them")
    help_join = "of rubato keys join-token on the run's first host; - reads it from stdin"
    where.add_argument("--join", metavar="TOKEN", help=help_join)
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("--pool", default="", help="of the role's pools, the one that they are to be in")
    help_pools = "with --join, in place of a role: processes by pool, or by a role that has none, such as far=8,env_manager=2"
    parser.add_argument("--pools", type=_pools, default={}, metavar="NAME=N,…", help=help_pools)
    help_host = (
        "with --run: the node agent of the host that starts them, such as node-2; with --join: this host's address as the others reach it"
    )
    parser.add_argument("--host", default="", help=help_host)
    parser.add_argument("--run-dir", type=_run_dir, help="with --join: folder for this host's part of the run")
    given = parser.parse_intermixed_args(argv)
    role = given.words.pop(0) if given.words and "=" not in given.words[0] else ""
    if bool(role or given.pool) == bool(given.pools):
        raise LaunchError("say what to add: one role, such as rubato add engine, or with --join several by --pools.")
    if given.join is not None:
        return _join(given, role)
    if alone := [*given.words, *(["--run-dir"] if given.run_dir else []), *(["--pools"] if given.pools else [])]:
        raise LaunchError(f"{alone[0]} goes with --join alone: on the run's own host its config holds for all actors.")
    return _ask(given.run, AddActors(role, given.n, pool=given.pool), "added", node=given.host)


def _pools(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, num = part.partition("=")
        if not name or name in found or not (num.isascii() and num.isdigit()):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N,NAME=N with each name once")
        found[name] = int(num)
    return found


def _join(given: argparse.Namespace, role: str) -> int:
    """Stay in the foreground as this host's node agent until the job ends or Ctrl-C."""
    from rubato.runtime.launch.launcher import Joiner, Part

    parts = [Part(role, given.n, given.pool)] if role else [Part("", num, name) for name, num in given.pools.items()]
    token = read_token(sys.stdin.readline() if given.join == "-" else given.join)
    folder = given.run_dir or _fresh_folder(token.run_id)

    async def run() -> int:
        return await Joiner(token, parts, folder, given.host, tuple(given.words)).run()

    with _unless_used(folder, made=given.run_dir is None):
        return _run(run())


@contextmanager
def _unless_used(folder: Path, *, made: bool) -> Generator[None]:
    """Where `folder` was `made` for the block, it goes again at its end if nothing was written."""
    try:
        yield
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()


def _run(work: Awaitable[int]) -> int:
    import uvloop

    from rubato.runtime.launch.console import unhindered

    with unhindered(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_flat(work))


def drain(argv: list[str]) -> int:
    """Drain actors of a running job, or hosts that joined it; nothing they hold is lost."""
    parser = _parser("drain", "Drain actors of a running job: all that are named, or none.")
    parser.add_argument("names", nargs="*", help="actors such as engine-2, or hosts that joined such as node-3")
    parser.add_argument("--pool", default="", help="every actor of this pool")
    help_json = "print {drained_s, blocked_s}, once the job has ended a step after the drain (10 s at most)"
    parser.add_argument("--json", action="store_true", help=help_json)
    given = parser.parse_intermixed_args(argv)
    if not given.names and not given.pool:
        raise LaunchError("drain: which? Name actors, hosts that joined, or a pool with --pool.")
    reply = _asked(given.run, DrainActors(tuple(given.names), given.pool, given.json), node=NODE)
    figures = {"drained_s": reply.drained_s, "blocked_s": reply.blocked_s}
    print(json.dumps(figures) if given.json else f"drained: {', '.join(reply.names) or 'none'}")  # noqa: T201
    return ExitCode.DONE


def stop(argv: list[str]) -> int:
    """Drain and save a running job, and wait until it is over: its folder is free then."""
    parser = _parser("stop", "Drain and save a running job, and wait for its end; --now stops it at once.")
    parser.add_argument("--now", action="store_true", help="end it at once, without saving")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the job has heard of it")
    parser.add_argument("--json", action="store_true", help="print {stopped_s, checkpoint_s}")
    given = parser.parse_args(argv)
    card = read_card(given.run)
    if (node := card.node) != NODE:
        raise LaunchError(
            f"{given.run} is the part of {node} in a run: stop would end the whole run, and belongs to its first host. "
            f"Take this host alone out with: rubato leave --run {given.run}"
        )
    _asked(given.run, StopJob(given.now), node=node)
    if given.no_wait:
        print("stopping")  # noqa: T201
        return ExitCode.DONE
    asyncio.run(until_gone(card.launcher_pid))
    over = read_card(given.run)
    if over.stopped_s < 0.0 or over.launcher_pid != card.launcher_pid:
        print(f"the launcher of {given.run} is gone, and did not say how the job ended", file=sys.stderr)  # noqa: T201
        return ExitCode.FAILED
    figures = {"stopped_s": over.stopped_s, "checkpoint_s": over.checkpoint_s}
    said = "stopped in {stopped_s:.1f} s, of which {checkpoint_s:.1f} s went into the last checkpoint"
    print(json.dumps(figures) if given.json else said.format(**figures))  # noqa: T201
    return ExitCode.DONE


def leave(argv: list[str]) -> int:
    """Take a host that joined out of the job; the job goes on."""
    given = _parser("leave", "Drain this host's actors and take it out of the job it joined.").parse_args(argv)
    if (node := read_card(given.run).node) == NODE:
        raise LaunchError(
            f"{given.run} is the folder of the run's first host, which can't leave it. "
            f"Save and end the run with: rubato stop --run {given.run}"
        )
    return _ask(given.run, StopJob(reason=f"{node} left the run"), f"{node} drains its actors and leaves")


def hosts(argv: list[str]) -> int:
    """List the hosts of a running job, and what each runs."""
    from rubato.runtime.launch import host_list

    return asyncio.run(_flat(host_list.show(argv)))


VERBS = {"add": add, "drain": drain, "stop": stop, "leave": leave, "hosts": hosts}


def _parser(verb: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"rubato {verb}", description=text)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, or of this host's part of it")
    return parser


def _ask(folder: Path, request: Request[Any], done: str, node: str = "") -> int:
    reply = _asked(folder, request, node=node)
    print(f"{done}: {', '.join(reply.names) or 'none'}" if isinstance(reply, Added) else done)  # noqa: T201
    return ExitCode.DONE


def _asked(folder: Path, request: Request[Any], node: str = "") -> Any:
    async def ask() -> Any:
        return await ask_node(folder, request, node=node or read_card(folder).node)

    return asyncio.run(_flat(ask()))


async def _flat(work: Awaitable[Any]) -> Any:
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
    """A new folder for one launch: it is made here, so that two launches in one second get two."""
    from datetime import datetime

    stamp = datetime.fromtimestamp(wall_s()).strftime("%m%d-%H%M%S")  # noqa: DTZ006 - a folder name in the user's own time
    folder, number = Path("runs") / f"{name}-{stamp}", 1
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{name}-{stamp}-{number}")
        except OSError as error:
            raise LaunchError(f"{folder} can't be made: {error.strerror}. Name a folder with --run-dir.") from error
        else:
            return folder

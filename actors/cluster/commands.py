"""`rubato cluster start|status|stop`, `submit`, `jobs` and `cancel`."""

import argparse
import asyncio
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rubato.actors.cluster.board import read_board
from rubato.actors.cluster.job import JobFiles
from rubato.actors.cluster.lives import JobLife
from rubato.actors.cluster.needs import ENGINE, TRAINER, needs_of
from rubato.actors.cluster.pools import SchedulerSection, rollout_pool, training_pool
from rubato.actors.cluster.token import make_token, read_token
from rubato.actors.messages.cluster import CancelJob, JobAccepted, JobRefused, StopJobs, SubmitJob
from rubato.bus.errors import AskFailed
from rubato.bus.message import Request
from rubato.runtime.config import Config
from rubato.runtime.config.compose import load, problems
from rubato.runtime.errors import ConfigError, ExitCode, LaunchError, RubatoError, first_cause
from rubato.runtime.guest import ask_node, join
from rubato.runtime.launch.agent_messages import StopJob
from rubato.runtime.launch.card import find_keys, read_card
from rubato.runtime.launch.children import last_line
from rubato.runtime.launch.connection import connect
from rubato.runtime.launch.folder import is_held, make_keys
from rubato.runtime.registry import list_actors
from rubato.runtime.store.store import StoreUnavailable

SCHEDULER = "scheduler"
START_S, STOP_S, ASK_S = 60.0, 180.0, 30.0
LOOK_S = 0.1
"""Period of looking at a cluster that starts or ends, from outside: it sends no event."""
LOG = "cluster.log"
SETTINGS = ("state.shared=true", "report.finish=''", "report.monitor=rubato.actors.cluster.monitor")
"""Of every cluster."""


def main(argv: Sequence[str]) -> int:
    """Run one command; RubatoError is the caller's to print."""
    verb, *rest = argv
    if verb == "cluster":
        inner = rest[0] if rest else ""
        command = CLUSTER.get(inner)
        if command is None:
            print(f"usage: rubato cluster {{{','.join(CLUSTER)}}} …", file=sys.stderr)  # noqa: T201
            return ExitCode.DONE if inner in ("-h", "--help") else ExitCode.REFUSED
        return command(rest[1:])
    return VERBS[verb](rest)


# -- the cluster -------------------------------------------------------------------------------------------------


def start(argv: list[str]) -> int:
    """Start a cluster, or go on with one that is down: its jobs are found again, or started again."""
    parser = argparse.ArgumentParser("rubato cluster start", description=start.__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG or DIR", help="e.g. configs/cluster.yaml, or a cluster's folder")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--dir", type=Path, help="folder of the cluster (default: runs/cluster-NAME)")
    given = parser.parse_intermixed_args(argv)
    folder, file = _place(given.config, given.dir)
    again = (folder / "run.json").exists()
    if is_held(folder):
        raise LaunchError(f"the cluster in {folder} is up already. See it with: rubato cluster status {folder}")
    config = load(folder / "config.yaml" if again else file, [*given.overrides, *SETTINGS])
    section = _section(config, file)
    if find_keys(folder) is None:
        make_keys(folder)
    make_token(folder)
    what = ["--resume", str(folder)] if again else [str(file), "--run-dir", str(folder)]
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rubato.runtime.cli", "launch", *what, *given.overrides, *SETTINGS],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
    _run(_until_ready(folder, process))
    pools = ", ".join(
        f"{name} {pool.nodes} × {pool.hardware or 'node'}" for name, pool in (("rollout", section.rollout), ("training", section.training))
    )
    print(f"cluster {config.run.name} · {folder} · {pools} · submit with: rubato submit JOB.yaml --cluster {folder}")  # noqa: T201
    return ExitCode.DONE


def _place(given: Path, where: Path | None) -> tuple[Path, Path]:
    """The cluster's folder, and the config that it is started from."""
    if given.is_dir():
        if where is not None and where.resolve() != given.resolve():
            raise LaunchError(f"{given} is a folder: leave --dir out to start the cluster in it.")
        if not (given / "config.yaml").exists():
            raise LaunchError(f"{given} holds no cluster. Start one with: rubato cluster start CONFIG --dir {given}")
        return given.resolve(), given / "config.yaml"
    config = load(given)
    return (where or Path("runs") / f"cluster-{config.run.name}").resolve(), given


def _section(config: Config, file: Path) -> SchedulerSection:
    if SCHEDULER not in config.actors:
        raise ConfigError(f"{file} is no cluster's config: it has no actors.{SCHEDULER}. See configs/cluster.yaml.")
    return config.section(SCHEDULER)


async def _until_ready(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    try:
        async with asyncio.timeout(START_S):
            while process.poll() is None:
                if await _is_ready(folder, process.pid):
                    return
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        process.terminate()
        raise LaunchError(f"the cluster was not up within {START_S:.0f} s. Log: {folder / LOG}") from None
    raise LaunchError(last_line(folder / LOG) or f"the cluster ended with {process.returncode}. Log: {folder / LOG}")


async def _is_ready(folder: Path, pid: int) -> bool:
    try:
        card = read_card(folder)
        if card.launcher_pid != pid or not card.state_url:
            return False
        async with connect(folder, types=False) as connection:
            return any(record.role == SCHEDULER and record.state == "ready" for record in await list_actors(connection.store))
    except (LaunchError, StoreUnavailable):
        return False


def status(argv: list[str]) -> int:
    """Show pools, groups and jobs of a cluster."""
    folder = _cluster(_folder("cluster status", status.__doc__, argv), "there is nothing to show")
    print(_run(read_board(folder)).table())  # noqa: T201
    return ExitCode.DONE


def stop(argv: list[str]) -> int:
    """Save every job of a cluster and end it; its next start goes on with them."""
    folder = _folder("cluster stop", stop.__doc__, argv)

    async def work() -> None:
        await _ask(folder, StopJobs(read_token(folder)), timeout=STOP_S)
        await ask_node(folder, StopJob(reason="the cluster was stopped"))

    if not (folder / "run.json").exists():
        raise LaunchError(f"{folder} holds no cluster.")
    if is_held(folder):
        launcher = os.pidfd_open(read_card(folder).launcher_pid)
        _run(work())
        select.select([launcher], [], [])  # readable once it is gone
        os.close(launcher)
    _run(_stop_left(folder))
    print(f"stopped. Go on with: rubato cluster start {folder}")  # noqa: T201
    return ExitCode.DONE


async def _stop_left(folder: Path) -> None:
    """End jobs that run without supervision, since the cluster was killed."""
    stems = [path.with_suffix("") for path in (folder / "submitted").glob("*.lock")]
    lives = [JobLife.found(folder / "jobs" / stem.name, JobFiles(stem)) for stem in stems]
    left = [life for life in lives if life is not None]
    for life in left:
        life.stop()
    for life in left:
        await life.ended()


CLUSTER: dict[str, Callable[[list[str]], int]] = {"start": start, "status": status, "stop": stop}


# -- jobs --------------------------------------------------------------------------------------------------------


def submit(argv: list[str]) -> int:
    """Give a job to a cluster, which runs it when it has a place and starts it again when it crashes."""
    parser = argparse.ArgumentParser("rubato submit", description=submit.__doc__)
    parser.add_argument("config", type=Path, metavar="JOB.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--cluster", type=Path, required=True, metavar="DIR", help="folder of the cluster")
    parser.add_argument("--slo", type=float, default=0.0, help="its time may be so many times its time alone (default: the cluster's)")
    given = parser.parse_intermixed_args(argv)
    folder = given.cluster.resolve()
    if any(word.startswith("--slo") for word in argv) and not given.slo >= 1:
        raise LaunchError(f"--slo {given.slo:g}: a job's bound is at least 1, its time alone.")
    config = _shared_job(given.config, given.overrides, folder)
    token = read_token(_cluster(folder, "nothing was submitted"))
    if wrong := problems(config, folder / "jobs" / config.run.name):
        raise ConfigError("\n".join(wrong))
    request = SubmitJob(
        token=token, id=secrets.token_hex(8), name=config.run.name, config=config.dump(), cwd=os.getcwd(), slo=given.slo,
        needs=needs_of(config),
    )  # fmt: skip
    print(_run(_ask(folder, request)).why)  # noqa: T201
    return ExitCode.DONE


def _shared_job(file: Path, overrides: list[str], folder: Path) -> Config:
    """The job's config as one that shares the cluster in `folder`: what speaks against that is told here."""
    config = load(file, overrides)
    if missing := [role for role in (ENGINE, TRAINER) if role not in config.actors]:
        raise ConfigError(f"{file} has no {missing[0]}: a job that shares a cluster generates and trains.")
    if not config.has("cluster"):
        raise ConfigError(f"{file}: none of its actors asks for permits, so it can't share a cluster.")
    given, usual = config.section("cluster"), type(config.section("cluster"))()
    for pool in ("rollout_pool", "training_pool"):
        if getattr(given, pool) != getattr(usual, pool):
            raise ConfigError(
                f"cluster.{pool}={getattr(given, pool)} is no pool that a job can choose: the scheduler gives each job its place. Leave it out."
            )
    # Which pools it gets the scheduler says each time that it starts it.
    pools = [f"cluster.rollout_pool={rollout_pool(0)}", f"cluster.training_pool={training_pool(0)}"]
    where = [f"cluster.dir='{folder}'", f"cluster.job={config.run.name}", *pools]
    return load(file, [*overrides, *where])


def jobs(argv: list[str]) -> int:
    """List the jobs of a cluster."""
    folder = _cluster(_folder("jobs", jobs.__doc__, argv), "its jobs can't be listed")
    print(_run(read_board(folder)).jobs())  # noqa: T201
    return ExitCode.DONE


def cancel(argv: list[str]) -> int:
    """Drain and save a job, and do not start it again."""
    parser = argparse.ArgumentParser("rubato cancel", description=cancel.__doc__)
    parser.add_argument("cluster", type=Path, metavar="DIR")
    parser.add_argument("job", metavar="JOB")
    given = parser.parse_args(argv)
    folder = _cluster(given.cluster.resolve(), "nothing was cancelled")
    print(_run(_ask(folder, CancelJob(read_token(folder), given.job))).why)  # noqa: T201
    return ExitCode.DONE


VERBS: dict[str, Callable[[list[str]], int]] = {"submit": submit, "jobs": jobs, "cancel": cancel}


# -- parts -------------------------------------------------------------------------------------------------------


def _folder(verb: str, text: str | None, argv: list[str]) -> Path:
    parser = argparse.ArgumentParser(f"rubato {verb}", description=text)
    parser.add_argument("cluster", type=Path, metavar="DIR", help="folder of the cluster")
    folder: Path = parser.parse_args(argv).cluster
    return folder.resolve()


def _cluster(folder: Path, otherwise: str) -> Path:
    """The folder of a cluster that is up. Raises LaunchError, one sentence."""
    try:
        card = read_card(folder)
    except LaunchError:
        raise LaunchError(f"{folder} holds no cluster: {otherwise}. Start one with: rubato cluster start CONFIG --dir {folder}") from None
    if not is_held(folder) or not card.state_url:  # a launcher that was killed may still be in the table of processes
        raise LaunchError(f"the cluster in {folder} is down: {otherwise}. Start it again with: rubato cluster start {folder}")
    return folder


async def _ask(folder: Path, request: Request[JobAccepted | JobRefused], timeout: float = ASK_S) -> JobAccepted:
    async with join(folder, types=False) as me:
        try:
            reply = await me.ref(SCHEDULER).ask(request, timeout=timeout)
        except AskFailed as error:
            raise LaunchError(f"the scheduler of {folder} did not answer: {error}. Ask again; nothing is done twice.") from error
    if isinstance(reply, JobRefused):
        raise LaunchError(reply.why)
    return reply


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """To its end; a RubatoError buried in exception groups is raised as itself."""
    try:
        return asyncio.run(work)
    except ExceptionGroup as group:
        error = first_cause(group)
        if isinstance(error, RubatoError):
            raise error from None
        raise

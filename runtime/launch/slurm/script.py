"""`rubato slurm`: writes the batch script with which Slurm runs a job of ours, on nodes for all hosts that its config asks for."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rubato.runtime.config import Config
from rubato.runtime.config.compose import load
from rubato.runtime.errors import ExitCode, LaunchError
from rubato.runtime.launch.slurm.groups import NodeGroup, node_groups
from rubato.runtime.launch.slurm.step import REQUEUE
from rubato.runtime.observe.log import SECRET_IN_URL

MARK = "# Made by rubato slurm; submit it with: sbatch"
"""A file without this line is not replaced."""

FEATURE = re.compile(r"[A-Za-z0-9_.-]+")
"""What Slurm takes for a node's feature."""

MOST_GRACE_S = 65_535
MOST_SPARE = 1024

BODY = """
{requeue}run={run}
{address}if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e "$run/config.yaml" ]; then
  what=(--resume "$run")  # Slurm queued the job again
else
  what=({launch} --run-dir "$run")
fi
"""

ONCE = """exec {rubato} launch "${{what[@]}}"{host}
"""

UNTIL_DONE = """trap 'signalled=yes; trap "" USR1; kill -HUP $!' TERM  # Slurm may have sent it one as well: a HUP is no second signal
trap 'signalled=yes; limit=yes; kill -HUP $!' USR1
{rubato} launch "${{what[@]}}"{host} &
code=127
while signalled=; wait $!; now=$?; [ $now = 127 ] || code=$now; [ "$signalled" ]; do :; done  # 127: its end was known before
case "$limit $code" in
  "yes 129" | "yes 130") scontrol requeue "$SLURM_JOB_ID" ;;  # its time is over before its steps are
esac
exit $code
"""

ADDRESS = """head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
address=$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}')
"""


def main(argv: Sequence[str]) -> int:
    """Write the script; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser(
        "rubato slurm", description="Write a batch script for Slurm that launches a job, and resumes it when it is queued again."
    )
    parser.add_argument("config", help="a YAML file, e.g. configs/quickstart.yaml")
    parser.add_argument("changes", nargs="*", metavar="key.sub=value", help="changes of single keys")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the script, e.g. job.sh")
    parser.add_argument("--run-dir", type=Path, help="folder of the run, which all nodes share (default: runs/NAME-JOB)")
    parser.add_argument(
        "--grace", type=int, default=120, metavar="S", help="before its time is over the job has so long to drain and to save (120)"
    )
    parser.add_argument(
        "--spare", type=int, default=0, metavar="N", help="more nodes beside those that launch.hosts needs, for one that is lost (0)"
    )
    parser.add_argument("--until-done", action="store_true", help="have the job queued again when its time is over, until its last step")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of sbatch, such as --sbatch=--time=8:00:00; may be repeated",
    )
    given = parser.parse_intermixed_args(argv)
    for name, value, least, most in (("--grace", given.grace, 1, MOST_GRACE_S), ("--spare", given.spare, 0, MOST_SPARE)):
        if not least <= value <= most:
            raise LaunchError(f"{name} {value} is not between {least} and {most}.")
    if wrong := [option for option in given.sbatch if not re.fullmatch(r"--?[A-Za-z][ -~]*", option)]:
        raise LaunchError(f"--sbatch={wrong[0]!r} is no option of sbatch. Write it as --sbatch=--time=8:00:00.")
    if open_ := [change for change in given.changes if any("${" not in found for found in SECRET_IN_URL.findall(change))]:
        key = open_[0].partition("=")[0]
        raise LaunchError(
            f"{key} has a password in it, which the script would show. Write ${{NAME}} in its place, set where sbatch is called."
        )
    named = any(change.startswith("bus.host=") for change in given.changes)
    config = load(given.config, [*given.changes, *([] if named else ["bus.host=127.0.0.1"])])
    _write(given.out, script_of(config, given, own_address=bool(config.launch.hosts) and not named))
    print(f"{given.out} is written. Submit it with: sbatch {shlex.quote(str(given.out))}")  # noqa: T201
    return ExitCode.DONE


def script_of(config: Config, given: argparse.Namespace, *, own_address: bool) -> str:
    """The script; with `own_address` the launcher's node is where the run's other hosts come to."""
    groups = node_groups(config)
    alone = bool(config.launch.hosts) and len(groups) == 1  # a heterogeneous job is queued again whichever of its nodes fails
    options = [
        f"--job-name={config.run.name}", f"--output={config.run.name}-%j.log", "--open-mode=append", f"--chdir={shlex.quote(str(Path.cwd()))}",
        "--requeue", *(["--no-kill"] if alone else []), f"--signal=B:{'USR1' if given.until_done else 'TERM'}@{given.grace}",
    ]  # fmt: skip
    lines = [f"#!/bin/bash\n{MARK} {given.out.name}", *(f"#SBATCH {option}" for option in options)]
    for number, group in enumerate(groups):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {_nodes(group, given.spare if config.launch.hosts else 0)}", *(f"#SBATCH {option}" for option in given.sbatch)]
    backend = ["launch.backend=slurm"] if config.launch.hosts else []
    named = given.run_dir or config.run.dir
    run = shlex.quote(str(named)) if named else f"runs/{config.run.name}-$SLURM_JOB_ID"
    body = (BODY + (UNTIL_DONE if given.until_done else ONCE)).format(
        requeue=f"export {REQUEUE}=1  # a job of which only the first node was lost is queued again by a host\n" if alone else "",
        run=run,
        address=ADDRESS if own_address else "",
        launch=shlex.join([given.config, *given.changes, *backend]),
        rubato=shlex.join([sys.executable, "-P", "-m", "rubato.runtime.cli"]),
        host=' "bus.host=$address"' if own_address else "",
    )
    return "\n".join(lines) + "\n" + body


def _nodes(group: NodeGroup, spare: int) -> str:
    """Options for the nodes of one group."""
    needs = group.needs
    if wrong := [label for label in needs.labels if not FEATURE.fullmatch(label)]:
        raise LaunchError(f"the label {wrong[0]} can't be a feature of Slurm's nodes: use letters, digits, _ . and - in it.")
    options = [f"--nodes={group.num + spare}", "--ntasks-per-node=1", f"--cpus-per-task={needs.cpus}" if needs.cpus else "--exclusive"]
    options += [f"--gres=gpu:{needs.gpus}"] if needs.gpus else []
    options += [f"--constraint={'&'.join(needs.labels)}"] if needs.labels else []
    return " ".join(options)


def _write(path: Path, script: str) -> None:
    try:
        if path.exists() and MARK not in path.read_text(errors="replace")[:1000]:
            raise LaunchError(f"{path} was not made by rubato slurm. Name another file.")
        path.touch(mode=0o700)
        path.chmod(0o700)  # changes of keys may hold what others are not to read
        path.write_text(script)
    except OSError as error:
        raise LaunchError(f"{path} can't be written: {error.strerror}.") from error

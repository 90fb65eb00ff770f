"""The `rubato` command: finds the sub-command, imports only that, and prints every error meant for the user as one sentence."""

import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from rubato.runtime.errors import ExitCode, RubatoError


class Command(NamedTuple):
    """One sub-command; `verb` says whether its `main` wants its own name as the first argument."""

    module: str
    verb: bool
    line: str


LAUNCH = "rubato.runtime.launch.commands"
CLUSTER = "rubato.actors.cluster.commands"

COMMANDS = {
    "launch": Command(LAUNCH, False, "run the job that a config describes, or go on with one"),
    "eval": Command("rubato.actors.report.evaluate", False, "evaluate a model, or a run's checkpoints, on held-out tasks"),
    "add": Command(LAUNCH, True, "start more actors of a role in a running job"),
    "drain": Command(LAUNCH, True, "let actors of a running job finish and end, or hosts that joined it; nothing is lost"),
    "stop": Command(LAUNCH, True, "drain and save a running job"),
    "hosts": Command(LAUNCH, True, "list the hosts of a running job, and what each runs"),
    "leave": Command(LAUNCH, True, "take this host out of the job that it joined"),
    "slurm": Command("rubato.runtime.launch.slurm.script", False, "write the batch script with which Slurm runs a job, and resumes it"),
    "cluster": Command(CLUSTER, True, "start, show or stop a cluster, which jobs share"),
    "submit": Command(CLUSTER, True, "give a job to a cluster"),
    "jobs": Command(CLUSTER, True, "list the jobs of a cluster"),
    "cancel": Command(CLUSTER, True, "take a job from a cluster; what it did is saved"),
    "monitor": Command("rubato.runtime.monitor.command", False, "watch a run: live, as one table, as JSON, or what waits for what"),
    "samples": Command("rubato.actors.report.transcripts.command", False, "show what the model wrote, and what became of it"),
    "export": Command("rubato.actors.adapters.export", False, "write a checkpoint as a whole model, an adapter merged into its base"),
    "fit": Command(
        "rubato.actors.report.fit", False, "say what memory a job takes of each device, and what to change where it does not fit"
    ),
    "compare": Command("rubato.actors.report.compare", False, "compare the curves and final figures of several runs"),
    "tap": Command("rubato.runtime.monitor.tap", False, "print the messages of a running actor as they travel"),
    "vllm-command": Command(
        "rubato.actors.engines.vllm_command", False, "print the line that starts the server of engine.kind=vllm_server"
    ),
    "env": Command("rubato.actors.envs.make", False, "make an environment of Python's own for a library of environments"),
    "tinker": Command("rubato.actors.gateway.tinker.command", False, "serve Tinker's API on the engines and the model of a config"),
    "serve-rewards": Command("rubato.actors.rewards.serve", False, "serve a reward function over HTTP, for any number of jobs"),
    "sim": Command("rubato.sim.rlsim", False, "simulate a scenario of a cluster and check its claims"),
    "configs": Command("rubato.runtime.config.shipped", False, "list the configs that come with Rubato, or print one"),
    "keys": Command("rubato.runtime.launch.token", False, "make a run's keys, or print the token with which a host joins it"),
    "doctor": Command("rubato.runtime.doctor", False, "check this machine and installation"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rubato ARGV…` and return its ExitCode."""
    return guarded(_dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())  # noqa: T201
        return ExitCode.DONE if arguments else ExitCode.REFUSED
    if arguments[0] == "--version":
        from rubato.runtime.launch.token import version_here

        print(f"rubato {version_here() or '(not installed: a checkout)'}")  # noqa: T201
        return ExitCode.DONE
    name = arguments[0]
    command = COMMANDS.get(name)
    if command is None:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        guess = f"Did you mean rubato {near[0]}?" if near else "See rubato --help."
        print(f"{name} is not a command. {guess}", file=sys.stderr)  # noqa: T201
        return ExitCode.REFUSED
    importlib.import_module("rubato.runtime.importer").import_structlog()
    run: Callable[[list[str]], int] = importlib.import_module(command.module).main
    return run(arguments if command.verb else arguments[1:])


def guarded(run: Callable[[list[str]], int], argv: list[str]) -> int:
    """`run(argv)`, with errors for the user printed as their sentence on stderr and no traceback."""
    try:
        _open_streams()
        try:
            code = run(argv)
        finally:
            if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - it is where fd 1 was closed
                sys.stdout.flush()  # here, where a closed pipe is still caught
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except RubatoError as error:
        _say(error)
        return ExitCode.REFUSED
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        sys.stdout = None
        return ExitCode.DONE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stdout = None  # or the interpreter tries once more as it ends
        what = error.filename or "what this command writes"
        _say(f"{what} could not be written: {error.strerror}.")
        return ExitCode.FAILED
    except ExceptionGroup as group:
        meant, others = group.split(RubatoError)
        if meant is None or others is not None:
            raise
        for sentence in dict.fromkeys(str(error) for error in _leaves(meant)):
            _say(sentence)
        return ExitCode.REFUSED
    return code


def _say(sentence: object) -> None:
    """To the user, if stderr leads to one: where it is gone too, the exit code alone tells."""
    try:
        print(sentence, file=sys.stderr)  # noqa: T201
    except OSError:
        sys.stderr = None  # or the interpreter tries once more as it ends


def _open_streams() -> None:
    """Print what the terminal can't show as `?`, and let no file of ours take the number of a stream that was closed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions for leaf in _leaves(inner)]


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.line}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rubato COMMAND …",
            "",
            "Asynchronous RL post-training of language-model agents.",
            "",
            *lines,
            "",
            "rubato COMMAND --help says more. Start with: rubato launch quickstart",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

"""What a user is told when the runtime can't go on: each error is one sentence that says what, which and what to do."""

import errno
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import cast


class ExitCode(IntEnum):
    """How every command of ours ends; docs/running.md has the table."""

    DONE = 0
    """It did what it was asked for."""
    FAILED = 1
    """The job ran, and failed."""
    REFUSED = 2
    """A mistake in what was given, or something missing: nothing was done."""
    SURPRISED = 3
    """A simulation whose claims came out otherwise than expected."""
    INTERRUPTED = 130
    """Stopped before its end, by a signal or by `rubato stop`; a job was saved and can be resumed. 128 + SIGINT, as shells report it."""


class RubatoError(Exception):
    """Base of every error meant for the user; the command line prints it without a traceback and exits with 2."""


class ConfigError(RubatoError):
    """The configuration, or a class or file it names, is wrong; nothing was started."""


class LaunchError(RubatoError):
    """The job could not be brought up (folder taken, port refused, binary missing); what had started was stopped again."""


class NotRunning(RuntimeError):
    """An actor spawns nothing before it begins, nor once it is ending."""


class ActorFailed(RubatoError):
    """An actor raised or its process ended; its supervisor restarts it while its budget lasts."""


def check_all(checks: Iterable[Callable[[], None]]) -> None:
    """Raises one ConfigError with all that `checks` raise, each sentence once."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found += str(error).splitlines()
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a disk that is full says, and a user's quota: it passes."""


def has_no_room(error: OSError) -> bool:
    """Whether a disk refused to write because it is full."""
    return error.errno in NO_ROOM


PERMANENT = (
    ConfigError, ImportError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, NameError, ArithmeticError, AssertionError,
    NotImplementedError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError,
)  # fmt: skip
"""What an actor that has never been ready would meet again at its next start."""


def said_by(error: BaseException) -> str:
    """What an error says, with its type where it is none of ours."""
    return str(error) if isinstance(error, RubatoError) else f"{type(error).__name__}: {error}"


def first_cause(error: BaseException) -> BaseException:
    """What failed first, out of the groups that task groups wrap it in."""
    found = error
    while isinstance(found, BaseExceptionGroup):
        found = cast("BaseExceptionGroup[BaseException]", found).exceptions[0]
    return found

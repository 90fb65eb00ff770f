"""What a user is told when the runtime can't go on: each error is one sentence that says what, which and what to do."""

from typing import cast


class RubatoError(Exception):
    """Base of every error meant for the user; the command line prints it without a traceback and exits with 2."""


class ConfigError(RubatoError):
    """The configuration, or a class or file it names, is wrong; nothing was started."""


class LaunchError(RubatoError):
    """The job could not be brought up (folder taken, port refused, binary missing); what had started was stopped again."""


class ActorFailed(RubatoError):
    """An actor raised or its process ended; its supervisor restarts it while its budget lasts."""


def first_cause(error: BaseException) -> BaseException:
    """What failed first, out of the groups that task groups wrap it in."""
    found = error
    while isinstance(found, BaseExceptionGroup):
        found = cast("BaseExceptionGroup[BaseException]", found).exceptions[0]
    return found

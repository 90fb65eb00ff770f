"""Lets code that runs inside an actor ask others of its run, without being handed the actor: an `async` environment, for instance."""

from contextvars import ContextVar
from typing import Protocol

from runtime.ref import Ref


class Hosts(Protocol):
    """What asks in our place; the kernel of the actor that this code runs in."""

    def ref(self, target: str) -> Ref: ...


current_host: ContextVar[Hosts] = ContextVar("rubato_host")
"""Set by each kernel for all tasks of its actor."""


def ref(target: str) -> Ref:
    """A reference to the actor `target`, or to any ready instance of that role, as `Actor.ref` gives it.

    Raises LookupError outside of an actor: in a worker process, which has no way to the run, or in a program of its own.
    """
    try:
        return current_host.get().ref(target)
    except LookupError:
        raise LookupError(
            f"nobody here can ask {target}: this code does not run inside an actor. Make the environment's methods async, "
            "so that it runs in the env_manager's own process."
        ) from None

"""The seam for the right to compute. An actor has it always, unless its job shares hardware with other jobs and takes turns with them.

Trainers and engines ask for it; `cluster` in the config says what they ask. `cluster.dir` names a cluster whose jobs take turns by permits
(actors/cluster/rollmux.py), `cluster.lease` a class of one's own.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rubato.actors.plugins import lease_path
from rubato.runtime.importer import load_configured

if TYPE_CHECKING:
    from asyncio import Event

    from rubato.runtime.actor import Actor

ResultT = TypeVar("ResultT")

ROLLOUT, TRAINING, WEIGHT_SYNC = "rollout", "training", "weight_sync"
"""The phases of a job, for each of which the right is had by itself. An engine brings and swaps weights in within the last."""


class GivenUp(Exception):
    """The actor leaves, and waits for the right no longer: what it was to compute is computed when the run goes on."""


class GivenUpMidway(GivenUp):
    """The same between two parts of something: what these have changed must not be saved."""


class Rests(Protocol):
    """Occupant of the hardware that can leave it, such as a TrainEngine. The calls block."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Held:
    """The right, while the block runs that asked for it. This one is never asked back.

    Where one may be, `compute` and `run` see to it that nothing is begun without the right: they wait for it anew.
    """

    waited_s = 0.0
    """For the right, since the block was entered included."""

    def __init__(self, actor: "Actor") -> None:
        self._actor = actor

    @property
    def is_held(self) -> bool:
        """For certain, by this process's own clock."""
        return True

    @property
    def figures(self) -> Mapping[str, float]:
        """Metrics of the lease, for the row of a step that was computed under it."""
        return {}

    async def compute(self, call: Callable[..., ResultT], *args: Any) -> ResultT:
        """Offload `call`. Raises GivenUp."""
        return await self._actor.offload(call, *args)

    async def run(self, parts: Generator[None, None, ResultT]) -> ResultT:
        """Offload `parts`, between which the right may be asked back. Raises GivenUp before the first of them, GivenUpMidway between two."""
        return cast("ResultT", await self._actor.offload(finished, parts))


class ComputeLease(Protocol):
    """One actor's way to the right. Derive yours from AlwaysHeld; it is built with the actor, on the event loop, which it must not block."""

    async def begin(self, engine: Rests | None = None, leaving: "Event | None" = None) -> None:
        """The actor has loaded its model. `engine` lies on the hardware, and may have to leave it between blocks; an engine worker sees to its
        own. `leaving` is set once the actor is to stop, and waits for nothing any more."""
        ...

    def __call__(self, phase: str) -> AbstractAsyncContextManager[Held]:
        """`async with lease(phase) as held:` waits for the right to compute in that phase of the job, and has it while the block runs.

        At the end of the block, with an error or not, the next in line has it; an actor that is cancelled leaves the line. Raises GivenUp.
        """
        ...

    def waiting(self) -> AbstractAsyncContextManager[None]:
        """Around what waits for another actor, which may have to wait for the right. Raises GivenUp where this one leaves meanwhile."""
        ...


class AlwaysHeld:
    """The ComputeLease of an actor that has its hardware to itself."""

    def __init__(self, actor: "Actor") -> None:
        self.actor = actor

    async def begin(self, engine: Rests | None = None, leaving: "Event | None" = None) -> None:
        """The engine stays where it is."""

    def __call__(self, phase: str) -> AbstractAsyncContextManager[Held]:
        return nullcontext(Held(self.actor))

    def waiting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()


def lease_of(actor: "Actor") -> ComputeLease:
    """The one that `cluster` in the actor's config names."""
    path = lease_path(actor.config)
    return load_configured(path, key="cluster.lease")(actor) if path else AlwaysHeld(actor)


def finished(parts: Generator[None, None, ResultT]) -> ResultT:
    """Result of `parts`, run without a stop."""
    while (result := advance(parts)) is None:
        pass
    return result


def advance(parts: Generator[None, None, ResultT]) -> ResultT | None:
    """Compute the next of `parts`; after the last, what comes of them."""
    try:
        next(parts)
    except StopIteration as end:
        return end.value
    return None

"""The trainer's share of the lease: it computes when the model's devices are its own, which without a mechanism they always are."""

from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

from actors.plugins import load, turns_of
from actors.training.engine import finished

if TYPE_CHECKING:
    from actors.training.trainer import Trainer

ResultT = TypeVar("ResultT")


class TurnGivenUp(Exception):
    """The trainer leaves, and does not wait until it may compute: the step is trained when the run goes on."""


class StepGivenUp(TurnGivenUp):
    """The same within a step: model and optimiser are those of no step, and must not be saved."""


class Turn:
    """The trainer may compute. What it computes goes through this, so that it can stop where the right is lost."""

    waited_s = 0.0
    """For the right to compute."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    @property
    def figures(self) -> dict[str, float]:
        """For the row of the step."""
        return {}

    async def compute(self, call: Callable[..., ResultT], *args: Any) -> ResultT:
        """Offload `call`. Raises TurnGivenUp."""
        return await self.trainer.offload(call, *args)

    async def run(self, parts: Generator[None, None, ResultT]) -> ResultT:
        """Offload `parts`, between which the right may be lost. Raises TurnGivenUp before the first of them, StepGivenUp between two."""
        return cast("ResultT", await self.trainer.offload(finished, parts))


class Turns:
    """Those of a trainer that has its devices to itself: every turn begins at once, and none is lost."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    async def begin(self) -> None:
        """The engine has loaded its model."""

    def turn(self) -> AbstractAsyncContextManager[Turn]:
        """`async with turns.turn() as turn:` waits for one and has it while the block runs. Raises TurnGivenUp where the trainer leaves first."""
        return nullcontext(Turn(self.trainer))

    def waiting(self) -> AbstractAsyncContextManager[None]:
        """Around what waits for somebody else's turn. Raises TurnGivenUp where the trainer leaves before the block ends."""
        return nullcontext()


def turns(trainer: "Trainer") -> Turns:
    """As the config says."""
    path = turns_of(trainer.config)
    return load(path)(trainer) if path else Turns(trainer)

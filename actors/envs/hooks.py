"""The seam for mechanisms that go along with the rollouts of an environment manager."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from runtime.actor import Actor, Handles

if TYPE_CHECKING:
    from actors.envs.rollout import Rollout


class RolloutHook(Handles):
    """A mechanism's view of the rollouts of one manager. Subclass it and override what is wanted; messages that it has handlers for
    (`@handler`) are the manager's to take.

    `actors/plugins.py` says which there are, and what makes a job have them: a section of the config, or the first message of a type.
    """

    def __init__(self, manager: Actor, playing: Callable[[], "Iterable[Rollout]"]) -> None:
        """`playing()` gives the rollouts that play at the moment."""
        self.manager = manager
        self.playing = playing

    def turns(self) -> AbstractContextManager[None]:
        """Around the turns of one rollout, from before its first to after its last; entered by many at once."""
        return nullcontext()

    def ended(self, rollout: "Rollout", *, whole: bool) -> None:
        """After a rollout played; `whole` where a trajectory came of it."""

    def peers_changed(self) -> None:
        """After an actor of the job became ready or went away."""

    async def run(self) -> None:
        """What the hook does beside rollouts, as a task of the manager."""

"""Checkpoints that are written at once and count later: when the Store can no longer forget the steps that they cover."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from actors.messages.samples import Commit, Confirm
from actors.training import checkpoint as checkpoints
from actors.training.publishing import ASK_S, BUFFER
from runtime.actor import Actor
from runtime.errors import ActorFailed


class Saver:
    """One trainer's checkpoints, one at a time. Training goes on while one waits to count; a crash then falls back to the one before."""

    def __init__(self, actor: Actor, keep: int) -> None:
        self._actor = actor
        self._folder = actor.run.folder / "checkpoints"
        self._keep = keep
        self._covering: asyncio.Task[None] | None = None

    async def save(self, step: int, epoch: int, bound_at: float, write: Callable[[Path], None]) -> None:
        """Have `write` make the folder it is given, now. `bound_at` is the loop time at which `step` was claimed.

        Raises TrainError when the disk refuses.
        """
        await self.settle()
        waiting = self._folder / f"waiting_{step}.{epoch}"
        actor = self._actor
        with (
            actor.waits.on(f"checkpoint {step}", stage="checkpoint", whole=True),
            actor.trace.span("checkpoint", "train", step=step),
        ):
            await actor.offload(write, waiting)
        self._covering = actor.spawn(self._cover(step, epoch, bound_at, waiting), name=f"{actor.name}.checkpoint")

    async def settle(self) -> None:
        """Return once the newest checkpoint counts."""
        if self._covering is not None:
            await self._covering

    async def _cover(self, step: int, epoch: int, bound_at: float, waiting: Path) -> None:
        """Name it and COMMIT. Where the Store forgot a step, this fails the actor, which begins again with the checkpoint before."""
        actor, buffer = self._actor, self._actor.ref(BUFFER)
        await asyncio.sleep(bound_at + actor.run.window_s - asyncio.get_running_loop().time())
        with actor.waits.on(f"commit {step}", stage="checkpoint", holder=BUFFER, whole=True):
            await buffer.ask(Confirm(step, epoch), timeout=ASK_S)
            try:
                await actor.offload(checkpoints.rename, waiting, self._folder / f"step_{step}")
            except FileNotFoundError:
                raise ActorFailed(
                    f"checkpoint {step} is gone: a trainer of a later epoch took over and removed it"
                ) from None
            await buffer.ask(Commit(step, epoch), timeout=ASK_S)
        await actor.offload(checkpoints.prune, self._folder, self._keep, epoch)

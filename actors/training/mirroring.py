"""Checkpoints are copied to `checkpoint.mirror` beside training, the newest first. What fails there is told, and ends nothing."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.mirror import (
    BESIDE,
    LINEAGE,
    Claim,
    Copy,
    GivenUp,
    Gone,
    Mirror,
    MirrorError,
    Superseded,
    check_url,
    lineage_of,
    shown,
)
from rubato.actors.training.hooks import StepHook

if TYPE_CHECKING:
    from rubato.actors.training.trainer import Trainer

STALL_S = 120.0
"""A copy of which no byte went through for so long is given up."""
RETRY_S = (10.0, 300.0)
"""Before a copy that failed is tried again, unless a newer checkpoint comes: at first, and at most."""
CLOSE_S = 8.0
"""For the last copy where the run is stopped: what is not there by then is copied once the run is resumed."""

ResultT = TypeVar("ResultT")


class Mirroring(StepHook):
    """What is to be copied is read off the run folder: the newest checkpoint, then those that stay. So nothing is queued."""

    def __init__(self, trainer: "Trainer") -> None:
        super().__init__(trainer)
        self._url = trainer.config.checkpoint.mirror
        self._folder = trainer.run.folder / "checkpoints"
        self._news, self._settled = asyncio.Event(), asyncio.Event()
        self._claim = Claim(0, "")
        self._mirror: Mirror | None = None
        self._known: dict[int, Copy] | None = None
        """Whole copies of this run's checkpoints by step; None until the mirror is claimed."""
        self._copying = -1
        self._gone: set[int] = set()
        """Steps whose checkpoint was removed, or is damaged, before it was copied."""
        self._newest = self._begun = 0
        self._failures = 0
        self._over = False
        self._settled.set()

    @classmethod
    def check_host(cls, config: Any) -> None:
        check_url(config.checkpoint.mirror)

    async def begin(self, step: int, rows: Callable[[], Iterator[Mapping[str, float]]]) -> None:
        self._claim = Claim(self.trainer.term, secrets.token_hex(4))
        self._newest = self._begun = step
        self._settled.clear()
        self._news.set()
        self.trainer.spawn(self._follow(), name=f"{self.trainer.name}.mirror")

    async def after_checkpoint(self, step: int) -> None:
        self._newest = step
        if self._over:
            return
        self._settled.clear()
        self._news.set()

    async def after_publish(self, version: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        behind = self._newest - max(self._known or {0: None})
        return {"checkpoint/mirror_behind": float(behind), "checkpoint/mirror_failures": float(self._failures)}

    def keep(self, steps: Collection[int]) -> Collection[int]:
        return {self._copying} & set(steps)

    async def before_end(self) -> None:
        """The last checkpoint is copied, or can't be."""
        with self.trainer.waits.on("checkpoint.mirror", stage="checkpoint", detail="the last copy", blocks_actor=True):
            async with asyncio.TaskGroup() as tasks:
                ways = [tasks.create_task(event.wait(), name="mirror.end") for event in (self._settled, self.trainer.leaving)]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._settled.wait()
        if self._newest not in (self._known or {}) and self._newest > 0 and not self._over:
            self.trainer.notice(f"step {self._newest} is not in checkpoint.mirror: it lies in {self._folder} alone")

    async def _follow(self) -> None:
        while True:
            pause_s = None
            self._news.clear()
            try:
                while await self._apart(self._copy_one):
                    self._failures, said = 0, self._failures
                    if said:
                        self.trainer.notice(f"checkpoint.mirror has step {max(self._known or {0: 0})}: copies are made again", good=True)
            except Superseded as error:
                self.trainer.notice(f"{error}: this one's checkpoints are not copied any more")
                self._over = True
                self._settled.set()
                return
            except MirrorError as error:
                self._mirror = None
                pause_s = min(RETRY_S[0] * 2 ** min(self._failures, 16), RETRY_S[1])
                self._failures += 1
                self.trainer.log.warning("mirror_failed", step=self._copying, failures=self._failures, error=str(error))
                if self._failures == 1:
                    self.trainer.notice(f"{error}. Training goes on, and step {self._newest} or a later one is copied once that works")
            self._copying = -1
            if not self._news.is_set():
                self._settled.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()

    def _copy_one(self, moved: Callable[[], None]) -> bool:
        """Copy what is wanted most and remove what is old; whether there was anything to copy."""
        mirror = self._mirror or Mirror(self._url)
        self._mirror, mirror.moved = mirror, moved
        if self._known is None:
            mirror.claim(self._claim)
            whole = (copy for copy in mirror.copies() if copy.step <= self._begun and mirror.complete(copy))
            self._known = {copy.step: copy for copy in whole}
        folder = self._wanted(self._known)
        if folder is None:
            return False
        copy = Copy(self._claim, checkpoints.step_of(folder))
        self._copying = copy.step
        rows = [self.trainer.run.folder / name for name in BESIDE]
        try:
            mirror.put(copy, folder, self._lineage(), rows, seed=self.trainer.config.run.seed)
        except GivenUp:
            raise
        except MirrorError as error:
            with suppress(MirrorError):
                mirror.remove(copy)
            if not isinstance(error, Gone):
                raise
            self.trainer.log.info("mirror_skips", step=copy.step, why=str(error))
            self._gone.add(copy.step)
            return True
        self.trainer.log.info("mirrored", step=copy.step)
        self._known = {**self._known, copy.step: copy}
        self._prune(mirror, self._known)
        return True

    def _wanted(self, known: Mapping[int, Copy]) -> Path | None:
        """The newest checkpoint, else the newest of those that stay, that has no copy."""
        there = {checkpoints.step_of(path): path for path in checkpoints.by_step(self._folder)}
        if not there:
            return None
        missing = [
            step for step in {max(there), *self.trainer.stays(list(there))} & there.keys() if step not in known and step not in self._gone
        ]
        return there[max(missing)] if missing else None

    def _prune(self, mirror: Mirror, known: dict[int, Copy]) -> None:
        """As checkpoints here are; torn copies and those of steps that were trained anew go too."""
        steps = sorted(known)
        stay = {*steps[-self.trainer.config.checkpoint.keep :], *self.trainer.stays(steps)}
        kept = {step: copy for step, copy in known.items() if step in stay}
        for copy in mirror.copies():
            if copy not in kept.values() and copy.claim <= self._claim:
                mirror.remove(copy)
        self._known = kept

    def _lineage(self) -> str:
        if not (found := lineage_of(self._folder)):
            found = secrets.token_hex(16)
            checkpoints.write_through(self._folder / LINEAGE, found.encode())
        return found

    async def _apart(self, work: Callable[[Callable[[], None]], ResultT]) -> ResultT:
        """Run `work` in a thread that no end of the process waits for. Raises MirrorError where it stalls."""
        loop, scope = asyncio.get_running_loop(), asyncio.timeout(STALL_S)
        ended: asyncio.Future[ResultT] = loop.create_future()

        def progress() -> None:
            if not ended.done():
                scope.reschedule(loop.time() + STALL_S)

        def moved() -> None:
            if ended.done():
                raise GivenUp("it stalled, and another try may have begun")
            loop.call_soon_threadsafe(progress)

        def end(result: Any, error: Exception | None) -> None:
            if ended.done():
                return
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(result)

        def run() -> None:
            result: Any = None
            failed: Exception | None = None
            try:
                result = work(moved)
            except MirrorError as error:
                failed = error
            except Exception as error:  # noqa: BLE001 - nothing of a mirror ends training
                failed = MirrorError(f"checkpoint.mirror={shown(self._url)}: {type(error).__name__}: {error}")
            with suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(end, result, failed)

        threading.Thread(target=run, name="mirror", daemon=True).start()
        try:
            async with scope:
                return await ended
        except TimeoutError:
            raise MirrorError(f"checkpoint.mirror={shown(self._url)} stalls: no byte went through within {STALL_S:.0f} s") from None

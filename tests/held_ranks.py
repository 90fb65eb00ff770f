"""Ranks for jobs of tests that are hurt in one stage of their work: a rank that comes to it says so, and stays there.

A stage is held for a rank by a FIFO of the name STAGE.RANK in the folder that HELD_RANKS names. The rank writes its pid there, and reads from
the FIFO `never` from then on, which none writes.
"""

import os
import select
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rubato.actors.messages.ranks import JoinTerm, RankFailed, TermJoined
from rubato.actors.ranks.rank import TrainRank
from rubato.runtime.actor import handler

HELD_RANKS, NEVER = "HELD_RANKS", "never"


class HeldRank(TrainRank):
    """A rank whose stages can be held."""

    @handler(concurrency=8)
    async def join_term(self, request: JoinTerm) -> TermJoined | RankFailed:
        joined = await super().join_term(request)
        if self._engine is not None:
            self._engine = HeldEngine(self._engine, request.rank)
        return joined


class HeldEngine:
    """What a rank computes with, held where it is asked to: load, forward, reduce, publish and checkpoint."""

    def __init__(self, engine: Any, rank: int) -> None:
        self._engine, self._rank = engine, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, *arguments: Any) -> Any:
        self._stage("load")
        return self._engine.load(*arguments)

    def train(self, *arguments: Any) -> Any:
        self._stage("forward")
        found = self._engine.train(*arguments)
        self._stage("reduce")
        return found

    def export(self, memory: memoryview) -> Callable[[], None]:
        self._stage("publish")
        return self._engine.export(memory)

    def pack(self, memory: memoryview) -> None:
        self._stage("publish")
        self._engine.pack(memory)

    def saved(self, term: int) -> Any:
        return HeldRows(self._engine.saved(term), self._stage)

    def _stage(self, name: str) -> None:
        folder = Path(os.environ[HELD_RANKS])
        if (folder / f"{name}.{self._rank}").exists():
            with (folder / f"{name}.{self._rank}").open("w") as told:
                told.write(f"{os.getpid()}\n")
            (folder / NEVER).read_bytes()


class HeldRows:
    """Rows of a checkpoint, held as they are written."""

    def __init__(self, saved: Any, stage: Callable[[str], None]) -> None:
        self._saved, self._stage = saved, stage
        self.rows: Mapping[str, Any] = saved.rows
        self.files: Mapping[str, bytes] = saved.files

    def write(self, folder: Path) -> None:
        self._stage("checkpoint")
        self._saved.write(folder)


class Holds:
    """The test's end, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not folder.exists():
            folder.mkdir()
            os.mkfifo(folder / NEVER)

    @property
    def environment(self) -> dict[str, str]:
        """For the job's processes."""
        return {HELD_RANKS: str(self._folder)}

    def hold(self, stage: str, rank: int) -> int:
        """From now on that rank stays where it comes to `stage`; returns what `held` takes."""
        os.mkfifo(self._folder / f"{stage}.{rank}")
        return os.open(self._folder / f"{stage}.{rank}", os.O_RDONLY | os.O_NONBLOCK)

    def held(self, stage: str, rank: int, handle: int, limit_s: float) -> int:
        """The pid of the rank that came there; the next one goes on."""
        try:
            assert select.select([handle], [], [], limit_s)[0], f"no rank {rank} came to {stage} within {limit_s} s"
            return int(os.read(handle, 32))
        finally:
            (self._folder / f"{stage}.{rank}").unlink()
            os.close(handle)

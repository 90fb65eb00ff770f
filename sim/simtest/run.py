"""One seed from start to verdict; the same seed gives the same run, to the last event."""

import asyncio
import gc
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rubato.actors.envs.manager
import rubato.actors.gateway.answering
import rubato.actors.gateway.renderers
import rubato.actors.gateway.session
import rubato.bus.link
import rubato.runtime.courier
import rubato.runtime.observe.figures
from rubato.actors.samples.journal import ENDS, read_records
from rubato.actors.samples.run_files import read_lines
from rubato.sim.simtest import agents
from rubato.sim.simtest import faults as drawn
from rubato.sim.simtest import setup as setups
from rubato.sim.simtest.checks import InvariantChecks, Violation
from rubato.sim.simtest.faults import Fault
from rubato.sim.simtest.inject import Injector
from rubato.sim.simtest.journal import Record
from rubato.sim.simtest.loop import SimLoop
from rubato.sim.simtest.setup import Setup
from rubato.sim.simtest.toys import DrawnSecrets, renderer, write_tokenizer
from rubato.sim.simtest.world import World
from rubato.sim.virtual import Deadlock, run_virtual

PROGRESS_S = 75.0
"""Longest wait for a step once nothing is disturbed: leases and tickets have to lapse, and asks to be tried again."""

LIMIT_S = 1200.0
"""Virtual seconds of a whole run."""

DRAIN_S = 60.0

BEAT_S = 0.05
"""Between signs of life of a stream: many turns take longer."""

LEAVE_S = 60.0
"""From the end of a job until agents from outside have heard of it."""

SLOTS_S = 30
"""From the end of a job until nothing of it runs: a lost cancel is told again as leases are renewed, and links have to heal."""


@dataclass
class SeedOutcome:
    """How a seed went. `hash` covers every bus and store event."""

    seed: int
    hash: str
    steps: int
    events: int
    fired: int
    virtual_s: float
    violation: Violation | None
    faults: list[Fault]
    lines: list[str] = field(default_factory=list)


class Bench:
    """What all seeds of one process share: the tokenizer's folder and a place for run folders, in memory where there is one."""

    def __init__(self) -> None:
        place = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="rubato-sim-", dir=place if place.is_dir() else None))
        self.model = write_tokenizer(self.folder / "model")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def faults_of(seed: int, kinds: Sequence[str], rounds: int = 1, *, setup: Setup | None = None) -> list[Fault]:
    """That the seed draws; in a job of another `setup` than its own where one is given."""
    setup = setup or setups.draw(seed)
    return drawn.draw(seed, setup.names, setup.steps, kinds, rounds)


def run(bench: Bench, seed: int, faults: list[Fault], *, keep: bool = False, setup: Setup | None = None) -> SeedOutcome:
    """Run `seed` with `faults`; in a job of another `setup` than the seed's where one is given."""
    setup = setup or setups.draw(seed)
    folder = bench.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    loop = SimLoop(seed, limit_s=LIMIT_S)
    record = Record(loop.time, keep=keep)
    monitor = InvariantChecks(setup.alpha, setup.window)
    monitor.now = loop.time
    job = SeedJob(setup, faults, folder, bench.model, record, monitor)
    gc.disable()
    try:
        with settings(setup):
            run_virtual(job.main, loop=loop)
    except Deadlock as error:
        monitor.fail("progress", str(error))
    except Exception as error:  # noqa: BLE001 - whatever was not caught is a finding
        monitor.fail("nothing is left to the loop", repr(error))
    finally:
        gc.enable()
    injector = job.injector
    return SeedOutcome(
        seed,
        record.hash,
        job.world.step,
        record.num_events,
        injector.fired if injector else 0,
        loop.time(),
        monitor.violation,
        faults,
        record.lines,
    )


RARE: dict[tuple[object, str], object] = {(rubato.runtime.courier, "SWEEP_S"): 0.5, (rubato.runtime.observe.figures, "LAG_PERIOD_S"): 60.0}
"""What only costs time."""


class replaced:
    """While the block runs, attributes of modules, by (module, name), are these."""

    def __init__(self, new: Mapping[tuple[object, str], object]) -> None:
        self._new = new
        self._old: dict[tuple[object, str], object] = {}

    def __enter__(self) -> None:
        for (module, name), value in self._new.items():
            self._old[(module, name)] = getattr(module, name)
            setattr(module, name, value)

    def __exit__(self, *_: object) -> None:
        for (module, name), value in self._old.items():
            setattr(module, name, value)


def settings(setup: Setup) -> replaced:
    """Small windows of credit make the accounting matter; managers share one renderer; what only costs time is rare."""
    new: dict[tuple[object, str], object] = {
        (rubato.bus.link, "WINDOW_MESSAGES"): setup.window,
        (rubato.bus.link, "REGRANT_MESSAGES"): max(1, setup.window // 2),
        (rubato.actors.envs.manager, "renderer_of"): renderer,
        (rubato.actors.gateway.answering, "BEAT_S"): BEAT_S,
        (rubato.actors.gateway.renderers, "renderer_of"): renderer,
        (rubato.actors.gateway.session, "secrets"): DrawnSecrets(setup.seed),
    }
    return replaced(new | RARE)


class SeedJob:
    """The main task of a seed."""

    world_class = World
    progress_s = PROGRESS_S

    def __init__(self, setup: Setup, faults: list[Fault], folder: Path, model: Path, record: Record, monitor: InvariantChecks) -> None:
        self.setup, self.faults, self.folder, self.model = setup, faults, folder, model
        self.record, self.monitor = record, monitor
        self.world: World
        self.injector: Injector | None = None

    async def main(self) -> None:
        self.world = world = self.world_class(self.setup, self.folder, self.model, self.record, self.monitor)
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(), name="watch")
                await world.run(tasks)
                playing = tasks.create_task(agents.play(world, self.monitor), name="agents") if self.setup.sessions else None
                self.injector = Injector(world, self.faults, self.monitor)
                async with asyncio.TaskGroup() as faults:
                    self.injector.start(faults)
                    await self._finished()
                await world.settled()
                if playing is not None:
                    await self._left(playing)
                await self._slots_free()
                self._check()
                async with asyncio.timeout(DRAIN_S):
                    await world.stop()
                watch.cancel()
        except* TimeoutError:
            self.monitor.fail("drain", f"not drained within {DRAIN_S:g} s: {world.waiting()}")
        except* Violation:
            pass
        if self.monitor.violation is None:
            await self._judge()

    async def _finished(self) -> None:
        while self.world.ending is None:
            await self.world.moved.wait()

    async def _left(self, playing: "asyncio.Task[None]") -> None:
        """The job is over, and agents hear of it."""
        _, running = await asyncio.wait((playing,), timeout=LEAVE_S)
        if running:
            self.monitor.fail("every request ends", f"agents still ask {LEAVE_S:g} s after the end of the job: {self.world.waiting()}")

    async def _slots_free(self) -> None:
        """The job is over: what still ran is cancelled, and nothing holds a decode slot or a place in a manager."""
        for _ in range(SLOTS_S):
            if not self.world.running():
                return
            await asyncio.sleep(1.0)
        self.monitor.fail("no slot leaks", f"{', '.join(self.world.running())} after the end of the job")

    async def _watch(self) -> None:
        """Ends everything at the first violation, and looks for one every second."""
        loop: Any = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            injector = self.injector
            self._check()
            since = max(self.world.row_at, injector.healed_at if injector else 0.0)
            if (injector is None or not injector.active) and loop.time() - since > self.progress_s:
                text = f"no step for {self.progress_s:g} s after step {self.world.step}: {self.world.waiting()}"
                self.monitor.fail("progress", text)
            if self.monitor.violation is not None:
                loop.thaw_all()
                raise self.monitor.violation

    def _check(self) -> None:
        self.monitor.check(list(self.world.processes.values()), asyncio.get_running_loop().time())

    async def _judge(self) -> None:
        """Everything is over: what is left behind?"""
        state, fail = self.world.store.state, self.monitor.fail
        if left := await state.leases("actor/"):
            fail("drain leaves nothing", f"leases of {', '.join(left)}")
        tasks = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if tasks:
            fail("drain leaves nothing", f"tasks {', '.join(sorted(tasks))}")
        entries: list[tuple[int, bytes]] = []
        while found := await state.read(ENDS, len(entries)):
            entries += found
        self.monitor.ended(entries, [json.loads(line) for line in read_lines(self.folder)])
        self.monitor.balanced(*await read_records(state), entries)
        rows = [row["step"] for row in _lines(self.folder / "metrics.jsonl")]
        if rows != list(range(1, self.setup.steps + 1)):
            fail("gapless steps", f"metrics.jsonl has rows {rows}")


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

"""Requests move all the time between two engines of a real job, and whoever takes part is killed at each stage of a move."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubato.actors.training.base_model import make_tokenizer, write_tokenizer
from rubato.sim.audit import AuditLimits, audit
from tests.jobs import SMALL, clean_environment, left_behind, rubato

pytestmark = pytest.mark.slow

LIMIT_S = 90.0

KILLS = [("prepare", "proxy"), ("prepared", "source"), ("prepared", "target"), ("take", "target"), ("taken", "source"), ("taken", "proxy")]
"""Stage and victim; tests/simulation/test_moves.py has all of them, in virtual time."""

STAGED = """
import asyncio
import os
import signal
from pathlib import Path

from rubato.actors import plugins
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.generation import Inspect
from rubato.actors.messages.moves import Move, Moved, MovePrepared, NotMoved, PrepareMove, TakeMove
from rubato.actors.moves.departures import EngineMoves
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.errors import AskFailed
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, handler

PLACE = Path("PLACE")


def note(file, line):
    with (PLACE / file).open("a") as out:
        out.write(line + "\\n")


class StagedProxy(LLMProxy):
    async def on_start(self):
        await super().on_start()
        note("lives", self.name)


class StagedEngine(EngineWorker):
    async def on_start(self):
        await super().on_start()
        note("lives", self.name)

    def _pass(self, stage):
        try:
            os.rename(PLACE / stage, PLACE / "order")
        except OSError:
            return
        other = "engine-1" if self.name == "engine-2" else "engine-2"
        name = {"source": self.name, "target": other, "proxy": "llm_proxy-1"}[(PLACE / "order").read_text()]
        note("killed", name)
        os.kill(self.directory.find(name).pid, signal.SIGKILL)

    def make(self, path):
        return StagedMoves(self) if path == plugins.ENGINE_MOVES else super().make(path)


class StagedMoves(EngineMoves):
    @handler(concurrency=64, outlives_asker=True)
    async def prepare_move(self, request: PrepareMove) -> MovePrepared | NotMoved:
        self.worker._pass("prepare")
        reply = await super().prepare_move(request)
        self.worker._pass("prepared")
        return reply

    @handler(concurrency=64)
    async def take_move(self, request: TakeMove) -> Ack | NotMoved:
        self.worker._pass("take")
        reply = await super().take_move(request)
        self.worker._pass("taken")
        return reply


class Mover(Actor):
    role = "mover"
    needs = ("llm_proxy", "engine")

    async def on_start(self):
        self.spawn(self._move(), name="mover")

    async def _move(self):
        while True:
            for source, target in (("engine-1", "engine-2"), ("engine-2", "engine-1")):
                try:
                    running = (await self.ref(source).ask(Inspect(), timeout=2.0)).running
                    orders = [Move(request_id, target) for request_id in running[:2]]
                    asked = [self.ref("llm_proxy").ask(order, timeout=30.0, retry=False) for order in orders]
                    for reply in await asyncio.gather(*asked, return_exceptions=True):
                        if isinstance(reply, Moved):
                            note("moved", target)
                except AskFailed:
                    pass
                await asyncio.sleep(0.02)
"""

JOB = (
    SMALL.replace("rubato.actors.engines.worker:EngineWorker\"", "staged.py:StagedEngine\", count: 2, restart_window_s: 0.001")
    .replace("rubato.actors.proxy.proxy:LLMProxy\"", "staged.py:StagedProxy\", restart_window_s: 0.001")
    .replace("  trainer:", '  mover: {class: "staged.py:Mover"}\n  trainer:')
    .replace("token_s: 0.0", f"token_s: 0.02, stop_share: 0.0, vocab_size: {make_tokenizer().get_vocab_size()}")
    .replace("max_new_tokens: 2", "max_new_tokens: 24")
)  # fmt: skip


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "staged.py").write_text(STAGED.replace('PLACE")', f'{tmp_path}")'))
    return tmp_path


@pytest.fixture
def launcher(place: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "job.yaml", f"model.path={place / 'model'}"]
    with (place / "out").open("wb") as out:
        launcher = subprocess.Popen(
            [*command, "run.steps=100000", "--run-dir", "run"],
            cwd=place, env=clean_environment(), stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        yield launcher
    finally:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(30)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


@pytest.mark.timeout(400)
def test_whoever_is_killed_at_whatever_stage_of_a_move_the_run_goes_on_and_every_rollout_has_one_fate(place, launcher):
    def further(file: str, than: int, after: str) -> None:
        """The processes under test can only be watched from outside."""
        deadline = time.perf_counter() + LIMIT_S
        while len(lines(place / file)) <= than:
            assert launcher.poll() is None, (place / "out").read_text()
            assert time.perf_counter() < deadline, f"nothing new in {file} within {LIMIT_S} s after {after}"
            time.sleep(0.02)  # noqa: TID251 - another process's progress can't be awaited

    further("moved", 2, "the launch")
    for stage, victim in KILLS:
        before = {file: len(lines(place / file)) for file in ("lives", "moved")}
        (place / "order.new").write_text(victim)
        (place / "order.new").rename(place / stage)
        for file, num in before.items():
            further(file, num, f"the {victim} was killed at {stage}")
    rows = "run/metrics.jsonl"
    further(rows, len(lines(place / rows)) + 1, "the last kill")
    launcher.send_signal(signal.SIGINT)
    launcher.wait(30)
    steps = len(lines(place / rows)) + 1
    resumed = rubato("launch", "job.yaml", f"run.steps={steps}", "--run-dir", "run", "--resume", cwd=place)

    assert resumed.code == 0, resumed.err
    found = audit(place / "run", AuditLimits(steps, batch_groups=2, group_size=2, alpha=1, durable=False))
    assert found.problems == []
    assert not left_behind(place)

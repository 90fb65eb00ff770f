"""kill -9 of the orchestrator, the proxy and both engines at each stage of a merge, a split and a move, all in real processes of one job."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rubato.actors.messages.generation import Completion, EngineStatus, Generate, Inspect, Sampling
from rubato.bus.errors import AskFailed
from rubato.bus.message import pack_i32
from rubato.runtime.errors import LaunchError
from rubato.runtime.guest import join
from rubato.runtime.launch.card import running
from rubato.runtime.registry import list_actors
from tests import faulty_fleet
from tests.faulty_fleet import ARMED, DONE, Change
from tests.jobs import clean_environment, left_behind, rubato

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
LENGTH = 300
STOP = 1
KINDS = range(4)
APART, MERGED = {"engine-1": 1, "engine-2": 1}, {"engine-1": 2, "engine-2": 0}
ROLES = ("orchestrator-1", "llm_proxy-1", "engine-1", "engine-2")
PATH = Path(faulty_fleet.__file__)

JOB = {
    "run": {"name": "fleet"},
    "actors": {
        "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy", "restarts": 1000, "restart_window_s": 1},
        "engine": {"class": f"{PATH}:FaultyWorker", "count": 2, "restarts": 1000, "restart_window_s": 1},
        "orchestrator": {"class": f"{PATH}:ToldOrchestrator", "restarts": 1000, "restart_window_s": 1},
    },
    "orchestrator": {"enabled": True, "planners": ["switch"], "interval_s": 0.2},
    "report": {"finish": ""},
    "engine": {
        "kind": "scripted",
        "num_slots": 64,
        "max_len": 4096,
        "stream_every": 8,
        "scripted": {"told_lengths": True, "vocab_size": 65536},
        "pace": {"hardware": "h800", "model": "qwen2.5-14b", "scale": 0.4},
    },
}


class Case(NamedTuple):
    """What is changed, and the stages of it at which somebody dies."""

    name: str
    before: dict[str, int]
    wanted: dict[str, int]
    stages: tuple[str, ...]


MERGE = Case(
    "merge", APART, MERGED, ("PrepareMove", "MovePrepared", "TakeMove", "MoveTaken", "SleepEngine", "Asleep", "Reconfigure", "Reconfigured")
)
SPLIT = Case("split", MERGED, APART, ("Reconfigure", "Reconfigured", "WakeEngine", "Awake"))
MOVE = Case("move", APART, {}, ("PrepareMove", "MovePrepared", "TakeMove", "MoveTaken"))


SOME = (
    (MERGE, "PrepareMove", "orchestrator-1"),
    (MERGE, "TakeMove", "engine-1"),
    (MERGE, "SleepEngine", "llm_proxy-1"),
    (MERGE, "Asleep", "engine-1"),
    (MERGE, "Reconfigure", "engine-2"),
    (SPLIT, "Reconfigure", "llm_proxy-1"),
    (SPLIT, "WakeEngine", "orchestrator-1"),
    (SPLIT, "WakeEngine", "engine-2"),
    (MOVE, "PrepareMove", "engine-2"),
    (MOVE, "TakeMove", "llm_proxy-1"),
    (MOVE, "MoveTaken", "orchestrator-1"),
)
"""Each victim in every change, at stages that differ; the slow test has all others."""


class Hand:
    """Asks, changes, kills, and looks at what is left, from outside the job."""

    def __init__(self, me, folder):
        self._me, self._folder = me, folder
        self._num = 0
        self._right: dict[int, bytes] = {}

    async def ask(self, kind: int) -> None:
        """One answer, of exactly the tokens that the first one of this kind had, which nobody disturbed."""
        self._num += 1
        name = f"r{self._num}"
        prompt = pack_i32([LENGTH, kind, *[7] * 30])
        sampling = Sampling(2048, temperature=0.0, stop_token_ids=(STOP,))
        reply = await self._me.ref("llm_proxy").ask(Generate(name, name, prompt, sampling), timeout=LIMIT_S)
        assert isinstance(reply, Completion), reply
        assert len(reply.tokens.ids) == 4 * LENGTH
        assert reply.tokens.ids == self._right.setdefault(kind, reply.tokens.ids)
        assert [(span.start, span.end) for span in reply.tokens.spans] == [(0, LENGTH)]

    async def engines(self) -> list[EngineStatus]:
        """As they say themselves, once all do."""
        return [await self._me.ref(f"engine-{number}").ask(Inspect(), timeout=LIMIT_S) for number in (1, 2)]

    async def change(self, degrees: dict[str, int], moves: dict[str, str]) -> None:
        await self._me.ref("orchestrator").ask(Change(degrees, moves), timeout=LIMIT_S, retry=False)

    async def begin(self, shape: dict[str, int]) -> None:
        if [each.info.degree * (not each.info.asleep) for each in await self.engines()] != list(shape.values()):
            await self.change(shape, {})

    async def pid(self, name: str) -> int:
        return next((each.pid for each in await list_actors(self._me.store) if each.name == name), 0)

    async def until(self, what: str, condition) -> Any:
        """What `condition` returns once it is true; other processes can only be watched."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not (found := await condition()):  # noqa: ASYNC110 - other processes can only be watched
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{what} did not happen; engines are {await self.engines()}")
        return found

    async def all_run(self) -> list[EngineStatus]:
        """Engines once they have all requests, two each where both are awake."""

        async def found():
            engines = await self.engines()
            return engines if sum(len(each.running) for each in engines) == len(KINDS) else []

        return await self.until("the start of all requests", found)

    async def is_right(self) -> bool:
        """Each of both GPUs is used, once."""
        return sum(each.info.degree for each in await self.engines() if not each.info.asleep) == 2

    async def case(self, case: Case, stage: str, victim: str) -> None:
        """`victim` dies at `stage`: nothing is lost, nothing doubled, and both GPUs are used again."""
        await self.begin(case.before)
        pid = await self.pid(victim)
        async with asyncio.TaskGroup() as tasks:
            for kind in KINDS:
                tasks.create_task(self.ask(kind))
            first, second = await self.all_run()
            leaves = second.running[:1] if case is MOVE else ()
            half = first.running[::2] if case is SPLIT else ()
            (self._folder / ARMED).write_text(f"{stage} {victim}")
            with contextlib.suppress(AskFailed):
                await self.change(case.wanted, dict.fromkeys(leaves, "engine-1") | dict.fromkeys(half, "engine-2"))
            await self.until(f"the death of {victim}", self._is_dead)
        (self._folder / DONE).unlink()
        await self.until(f"the restart of {victim}", lambda: self._is_back(victim, pid))
        await self.until("that all GPUs are used", self.is_right)

    async def _is_dead(self) -> bool:
        return (self._folder / DONE).exists()

    async def _is_back(self, victim: str, pid: int) -> bool:
        return await self.pid(victim) not in (0, pid)


def _is_up(folder: Path) -> bool:
    try:
        return bool(running(folder))
    except LaunchError:
        return False


@contextlib.asynccontextmanager
async def fleet(place: Path):
    """A job of two engines that nobody but the test gives work."""
    (place / "fleet.yaml").write_text(json.dumps(JOB))
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "fleet.yaml", "--run-dir", "run"]
    with (place / "said").open("wb") as said:
        launcher = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            command, cwd=place, env=clean_environment(), stdout=said, stderr=said
        )
    try:
        async with asyncio.timeout(LIMIT_S):
            while not _is_up(place / "run"):
                assert launcher.poll() is None, (place / "said").read_text()
                await asyncio.sleep(0.1)
        async with join(place / "run") as me:
            yield Hand(me, place / "run")
    finally:
        rubato("stop", "--run", place / "run", "--now", cwd=place)
        try:
            launcher.wait(30)
        finally:
            launcher.kill()
            launcher.wait()


async def outlive(place: Path, drawn: Sequence[tuple[Case, str, str]]) -> None:
    """All of them, one after another, in one job."""
    async with fleet(place) as hand:
        await hand.until("both engines", hand.is_right)
        async with asyncio.TaskGroup() as tasks:
            for kind in KINDS:
                tasks.create_task(hand.ask(kind))
        for each in drawn:
            await hand.case(*each)
    assert not left_behind(place)


@pytest.mark.timeout(400)
async def test_whoever_dies_in_a_switch_or_move_nothing_is_lost_or_doubled(tmp_path):
    await outlive(tmp_path, SOME)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_whoever_dies_at_any_other_stage_of_a_switch_or_move_nothing_is_lost_or_doubled(tmp_path):
    every = [(case, stage, role) for case in (MERGE, SPLIT, MOVE) for stage in case.stages for role in ROLES]
    await outlive(tmp_path, [each for each in every if each not in SOME])

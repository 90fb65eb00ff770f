"""A term of ranks: the end of one ends it for all, whatever they are at, and others begin the next; what a rank raises keeps its meaning."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest

from rubato.actors.config import TrainSection
from rubato.actors.ranks import head
from rubato.actors.ranks.head import RankedEngine, RankRaised, RanksLost
from rubato.actors.ranks.rank import RANK_ENGINES, TrainRank
from rubato.actors.scripted.rank import ScriptedRank
from rubato.actors.training.train_engine import TrainError, image_of
from rubato.runtime.errors import ExitCode, NotRunning
from rubato.runtime.registry import bury
from tests.simulation.test_weights_across_hosts import Job, Node, Trainer
from tests.unit.actors.ranks.test_head import OnHost

TRAIN = TrainSection(kind="scripted", mesh={"shard": 2}, scripted={"weights_mib": 1, "step_s": 0.0})  # type: ignore[arg-type]

LONGEST_S = 20.0

STAGES = {
    "load": lambda engine, folder: engine.load(folder, None),
    "train": lambda engine, folder: engine.train(1, []),
    "logprobs": lambda engine, folder: engine.logprobs([[1, 2]]),
    "export": lambda engine, folder: image_of(engine),
    "saved": lambda engine, folder: engine.snapshot(term=3)(folder / "checkpoints" / "step_1"),
}
"""What a rank is at, and the call of the trainer that brings it there."""


class Met(ScriptedRank):
    """The first rank stays in a stage, as in a collective, until it may go on; or it raises there."""

    stage = ""
    there, may_go = threading.Event(), threading.Event()
    error: Exception | None = None

    def is_lost(self, error):
        return isinstance(error, ConnectionError)

    def _meet(self, stage):
        if stage == Met.stage and self._rank == 0:
            Met.there.set()
            if Met.error is not None:
                raise Met.error
            assert Met.may_go.wait(LONGEST_S)

    def load(self, *given):
        self._meet("load")
        return super().load(*given)

    def train(self, *given):
        self._meet("train")
        return super().train(*given)

    def logprobs(self, sequences, *given):
        self._meet("logprobs")
        return [[0.0] * len(tokens) for tokens in sequences]

    def export(self, *given):
        self._meet("export")
        return super().export(*given)

    def saved(self, *given):
        self._meet("saved")
        return super().saved(*given)


class Rank(TrainRank):
    """Its process is the test's."""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.ended = asyncio.Queue()

    def end_process(self, code):
        self.ended.put_nowait(code)


@pytest.fixture
def met(monkeypatch):
    """The ranks' engine; nobody waits before `stage` is set."""
    monkeypatch.setitem(RANK_ENGINES, "scripted", f"{__name__}:Met")
    monkeypatch.setattr(head, "CAUSE_S", 0.0)
    monkeypatch.setattr(Met, "stage", "")
    monkeypatch.setattr(Met, "error", None)
    Met.there.clear()
    Met.may_go.clear()
    yield Met
    Met.may_go.set()


async def begun(made, folder):
    """The TrainEngine of a trainer and two ranks that were just started."""
    for name in ("trainer_rank-1", "trainer_rank-2"):
        await made.start(Rank, name, "a", TrainRank.Config(train=TRAIN))
    await made.start(Trainer, "trainer-1", "a")
    engine = RankedEngine(OnHost(made.actors["trainer-1"]), TRAIN, asyncio.get_running_loop())
    await asyncio.to_thread(engine.load, folder, None)
    return engine


@asynccontextmanager
async def job(folder):
    async with asyncio.TaskGroup() as tasks:
        made = Job(tasks, folder)
        await made.start(Node, "node-1", "a")
        yield made
        for task in made.serving.values():
            task.cancel()


async def kill(made, *names):
    """As a node agent does that sees the processes end."""
    for name in names:
        made.serving.pop(name).cancel()
        await bury(made.store, name)


@pytest.mark.parametrize("stage", STAGES)
async def test_the_end_of_a_rank_ends_the_term_of_all_in_each_stage_and_others_begin_the_next(tmp_path, met, stage):
    async with job(tmp_path) as made, asyncio.timeout(2 * LONGEST_S):
        engine = await begun(made, tmp_path)
        other = made.actors["trainer_rank-1"]
        met.stage = stage

        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(lost(engine, stage, tmp_path))
            await asyncio.to_thread(met.there.wait, LONGEST_S)
            await kill(made, "trainer_rank-2")
        code = await other.ended.get()

        met.stage = ""
        met.may_go.set()
        await kill(made, "trainer_rank-1", "trainer-1")
        again = await begun(made, tmp_path)
        trained = await asyncio.to_thread(again.train, 1, [])

    assert calling.result() == "the rank trainer_rank-2 is gone: all begin again with the newest checkpoint"
    assert code == ExitCode.FAILED
    assert again._term > engine._term
    assert trained.num_tokens == 0
    assert not (tmp_path / "checkpoints" / "step_1").exists()


async def lost(engine, stage, folder):
    with pytest.raises(RanksLost) as told:
        await asyncio.to_thread(STAGES[stage], engine, folder)
    return str(told.value)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_thread_that_waits_for_ranks_waits_no_longer_than_the_trainer_lives(tmp_path, met, stage):
    async with job(tmp_path) as made, asyncio.timeout(LONGEST_S):
        engine = await begun(made, tmp_path)
        met.stage = stage

        calling = raised(STAGES[stage], engine, tmp_path)
        await asyncio.to_thread(met.there.wait, LONGEST_S)
        await kill(made, "trainer-1")
        told = await asyncio.wrap_future(calling)
        late = await asyncio.wrap_future(raised(STAGES[stage], engine, tmp_path))

    assert [type(error) for error in (told, late)] == [NotRunning, NotRunning]
    assert str(told) == "trainer-1 ended before its ranks answered"


def raised(call, *given):
    """What the call raises, in a thread that the test does not wait for."""
    found = Future()

    def run():
        try:
            call(*given)
        except Exception as error:  # noqa: BLE001 - the test compares it
            found.set_result(error)

    threading.Thread(target=run, daemon=True).start()
    return found


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (TrainError("the model can't be read"), TrainError, "^the model can't be read$"),
        (
            ConnectionError("closed by the other"),
            RanksLost,
            "trainer_rank-1 waited for another in vain: ConnectionError: closed by the other",
        ),
        (ValueError("of this batch"), RankRaised, "trainer_rank-1: ValueError: of this batch"),
        (OSError(28, "No space left on device"), OSError, "No space left on device"),
    ],
)
async def test_what_a_rank_raises_is_told_as_what_it_is(tmp_path, met, error, kind, sentence):
    async with job(tmp_path) as made, asyncio.timeout(2 * LONGEST_S):
        engine = await begun(made, tmp_path)
        met.stage, met.error = "train", error

        with pytest.raises(kind, match=sentence):
            await asyncio.to_thread(STAGES["train"], engine, tmp_path)

"""The trainer on a real kernel over the memory transport, with a toy for a model and a sample buffer that never evaluates."""

import asyncio
import json
import math

import msgspec
import pytest

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.config import CheckSection, EvalSection, ModelSection, TrainSection
from rubato.actors.messages.generation import GENERATION, VersionSpan
from rubato.actors.messages.samples import (
    Advance,
    Batch,
    Claim,
    Close,
    Commit,
    DrawTerm,
    EvalResult,
    Evaluate,
    NotReady,
    PolicyState,
    Segment,
    StepRaised,
    Term,
    Ticket,
    Trajectory,
)
from rubato.actors.messages.weights import HoldWeights, WeightsHeld
from rubato.actors.training.trainer import CheckpointSection, Trainer
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig, RunSection
from rubato.runtime.errors import first_cause
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import Drain
from rubato.runtime.observe.log import logger
from rubato.sim.simtest.network import FaultPlan, FaultyNetwork
from rubato.sim.simtest.toys import ToyTrainEngine
from rubato.sim.virtual import run_virtual

SPANS = (VersionSpan(0, 0, 1),)
TRAJECTORY = Trajectory(Ticket("t", "g", 1, 0, 0, 0), (Segment(bytes(4), b"\1", bytes(4), SPANS),), 0.0, 1, False, 0.1)


class Buffer(Actor):
    role = "sample_buffer"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.evaluating = asyncio.Event()
        self.committed = []

    @handler
    async def draw(self, request: DrawTerm) -> Term:
        return Term(request.at_least, request.step, ())

    @handler
    async def advance(self, request: Advance) -> PolicyState:
        return PolicyState(request.step, 1)

    @handler
    async def claim(self, request: Claim) -> Batch | NotReady:
        return Batch.of(request.step, ((msgspec.msgpack.encode(TRAJECTORY),),), b"receipt of step %d" % request.step)

    @handler(concurrency=4)
    async def evaluate(self, request: Evaluate) -> EvalResult | NotReady:
        self.evaluating.set()
        return await asyncio.get_running_loop().create_future()

    @handler
    async def commit(self, request: Commit) -> Ack:
        self.committed.append(request.step)
        return Ack()

    @handler
    async def close(self, request: Close) -> Ack:
        return Ack()


class HeldEngine(Actor):
    role = "engine"
    provides = frozenset({GENERATION})

    @handler
    async def hold(self, request: HoldWeights) -> WeightsHeld:
        return WeightsHeld(self.name, request.for_s > 0)


UNCHECKED = CheckSection(enabled=False)


class ToyTrainer(Trainer):
    def _build(self):
        return ToyTrainEngine(lambda *_: None, lambda *_: None)


def kernel_of(cls, settings, network, store, run, **more):
    name = f"{cls.role}-1"
    return Kernel(
        cls,
        settings,
        name=name,
        incarnation=1,
        run=run,
        transport=MemoryTransport(Identity("test", name, 1), network),
        store=store,
        blobs=MemoryBlobStore(),
        log=logger("rubato.test"),
        **more,
    )


def test_a_drain_in_the_last_evaluation_saves_the_last_step_with_its_row_and_does_not_wait(tmp_path):
    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", tmp_path, 7, 2)
        config = ToyTrainer.Config(check=CheckSection(enabled=False), eval=EvalSection(every=0), checkpoint=CheckpointSection(every=5))
        async with asyncio.TaskGroup() as tasks:
            made = {}
            for cls, settings in ((Buffer, ActorConfig()), (HeldEngine, ActorConfig()), (ToyTrainer, config)):
                kernel = kernel_of(cls, settings, network, store, run)
                made[cls] = kernel.build(), tasks.create_task(kernel.serve())
                await kernel.ready.wait()
            buffer, serving = made[Buffer]
            engine = made[HeldEngine][1]
            await buffer.evaluating.wait()
            began = asyncio.get_running_loop().time()

            await buffer.ref("trainer-1").ask(Drain(), timeout=5)
            await asyncio.wait([made[ToyTrainer][1]])

            serving.cancel()
            engine.cancel()
            return buffer.committed, asyncio.get_running_loop().time() - began

    committed, took_s = run_virtual(main)

    assert committed == [2]
    assert took_s < 20.0  # virtual seconds: what a kernel allows for a drain
    assert checkpoints.check(tmp_path / "checkpoints" / "step_2").step == 2
    assert checkpoints.newest_receipts(tmp_path / "checkpoints") == [b"receipt of step 1", b"receipt of step 2"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


class Halting(Buffer):
    """Answers `halted` of step 1 only once it heard `until`, and writes down what it hears, and what it answers."""

    halted, until = "", ""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.heard = []
        self.may = asyncio.Event()

    async def told(self, what, step):
        self.heard.append(f"{what} {step}")
        if self.heard[-1] == self.until:
            self.may.set()
        if (what, step) == (self.halted, 1):
            await self.may.wait()
            self.heard.append(f"{what} 1 is answered")

    @handler(concurrency=4)
    async def advance(self, request: Advance) -> PolicyState:
        await self.told("advance", request.step)
        return await super().advance(request)

    @handler(concurrency=4)
    async def claim(self, request: Claim) -> Batch | NotReady:
        await self.told("claim", request.step)
        return await super().claim(request)

    @handler(concurrency=4)
    async def commit(self, request: Commit) -> Ack:
        await self.told("commit", request.step)
        return await super().commit(request)

    @handler
    async def close(self, request: Close) -> Ack:
        self.heard.append("close")
        return Ack()


def heard_by(halting, folder, steps=3):
    """What the buffer hears of a run that saves every step."""

    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", folder, 7, steps)
        config = ToyTrainer.Config(
            check=CheckSection(enabled=False), eval=EvalSection(every=0, final_num_tasks=0), checkpoint=CheckpointSection(every=1)
        )
        async with asyncio.TaskGroup() as tasks:
            buffer, trainer = (kernel_of(*what, network, store, run) for what in ((halting, ActorConfig()), (ToyTrainer, config)))
            heard = buffer.build().heard
            serving = [tasks.create_task(kernel.serve()) for kernel in (buffer, trainer)]
            await asyncio.sleep(60.0)
            for task in serving:
                task.cancel()
        return heard

    return run_virtual(main)


def test_the_next_batch_is_claimed_and_trained_on_while_a_version_is_announced(tmp_path):
    class Slow(Halting):
        halted, until = "advance", "claim 2"

    heard = heard_by(Slow, tmp_path)

    assert heard.index("claim 2") < heard.index("advance 1 is answered") < heard.index("advance 2")
    told = dict.fromkeys(each for each in heard if each.startswith("advance") and "answered" not in each)
    assert list(told) == [f"advance {version}" for version in range(4)]
    assert heard[-1] == "close"


def test_a_checkpoint_is_written_beside_training_one_at_a_time_and_all_before_the_end(tmp_path):
    class Slow(Halting):
        halted, until = "commit", "claim 2"

    heard = heard_by(Slow, tmp_path)

    assert heard.index("claim 2") < heard.index("commit 1 is answered") < heard.index("commit 2")
    assert heard.index("commit 3") < heard.index("close")


class Evaluating(Buffer):
    """Version 4 is the best, and the further from it the worse. A batch and an evaluation each take their time."""

    @handler
    async def claim(self, request: Claim) -> Batch | NotReady:
        await asyncio.sleep(1.0)
        return await super().claim(request)

    @handler(concurrency=4)
    async def evaluate(self, request: Evaluate) -> EvalResult | NotReady:
        await asyncio.sleep(3.5)
        return EvalResult(request.version, ((10.0 - abs(request.version - 4),),), 0)

    @handler
    async def close(self, request: Close) -> Ack:
        return Ack()


class Committing(Evaluating):
    """Takes long over each commit."""

    @handler(concurrency=4)
    async def commit(self, request: Commit) -> Ack:
        await asyncio.sleep(2.5)
        return await super().commit(request)


class Unfilled(Committing):
    """Has one batch, and holds the ask for another one back for as long as it may."""

    @handler(concurrency=4)
    async def claim(self, request: Claim) -> Batch | NotReady:
        if request.step == 1:
            return await super().claim(request)
        await asyncio.sleep(request.wait_s)
        return NotReady(0, 1, "no group", request.step - 1)


def drained_after(folder, seconds, trainer_class=ToyTrainer, buffer_class=Committing, waited_s=None, *, check=UNCHECKED):
    """(steps that were committed, notices of a failed end) of a run that saves each step and is drained while it commits one."""

    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", folder, 7, 100)
        config = ToyTrainer.Config(check=check, eval=EvalSection(every=0), checkpoint=CheckpointSection(every=1, keep=9))
        ends = []
        async with asyncio.TaskGroup() as tasks:
            buffer = kernel_of(buffer_class, ActorConfig(), network, store, run)
            trainer = kernel_of(trainer_class, config, network, store, run)
            committed = buffer.build().committed
            trainer.build().finish = lambda reason, failed=False: ends.append(reason)
            engine = kernel_of(HeldEngine, ActorConfig(), network, store, run)
            serving = [tasks.create_task(kernel.serve()) for kernel in (buffer, trainer, engine)]
            await trainer.ready.wait()
            await asyncio.sleep(seconds)
            await buffer.ref("trainer-1").ask(Drain(), timeout=30)
            drained = asyncio.get_running_loop().time()
            await asyncio.wait(serving[1:2])
            (waited_s if waited_s is not None else []).append(asyncio.get_running_loop().time() - drained)
            for one in (serving[0], serving[2]):
                one.cancel()
        return committed, ends

    return run_virtual(main)


@pytest.mark.parametrize("seconds", [1.5, 3.0, 4.7, 6.1])
def test_a_drain_waits_for_the_checkpoint_under_way_and_saves_no_step_twice(tmp_path, seconds):
    committed, _ = drained_after(tmp_path, seconds)

    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert committed == steps
    assert [checkpoints.step_of(path) for path in checkpoints.by_step(tmp_path / "checkpoints")] == steps


class FullDisk(ToyTrainEngine):
    def write_toy(self, step, content, term, receipts, folder):
        if step > 1:
            raise checkpoints.CheckpointError(f"checkpoint {folder.name} could not be written: no space")
        super().write_toy(step, content, term, receipts, folder)


def test_a_drain_waits_for_no_batch_that_can_not_be_filled_any_more(tmp_path):
    waited_s = []

    committed, ends = drained_after(tmp_path, 60.5, buffer_class=Unfilled, waited_s=waited_s)

    assert (committed, ends) == ([1], [])
    assert waited_s[0] < 1.0  # virtual seconds, where the sample buffer may hold an ask back for ten


class WithoutRoom(Unfilled):
    """Its disk is full for ten minutes."""

    @handler(concurrency=4)
    async def commit(self, request: Commit) -> Ack:
        await asyncio.sleep(600.0)
        return await super().commit(request)


def test_a_buffer_that_waits_ten_minutes_for_room_is_waited_for(tmp_path):
    committed, ends = drained_after(tmp_path, 700.0, buffer_class=WithoutRoom)

    assert (committed, ends) == ([1], [])


def test_a_drain_does_not_wait_until_engines_took_the_last_weights_since_they_tell_nobody_who_leaves(tmp_path):
    waited_s = []

    # There is no proxy: no engine gives log-probabilities, nor tells which weights it took.
    check = CheckSection(timeout_s=0.01)

    committed, ends = drained_after(tmp_path, 60.5, buffer_class=Unfilled, waited_s=waited_s, check=check)

    assert (committed, ends) == ([1], [])
    assert waited_s[0] < 1.0  # virtual seconds, where a run's end would wait for five


class FullDiskTrainer(ToyTrainer):
    def _build(self):
        return FullDisk(lambda *_: None, lambda *_: None)


def test_a_checkpoint_that_the_disk_refuses_beside_training_ends_the_run_and_leaves_the_one_before(tmp_path):
    committed, ends = drained_after(tmp_path, 20.0, FullDiskTrainer)

    assert committed == [1]
    assert ends[0] == "checkpoint waiting_2.1 could not be written: no space"
    assert [checkpoints.step_of(path) for path in checkpoints.by_step(tmp_path / "checkpoints")] == [1]


@pytest.mark.parametrize("node", ["node-1", "node-2"])
def test_what_changed_is_published_beside_weights_that_leave_the_host_and_only_then(tmp_path, node):
    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", tmp_path, 7, 3)
        config = ToyTrainer.Config(check=CheckSection(enabled=False), eval=EvalSection(every=0, final_num_tasks=0))
        async with asyncio.TaskGroup() as tasks:
            engine = kernel_of(HeldEngine, ActorConfig(), network, store, run, node=node)
            actors = ((Halting, ActorConfig()), (ToyTrainer, config))
            buffer, trainer = (kernel_of(*what, network, store, run) for what in actors)
            serving = [tasks.create_task(engine.serve()), tasks.create_task(buffer.serve())]
            await engine.ready.wait()
            serving.append(tasks.create_task(trainer.serve()))
            await asyncio.sleep(60.0)
            for task in serving:
                task.cancel()
        return await trainer.blobs.newest("weights"), await trainer.blobs.newest("weights.delta")

    whole, delta = run_virtual(main)

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert whole.version == 3
    if node == "node-2":
        assert (delta.version, delta.term) == (whole.version, whole.term)
        assert rows[-1]["weights/delta_bytes"] == delta.size_bytes < whole.size_bytes
    else:
        assert delta is None
        assert "weights/delta_bytes" not in rows[-1]


def run_to_the_last_evaluation(folder, steps, window_s=0.0, **section):
    """Train `steps` steps, and drain while the last evaluation is under way; returns the folder of the checkpoints."""
    folder.mkdir(exist_ok=True)

    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", folder, 7, steps, window_s=window_s)
        config = ToyTrainer.Config(check=CheckSection(enabled=False), eval=EvalSection(every=0), checkpoint=CheckpointSection(**section))
        async with asyncio.TaskGroup() as tasks:
            actors = ((Buffer, ActorConfig()), (HeldEngine, ActorConfig()), (ToyTrainer, config))
            buffer, engine, trainer = (kernel_of(*what, network, store, run) for what in actors)
            evaluating = buffer.build().evaluating
            serving = [tasks.create_task(kernel.serve()) for kernel in (buffer, engine, trainer)]
            await evaluating.wait()
            await buffer.ref("trainer-1").ask(Drain(), timeout=30)
            await asyncio.wait(serving[2:])
            for task in serving[:2]:
                task.cancel()

    run_virtual(main)
    return folder / "checkpoints"


def run_to_the_end(folder, steps, eval_every=0, *, network=None, buffer=Evaluating, engine=HeldEngine, **section):
    """Train `steps` steps with their evaluations; returns the rewards of the versions that were evaluated."""

    network = network or MemoryNetwork()

    async def main():
        store, run = MemoryStore(), RunInfo("test", folder, 7, steps)
        config = ToyTrainer.Config(
            check=CheckSection(enabled=False), eval=EvalSection(every=eval_every), checkpoint=CheckpointSection(**section)
        )
        actors = ((buffer, ActorConfig()), (engine, ActorConfig()), (ToyTrainer, config))
        async with asyncio.TaskGroup() as tasks:
            kernels = [kernel_of(*what, network, store, run) for what in actors]
            serving = [tasks.create_task(kernel.serve()) for kernel in kernels]
            await asyncio.sleep(100.0)
            for task in serving:
                task.cancel()

    run_virtual(main)
    rows = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    return {row["version"]: row["reward"] for row in rows}


def test_an_engine_is_let_go_although_the_link_breaks_under_the_word_of_it(tmp_path):
    network, heard = FaultyNetwork(FaultPlan(seed=7)), []

    class Severed(Evaluating):
        @handler(concurrency=4)
        async def evaluate(self, request: Evaluate) -> EvalResult | NotReady:
            reply = await super().evaluate(request)
            network.lose_next("trainer-1", "engine-1", math.inf)
            return reply

    class Hearing(HeldEngine):
        @handler
        async def hold(self, request: HoldWeights) -> WeightsHeld:
            heard.append((request.version, request.for_s > 0))
            return await super().hold(request)

    run_to_the_end(tmp_path, 8, 4, network=network, buffer=Severed, engine=Hearing)

    held = [version for version, is_held in heard if is_held]
    assert held[:3] == [0, 5, 8]
    assert {(0, False), (5, False)} <= set(heard)


def test_a_resumed_run_does_the_evaluation_that_was_cut_short_and_none_twice(tmp_path):
    run_to_the_last_evaluation(tmp_path, 2, every=5)
    assert (tmp_path / "evals.jsonl").read_text() == ""

    assert list(run_to_the_end(tmp_path, 2)) == [2]
    assert list(run_to_the_end(tmp_path, 2)) == [2]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_checkpoint_of_the_best_evaluation_stays(tmp_path, resumed):
    if resumed:
        run_to_the_end(tmp_path, 8, 2, every=5, keep=1, keep_best=True)
    rewards = run_to_the_end(tmp_path, 14, 2, every=5, keep=1, keep_best=True)

    del rewards[0]  # the base model has no checkpoint
    assert len(rewards) >= 3
    assert list(rewards) != sorted(rewards, key=rewards.get)
    kept = [checkpoints.step_of(path) for path in checkpoints.by_step(tmp_path / "checkpoints")]
    assert kept == [max(rewards, key=rewards.get), 14]


def test_milestones_stay_beside_the_newest_checkpoints(tmp_path):
    kept = checkpoints.by_step(run_to_the_last_evaluation(tmp_path, 11, every=2, keep=2, milestones=3))

    assert [checkpoints.step_of(path) for path in kept] == [3, 6, 9, 10, 11]


def test_a_checkpoint_names_the_steps_since_the_one_before_and_those_that_the_store_may_forget(tmp_path):
    forgetting = run_to_the_last_evaluation(tmp_path / "0", 3, every=1)
    keeping = run_to_the_last_evaluation(tmp_path / "1000", 3, window_s=1000.0, every=1)

    assert len(checkpoints.newest_receipts(forgetting)) == 1
    assert len(checkpoints.newest_receipts(keeping)) > 1


class Failing(ToyTrainEngine):
    """Raises as often as `raises` says."""

    raises = 1

    def train(self, step, groups):
        if Failing.raises:
            Failing.raises -= 1
            raise IndexError("token 151999 is out of range")
        return super().train(step, groups)


class FailingTrainer(ToyTrainer):
    def _build(self):
        return Failing(lambda *_: None, lambda *_: None)


def test_a_trainer_whose_training_raised_tells_the_buffer_and_begins_again(tmp_path):
    class Told(Buffer):
        def __init__(self, config, kernel):
            super().__init__(config, kernel)
            self.raised = []

        @handler
        async def step_raised(self, request: StepRaised) -> Ack:
            self.raised.append((request.step, request.error))
            return Ack()

    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", tmp_path, 7, 2)
        config = FailingTrainer.Config(check=CheckSection(enabled=False), eval=EvalSection(every=0))
        async with asyncio.TaskGroup() as tasks:
            buffer_kernel = kernel_of(Told, ActorConfig(), network, store, run)
            buffer = buffer_kernel.build()
            serving = tasks.create_task(buffer_kernel.serve())
            await buffer_kernel.ready.wait()
            (ended,) = await asyncio.gather(kernel_of(FailingTrainer, config, network, store, run).serve(), return_exceptions=True)
            serving.cancel()
            return buffer.raised, repr(first_cause(ended))

    raised, ended = run_virtual(main)

    assert raised == [(1, "IndexError: token 151999 is out of range")]
    assert "training on step 1 raised IndexError" in ended


class Flat(ToyTrainEngine):
    """No group ever has spread."""

    def train(self, step, groups):
        result = super().train(step, groups)
        return result._replace(metrics={**result.metrics, "policy/taught_frac": 0.0})


class FlatTrainer(ToyTrainer):
    def _build(self):
        return Flat(lambda *_: None, lambda *_: None)


def test_what_spoils_a_result_without_an_error_is_told_once_each(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [100, 7_000_000], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", tmp_path, 7, 12)
        off = {"check": CheckSection(enabled=False), "eval": EvalSection(every=0)}
        spoilt = {"train": TrainSection(lr=1e-3, loss="gspo", clip_high=0.3), "checkpoint": CheckpointSection(keep_best=True)}
        config = FlatTrainer.Config(**off, **spoilt, model=ModelSection(path="model"))
        told = []
        async with asyncio.TaskGroup() as tasks:
            actors = ((Buffer, ActorConfig()), (HeldEngine, ActorConfig()), (FlatTrainer, config))
            buffer, engine, trainer = (kernel_of(*what, network, store, run) for what in actors)
            evaluating = buffer.build().evaluating
            trainer.build().notice = lambda text, good=False: told.append(text)
            serving = [tasks.create_task(kernel.serve()) for kernel in (buffer, engine, trainer)]
            await evaluating.wait()
            for task in serving:
                task.cancel()
        return told

    rate, clip, best, spread = run_virtual(main)

    assert rate.startswith("train.lr=0.001 is 189 times above what a model of 0.7 B parameters is usually trained with")
    assert clip.startswith("train.clip_high=0.3 is 750 times what the paper of gspo has (0.0004)")
    assert best.startswith("checkpoint.keep_best keeps no checkpoint: eval.every is 0")
    assert spread.startswith("nothing was learned from rewards in the last 5 steps")


class Idle(ToyTrainEngine):
    """Every optimiser step is left out."""

    def train(self, step, groups):
        result = super().train(step, groups)
        return result._replace(metrics={**result.metrics, "optim/updates": 0.0, "optim/skipped": 2.0})


class IdleTrainer(ToyTrainer):
    def _build(self):
        return Idle(lambda *_: None, lambda *_: None)


@pytest.mark.parametrize(("steps", "trained"), [(30, 4), (2, 2)])
def test_a_run_whose_steps_change_no_weight_fails_with_its_rows_written(steps, trained, tmp_path):
    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", tmp_path, 7, steps)
        off = {"check": CheckSection(enabled=False), "eval": EvalSection(every=0, final_num_tasks=0)}
        config = IdleTrainer.Config(**off, run=RunSection(steps=steps, max_idle_steps=4))
        told, ended = [], asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            actors = ((Buffer, ActorConfig()), (HeldEngine, ActorConfig()), (IdleTrainer, config))
            kernels = [kernel_of(*what, network, store, run) for what in actors]
            trainer = kernels[-1].build()
            trainer.notice = lambda text, good=False: told.append(text)
            trainer.finish = lambda reason, failed=False: ended.set_result((reason, failed))
            serving = [tasks.create_task(kernel.serve()) for kernel in kernels]
            outcome = await ended
            for task in serving:
                task.cancel()
        return outcome, told, (tmp_path / "metrics.jsonl").read_text().splitlines()

    (reason, failed), told, rows = run_virtual(main)

    assert failed
    assert reason.startswith(f"nothing was learned: no weight has changed in {trained} steps in a row. Every optimiser step was left out")
    assert len(rows) == trained
    assert any("no weight has changed in 3 steps" in said for said in told) == (trained > 2)


class OffPolicy(ToyTrainEngine):
    """Its samples are not worth as much as fresh ones."""

    def train(self, step, groups):
        result = super().train(step, groups)
        weighed = {"policy/ess": 0.8, "policy/kl": 0.3, "policy/mismatch_kl": 0.1}
        return result._replace(metrics={**result.metrics, **weighed})


class OffPolicyTrainer(ToyTrainer):
    def _build(self):
        return OffPolicy(lambda *_: None, lambda *_: None)


def test_the_buffer_hears_what_ages_cost_and_rows_have_the_bound_that_it_answers(tmp_path):
    class Told(Buffer):
        def __init__(self, config, kernel):
            super().__init__(config, kernel)
            self.told = {}

        @handler
        async def advance(self, request: Advance) -> PolicyState:
            return PolicyState(request.step, 3)

        @handler
        async def claim(self, request: Claim) -> Batch | NotReady:
            self.told[request.step] = (request.ess, round(request.kl, 6))
            return await super().claim(request)

    async def main():
        network, store, run = MemoryNetwork(), MemoryStore(), RunInfo("test", tmp_path, 7, 2)
        config = OffPolicyTrainer.Config(check=CheckSection(enabled=False), eval=EvalSection(every=0))
        async with asyncio.TaskGroup() as tasks:
            actors = ((Told, ActorConfig()), (HeldEngine, ActorConfig()), (OffPolicyTrainer, config))
            kernels = [kernel_of(*what, network, store, run) for what in actors]
            buffer = kernels[0].build()
            serving = [tasks.create_task(kernel.serve()) for kernel in kernels]
            await buffer.evaluating.wait()
            for task in serving:
                task.cancel()
        return buffer.told

    told = run_virtual(main)

    assert told == {1: (1.0, 0.0), 2: (0.8, 0.2)}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["staleness/alpha"] == 3

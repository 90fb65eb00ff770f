"""Hooks around the trainer's steps: the user's own, what they may do and how they fail, and the fabric's intents."""

import asyncio
from types import SimpleNamespace

import pytest

from rubato.actors.config import TrainSection
from rubato.actors.messages.phases import PhaseIntent
from rubato.actors.messages.weights import WeightsPublished
from rubato.actors.ranks.head import RankedEngine
from rubato.actors.ranks.parts import HostShare
from rubato.actors.traffic.intents import FabricIntents
from rubato.actors.training.hooks import Hooks, StepHook, TrainedStep, check_hooks
from rubato.actors.training.train_engine import TrainError
from rubato.actors.training.trainer import Trainer
from rubato.runtime.errors import ConfigError

OWN = """
from rubato.actors.training.hooks import StepHook
class Seen(StepHook):
    async def begin(self, step, rows):
        self.seen = self.trainer.seen = [("begin", step)]
    async def after_step(self, trained):
        self.seen.append(("after_step", trained.step, trained.metrics["reward/mean"]))
    async def after_publish(self, version, metrics):
        return {"mine/depth": 2.0 * version}
    def keep(self, steps):
        return [step for step in steps if step % 3 == 0]
class Fails(StepHook):
    async def before_step(self, step):
        raise KeyError("depth")
class Untrue(StepHook):
    async def after_publish(self, version, metrics):
        return {"depth": 1.0}
class FailsBeside(StepHook):
    async def after_swap(self, version):
        raise OSError("no port")
    async def close(self):
        raise OSError("no file")
class Unmade(StepHook):
    def __init__(self, trainer):
        raise ValueError("no port")
class NoHook:
    pass
"""


@pytest.fixture
def loaded(on_stage, tmp_path):
    """`loaded(play, "Name", …)`: `await play(hooks, trainer)` with these of the user's hooks beside our own."""
    (tmp_path / "own.py").write_text(OWN)

    def run(play, *names):
        async def main(context):
            targets = [f"{tmp_path / 'own.py'}:{name}" for name in names]
            trainer = Trainer(Trainer.Config(train={"hooks": targets}), context)
            hooks = Hooks(trainer)
            hooks.load()
            await play(hooks, trainer)

        on_stage(main, name="trainer-1")

    return run


def test_a_hook_of_the_users_own_sees_each_step_and_adds_its_figures_to_the_row(loaded):
    async def play(hooks, trainer):
        # Our own would look for a model and a run.
        (mine,) = hooks._named
        hooks._hooks = [mine]

        await hooks.call(StepHook.begin, 4, lambda: iter(()))
        await hooks.call(StepHook.after_step, TrainedStep(5, (), {"reward/mean": 0.5}))
        figures = await hooks.figures(5, {})

        assert trainer.seen == [("begin", 4), ("after_step", 5, 0.5)]
        assert figures == {"mine/depth": 10.0}
        assert hooks.keep((5, 6, 9)) == {6, 9}

    loaded(play, "Seen")


def test_a_hook_that_raises_ends_the_run_with_its_name_and_the_event(loaded):
    async def play(hooks, trainer):
        with pytest.raises(TrainError, match=r"train.hooks: .*own.py:Fails raised KeyError: 'depth' in before_step"):
            await hooks.call(StepHook.before_step, 1)

    loaded(play, "Fails")


def test_a_hook_that_raises_beside_the_steps_ends_the_run_and_at_the_end_the_user_is_told(loaded):
    async def play(hooks, trainer):
        ended = []
        trainer.finish = lambda reason, failed=False: ended.append((reason, failed))

        await hooks.call_beside(StepHook.after_swap, 3)
        await hooks.close()

        ((reason, failed),) = ended
        assert reason.endswith("own.py:FailsBeside raised OSError: no port in after_swap")
        assert failed
        assert trainer.leaving.is_set()
        assert trainer._kernel.notices[-1].endswith("own.py:FailsBeside raised OSError: no file in close")

    loaded(play, "FailsBeside")


def test_figures_without_a_slash_in_their_name_are_refused(loaded):
    async def play(hooks, trainer):
        (mine,) = hooks._named
        hooks._hooks = [mine]
        with pytest.raises(TrainError, match=r"own.py:Untrue returned what is no mapping from names with a slash"):
            await hooks.figures(1, {})

    loaded(play, "Untrue")


@pytest.mark.parametrize(("name", "why"), [("NoHook", "is not a subclass of .*StepHook"), ("Unmade", "can't be made: ValueError: no port")])
def test_a_class_that_is_no_hook_or_can_not_be_made_is_named_before_the_first_step(loaded, tmp_path, name, why):
    async def play(hooks, trainer):
        other = Trainer(Trainer.Config(train={"hooks": [f"{tmp_path / 'own.py'}:{name}"]}), trainer._kernel)
        with pytest.raises(TrainError, match=rf"train.hooks: .*own.py:{name} {why}"):
            Hooks(other).load()

    loaded(play)


def test_a_hook_that_is_nowhere_is_found_before_anything_is_started(tmp_path):
    config = Trainer.Config(train={"hooks": [f"{tmp_path / 'absent.py'}:Seen"]})

    with pytest.raises(ConfigError, match=r"train.hooks: .*absent.py"):
        check_hooks(config)


@pytest.fixture
def intents(on_stage):
    """`intents(play, size)`: `await play(hook, told)` with two engines, one of them on another host, and weights of `size` bytes, which are
    version 0; `told` is what the fabric heard. `shares`: of the ranks' hosts, where there are ranks."""

    def run(play, size=500, shares=()):
        async def main(context):
            told = []

            async def hear(message):
                told.append(message)

            context.actors |= {"engine-1": None, "engine-2": None, "fabric_controller": hear}
            context.actors |= {share.first: None for share in shares}
            context.records |= {f"engine-{n}": SimpleNamespace(node=f"node-{n}") for n in (1, 2)}
            trainer = SimpleNamespace(
                name="trainer-1", node="node-1", peers=context.ready, ref=context.ref, directory=context,
                out=SimpleNamespace(size_bytes=size, published=WeightsPublished(0, 1, "", size) if size else None), engine=SimpleNamespace(shares=shares),
            )  # fmt: skip
            await play(FabricIntents(trainer), told)

        on_stage(main, name="trainer-1")

    return run


TRAFFIC = (("trainer-1", "engine-1", 500), ("trainer-1", "engine-2", 500))


def test_the_fabric_hears_of_the_next_weights_ahead_of_time_with_their_bytes(intents):
    async def play(hook, told):
        await hook.before_step(3)
        await asyncio.sleep(1.5)
        await hook.after_step(TrainedStep(3, (), {}))
        told.clear()

        await hook.before_step(4)

        assert told == [PhaseIntent("train_step", 4, 0.0), PhaseIntent("weight_sync", 4, 1.5, TRAFFIC)]

    intents(play)


def test_before_anything_was_published_no_bytes_are_promised(intents):
    async def play(hook, told):
        await hook.before_publish(0)

        assert told == [PhaseIntent("weight_sync", 0, 0.0, ())]

    intents(play, size=0)


def test_what_changed_is_told_for_other_hosts_from_the_first_version_on_that_travels_so_and_all_of_it_every_sixteenth(intents):
    async def play(hook, told):
        out = hook.trainer.out
        for version in (1, 2, 16, 17, 18):
            await hook.before_publish(version)
            delta = 0 if version % 16 == 0 else 40 + version
            out.published = WeightsPublished(version, 1, "", 50_000, delta_bytes=delta)

        assert [[size for *_, size in each.traffic] for each in told] == [
            [50_000, 50_000], [50_000, 41], [50_000, 50_000], [50_000, 42], [50_000, 57],
        ]  # fmt: skip

    intents(play, size=50_000)


def test_a_version_of_which_much_changed_is_told_whole_again(intents):
    async def play(hook, told):
        out = hook.trainer.out
        for version, delta in ((1, 900), (2, 0)):
            out.published = WeightsPublished(version, 1, "", 1000, delta_bytes=delta)
            await hook.before_publish(version + 1)

        assert [each.traffic[1] for each in told] == [("trainer-1", "engine-2", 900), ("trainer-1", "engine-2", 1000)]

    intents(play)


def test_a_version_in_which_nothing_changed_does_not_make_the_next_small(intents):
    async def play(hook, told):
        out = hook.trainer.out
        for version, delta in ((1, 900), (2, 18), (3, 0), (4, 18)):
            out.published = WeightsPublished(version, 1, "", 1000, delta_bytes=delta)
            await hook.before_publish(version + 1)

        assert [each.traffic[1][2] for each in told] == [900, 900, 1000, 1000]

    intents(play)


def test_weights_that_ranks_of_several_hosts_have_written_come_from_the_first_of_each(intents):
    shares = [
        HostShare(node, n, {f"trainer_rank-{n}": 0}, 0, num_bytes) for n, (node, num_bytes) in enumerate((("node-1", 3), ("node-2", 1)), 1)
    ]

    async def play(hook, told):
        await hook.before_publish(1)
        hook.trainer.out.published = WeightsPublished(1, 1, "", 400, delta_bytes=40)
        await hook.before_publish(2)

        assert told[1].traffic == (
            ("trainer_rank-1", "engine-1", 300), ("trainer_rank-1", "engine-2", 30),
            ("trainer_rank-2", "engine-1", 10), ("trainer_rank-2", "engine-2", 100),
        )  # fmt: skip

    intents(play, size=400, shares=shares)


def test_what_ranks_sent_each_other_in_a_step_is_told_once_it_is_over(intents):
    rings = [("trainer_rank-1", "trainer_rank-2", 700), ("trainer_rank-2", "trainer_rank-1", 700)]

    async def play(hook, told):
        hook.trainer.engine.exchanged = rings
        await hook.after_step(TrainedStep(3, (), {}))

        assert told == [PhaseIntent("train_step", -1, 0.0, tuple(rings))]

    intents(play, shares=[HostShare("node-1", 1, {"trainer_rank-1": 0}, 0, 3)])


@pytest.mark.parametrize(
    ("mesh", "ways"),
    [
        ({"shard": 2}, "1>2 2>1"),
        ({"replicate": 2, "shard": 2}, "1>2 2>1 3>4 4>3 | 1>3 2>4 3>1 4>2"),
        ({"replicate": 2, "shard": 1}, "| 1>2 2>1"),
    ],
)
def test_ranks_exchange_around_the_ring_of_their_copys_shares_and_around_that_of_the_copies(mesh, ways):
    engine = RankedEngine(SimpleNamespace(), TrainSection(mesh=mesh), SimpleNamespace(call_soon_threadsafe=lambda begin: None))
    engine._members, engine._exchanged = {str(n + 1): None for n in range(engine.num_ranks)}, (10, 1)
    found = sorted((-size, f"{a}>{b}") for a, b, size in engine.exchanged)

    of_shares, _, of_copies = ways.partition("|")
    assert found == [(-10, way) for way in of_shares.split()] + [(-1, way) for way in of_copies.split()]


def test_the_network_is_the_next_rollouts_once_all_have_the_weights_unless_a_step_has_begun(intents):
    async def play(hook, told):
        await hook.after_swap(3)
        await hook.before_step(4)
        await hook.after_swap(3)

        assert told == [PhaseIntent("rollout", 3, 0.0), PhaseIntent("train_step", 4, 0.0)]

    intents(play)


def test_the_intents_come_with_the_fabrics_controller_and_only_once(loaded):
    async def play(hooks, trainer):
        def mine():
            return [hook for hook in hooks._hooks if isinstance(hook, FabricIntents)]

        before = mine()
        await hooks.on_peers(("engine-1",), ())
        without = mine()
        for _ in range(2):
            await hooks.on_peers(("fabric_controller-1",), ())

        assert (before, without, len(mine())) == ([], [], 1)

    loaded(play)


def test_a_trainer_that_comes_after_the_fabrics_controller_has_its_intents_too(loaded):
    async def play(hooks, trainer):
        trainer._kernel.actors["fabric_controller-1"] = None
        late = Hooks(trainer)
        late.load()
        await late.on_peers(("fabric_controller-1",), ())

        assert sum(isinstance(hook, FabricIntents) for hook in late._hooks) == 1

    loaded(play)

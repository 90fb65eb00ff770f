"""What the plug-ins of examples/plugins do, each asked as its seam asks it."""

from types import SimpleNamespace

import pytest

from rubato.actors.messages.generation import Generate, Sampling
from rubato.actors.proxy.picker import PickerHost
from rubato.actors.samples.policy import Ending, PlainPolicy, PolicyPlugin
from rubato.actors.training.hooks import TrainedStep
from rubato.actors.training.train_engine import TrainError
from rubato.planning.engine_info import EngineInfo, WeightsId, WeightsNeed
from rubato.planning.routing import EngineView
from rubato.runtime.observe.figures import Metrics
from rubato_plugins.hook import GradientGuard
from rubato_plugins.picker import NewestWeights
from rubato_plugins.policy import Mastered


def group_of(*rewards):
    return SimpleNamespace(rewards=lambda: list(rewards))


class NoZeros(PolicyPlugin):
    def complete(self, group):
        return Ending("zeros", "had a reward of 0.") if 0.0 in group.rewards() else super().complete(group)


def test_a_mastered_prompt_is_left_out_and_the_policy_below_is_asked_first():
    policy = Mastered(NoZeros(PlainPolicy(), None), None)

    assert policy.complete(group_of(1.0, 0.5)) is None
    assert policy.complete(group_of(1.0, 0.9)).fate == "mastered"
    assert policy.complete(group_of(1.0, 0.0)).fate == "zeros"


async def test_requests_go_to_engines_with_the_newest_weights_and_evaluations_where_theirs_are():
    engines = {name: EngineView(EngineInfo(name, 8, (WeightsId(version),))) for name, version in (("a", 3), ("b", 4))}
    actor = SimpleNamespace(metrics=Metrics())
    picker = NewestWeights(PickerHost(actor, None, engines, {}, lambda: 0, lambda: None))

    usual, exact = (
        picker.usable(SimpleNamespace(request=Generate("r", "s", b"", Sampling(1), need)))
        for need in (WeightsNeed(3), WeightsNeed(3, exact=True))
    )

    assert [engine.name for engine in usual] == ["b"]
    assert [engine.name for engine in exact] == ["a", "b"]
    assert actor.metrics.snapshot()["queue/newest/engines"] == 1.0


async def test_a_run_ends_with_a_sentence_once_its_gradients_blow_up():
    hook = GradientGuard(SimpleNamespace())

    await hook.after_step(TrainedStep(1, [], {"optim/grad_norm": 3.0}))
    await hook.after_step(TrainedStep(2, [], {"optim/grad_norm": 2.0}))
    with pytest.raises(TrainError, match=r"step 3 has gradients of norm 2e\+04, above 10000: lower train.lr"):
        await hook.after_step(TrainedStep(3, [], {"optim/grad_norm": 2e4}))

    assert await hook.after_publish(2, {}) == {"guard/grad_norm": 2e4}

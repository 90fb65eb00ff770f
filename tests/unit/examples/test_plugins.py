"""What the plug-ins of examples/plugins do, each asked as its seam asks it."""

from types import SimpleNamespace

from actors.samples.policy import Ending, PlainPolicy, PolicyPlugin
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

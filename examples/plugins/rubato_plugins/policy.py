"""BatchPolicy: groups whose prompt is mastered train nothing, and others take their place.

rubato launch CONFIG samples.policy=[rubato_plugins.policy:Mastered]
"""

from rubato.actors.samples.group import Group
from rubato.actors.samples.policy import Ending, PolicyPlugin

MASTERED = 0.95
"""Mean reward from which on a group is left out."""


class Mastered(PolicyPlugin):
    """Around the policy below it, which is asked first."""

    def complete(self, group: Group) -> Ending | None:
        rewards = group.rewards()
        if (ending := super().complete(group)) is not None or sum(rewards) < MASTERED * len(rewards):
            return ending
        return Ending("mastered", f"earned {MASTERED:g} on average or more. Try harder tasks.")

"""The Environment seam: gymnasium's signature with text in and out. What users write; methods may be plain or async."""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

Observation = str | list[dict[str, Any]]
"""A string, or chat messages as OpenAI's API has them: {"role": …, "content": …}, `tool_calls`, `tool_call_id`, `name`, parts of text."""

Step = tuple[Observation, float, bool, bool, Mapping[str, Any]]
"""(observation, reward, terminated, truncated, info)"""


class Environment(Protocol):
    """One instance plays one trajectory at a time and may be reset for the next. Constructed with `env.kwargs`.

    A plain (not async) class runs in worker processes that are killed when a call outlives its deadline. Raising anything is
    allowed: the rollout ends as a named outcome and leaves its group's statistics.

    A class with a split of its own declares `held_out`, a dict: the arguments that replace those of `env.kwargs` for held-out tasks, where
    `env.eval_kwargs` names none. Where another seed is always another task, it is empty. `tools`, a list of tool schemas, goes to the model's
    chat template.

    `reset` is also given those of these that its signature names: `task` (its name in the config's `tasks`), `row` (of the task's data set;
    without one, how many groups of the task there were before), `purpose` ("train" or "eval"), `trajectory` (its id) and `version` (of the
    weights, at admission).
    """

    def reset(self, *, seed: int) -> tuple[Observation, Mapping[str, Any]] | Awaitable[tuple[Observation, Mapping[str, Any]]]:
        """Start an episode; the same seed gives the same task."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Apply the model's text. The trajectory's reward is the sum of step rewards; a reward that is not finite fails the rollout."""
        ...

    def close(self) -> Awaitable[None] | None: ...

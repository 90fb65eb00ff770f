"""Reward functions that come with Rubato, and the signature that yours have.

    def my_reward(completions: list[str], **columns: list) -> list[float]

Plain or `async`. Entry i of `completions` is one finished trajectory: its assistant turns, joined by newlines. Every column has
one entry per trajectory too: `task` (its name in the config), `row` (of its data set), `purpose` (train or eval), `trajectory` (its id),
`version` (of the weights, at admission), `seed`, `turns`, `invalid_turns` (turns with `info["invalid"]`), `truncated`, `env_reward`
(sum of step rewards), `finish_reasons` (of each turn: `stop`, or `length` where it was cut at its limit), `texts` (the turns as a
list), and every key of the environment's info that MessagePack can hold, its newest value (None where a trajectory has none): of a data
set all columns of the row. No key of the info replaces one of the columns above.
A function is given the columns that its signature names; `**columns` takes all. The result, one finite number per trajectory, is added
to the reward.

A call that hangs is made again for each of its trajectories. A function that must not be asked twice for one has the attribute
`idempotent = False`.
"""

from typing import Any

MALFORMED_PENALTY = 0.1
"""Well below the reward of a solved task: it teaches the format and never pays for avoiding the task."""


def malformed_penalty(completions: list[str], turns: list[int], invalid_turns: list[int], **columns: Any) -> list[float]:
    """-0.1 times the share of turns whose text was no action to the environment."""
    return [-MALFORMED_PENALTY * bad / max(1, num) for num, bad in zip(turns, invalid_turns, strict=True)]

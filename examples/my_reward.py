"""A reward of your own: rubato launch configs/quickstart.yaml reward.functions=[my_reward.py:brevity]."""


def brevity(completions: list[str], *, turns: list[int], env_reward: list[float], **columns: list) -> list[float]:
    """Of each rollout of a call, added to what its environment gave: a goal counts more the sooner it is reached."""
    return [-0.02 * n if r > 0 else 0.0 for n, r in zip(turns, env_reward, strict=True)]

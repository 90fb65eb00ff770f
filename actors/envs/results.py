"""Checks what environments return: gymnasium's shapes, text observations, finite rewards."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, cast

from actors.envs.environment import Observation, Step
from actors.envs.failures import EnvFailure
from runtime.pool.pool import Unsendable


def check_reset(result: Any) -> tuple[Observation, Mapping[str, Any]]:
    """What `reset` returned, if it is (observation, info); else EnvFailure."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise _bad("reset", f"{_shape(result)} instead of (observation, info)")
    observation, info = result
    _check_observation(observation, "reset")
    if not isinstance(info, Mapping):
        raise _bad("reset", f"info of type {_kind(info)} instead of a dict")
    return observation, cast("Mapping[str, Any]", info)


def check_step(result: Any) -> Step:
    """What `step` returned, if it is (observation, reward, terminated, truncated, info) with a finite reward; else EnvFailure."""
    if not isinstance(result, tuple) or len(result) != 5:
        raise _bad("step", f"{_shape(result)} instead of (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = result
    _check_observation(observation, "step")
    if not isinstance(reward, Real):
        raise _bad("step", f"a reward of type {_kind(reward)} instead of a number")
    reward = float(reward)
    if not math.isfinite(reward):
        raise _bad("step", f"a reward of {reward}, which is not finite")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if _kind(flag) not in ("bool", "bool_"):
            raise _bad("step", f"{name} of type {_kind(flag)} instead of a bool")
    if not isinstance(info, Mapping):
        raise _bad("step", f"info of type {_kind(info)} instead of a dict")
    return observation, reward, bool(terminated), bool(truncated), cast("Mapping[str, Any]", info)


def _check_observation(observation: Any, method: str) -> None:
    if isinstance(observation, str):
        return
    if not isinstance(observation, list):
        raise _bad(
            method, f"an observation of type {_kind(observation)} instead of a string or a list of chat messages"
        )
    for message in cast("list[Any]", observation):
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise _bad(method, f"a chat message {str(message)[:80]!r} that is not {{'role': str, 'content': str}}")


def _bad(method: str, what: str) -> EnvFailure:
    return EnvFailure("env_bad_result", method, f"returned a wrong result from {method}: {what}")


def _shape(value: Any) -> str:
    return f"{len(cast('tuple[Any, ...]', value))} values" if isinstance(value, tuple) else f"a {_kind(value)}"


def _kind(value: Any) -> str:
    return value.type_name if isinstance(value, Unsendable) else type(value).__name__

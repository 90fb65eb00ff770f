"""Decides where an environment's code runs, and turns whatever it does into a checked result or a named failure."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any, cast

from actors.envs.environment import Observation, Step
from actors.envs.failures import EnvFailure, EnvOutcome, Subject, sentence
from actors.envs.section import EnvSection
from actors.messages.samples import Purpose
from runtime.importer import LoadError, load_object
from runtime.pool.errors import (
    BadResult,
    NoWorker,
    PoolError,
    TargetMissing,
    UserCodeRaised,
    WorkerDied,
    WorkerKilled,
    WorkerTimeout,
)
from runtime.pool.pool import Unsendable, WorkerPool, decode, encode_call
from runtime.pool.sandbox import WorkerLimits
from runtime.pool.worker import place_of, text_of

BUILT_IN = "actors.envs."
"""Classes from here are trusted to import quickly, so no worker is started to look at them."""

RESET, STEP = "reset", "step"

CLOSE_S = 5.0
"""An environment that can't close by then is left to its fate: nobody waits for it."""


class EnvHost:
    """Makes environments and keeps those that finished well for the next rollout of the same purpose."""

    def __init__(self, section: EnvSection, *, on_output: Callable[[str], None] | None = None) -> None:
        self._section = section
        limits = WorkerLimits(section.memory_mb, max_processes=section.max_processes)
        self._pool = WorkerPool(workers=section.workers, limits=limits, on_output=on_output)
        self._class: Callable[..., Any] | None = None
        self._idle: dict[Purpose, list[HostedEnv]] = {"train": [], "eval": []}
        self._num_built = 0
        self._held_out: Mapping[str, Any] = section.eval_kwargs

    async def start(self) -> None:
        """Find the class and decide where it runs. Raises EnvFailure when it can't be loaded."""
        target, isolation = self._section.target, self._section.isolation
        built_in = target.startswith(BUILT_IN)
        if built_in and not self._held_out:
            self._held_out = getattr(_load(target), "held_out", {})
        if isolation == "process" or (isolation == "auto" and not built_in and not await self._prefers_inline()):
            return
        found = _load(target)
        if isolation == "inline" or not built_in or getattr(found, "inline", False):
            self._class = found

    async def borrow(self, purpose: Purpose) -> "HostedEnv":
        """An idle instance, or a new one. Raises EnvFailure when the constructor fails."""
        idle = self._idle[purpose]
        while idle:
            env = idle.pop()
            if env.usable:
                return env
        kwargs = {**self._section.kwargs, **(self._held_out if purpose == "eval" else {})}
        if self._class is None:
            return await self._build_in_pool(kwargs)
        try:
            return InlineEnv(self._class(**kwargs), self._section)
        except Exception as error:
            raise _raised(error, "__init__", "env_reset_failed") from error

    def give_back(self, env: "HostedEnv", purpose: Purpose) -> None:
        """Keep an instance that works for the next rollout."""
        self._idle[purpose].append(env)

    async def close(self) -> None:
        """Close idle environments and kill the workers."""
        for idle in self._idle.values():
            while idle:
                await idle.pop().close()
        await self._pool.close()

    async def _prefers_inline(self) -> bool:
        """Asked in a worker: importing a user's module may hang or crash too."""
        for tries_left in reversed(range(self._section.reset_tries)):
            try:
                traits = await self._pool.inspect(self._section.target, deadline_s=self._section.build_timeout_s)
            except PoolError as error:
                if tries_left and isinstance(error, WorkerDied | WorkerKilled):
                    continue  # somebody else may have killed it
                raise _failed(error, "import", "env_reset_failed") from error
            return traits.inline or traits.asynchronous
        raise AssertionError

    async def _build_in_pool(self, kwargs: Mapping[str, Any]) -> "HostedEnv":
        self._num_built += 1
        name = f"env-{self._num_built}"
        deadline_s = self._section.build_timeout_s
        try:
            await self._pool.build(name, self._section.target, encode_call(**kwargs), deadline_s=deadline_s)
        except PoolError as error:
            raise _failed(error, "__init__", "env_reset_failed") from error
        return PooledEnv(self._pool, name, self._section)


class InlineEnv:
    """Runs in this process: coroutines under a deadline; a plain method can't be interrupted and is trusted."""

    usable = True

    def __init__(self, env: Any, section: EnvSection) -> None:
        self._env = env
        self._reset_s = section.reset_timeout_s
        self._step_s = section.step_timeout_s

    async def reset(self, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Start an episode."""
        return check_reset(await self._call(self._env.reset, RESET, "env_reset_failed", self._reset_s, seed=seed))

    async def step(self, action: str) -> Step:
        """Apply the model's text."""
        return check_step(await self._call(self._env.step, STEP, "env_step_failed", self._step_s, action))

    async def _call(
        self, run: Callable[..., Any], method: str, outcome: EnvOutcome, limit_s: float, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            result = run(*args, **kwargs)
            if hasattr(result, "__await__"):
                result = await _within(result, limit_s, method)
        except EnvFailure:
            raise
        except Exception as error:
            raise _raised(error, method, outcome) from error
        return result

    async def close(self) -> None:
        """Close it; what it raises then no longer matters to anybody."""
        try:
            result = self._env.close()
            if hasattr(result, "__await__"):
                await _within(result, CLOSE_S, "close")
        except Exception:  # noqa: BLE001 - user code may raise anything
            return


class PooledEnv:
    """Runs in a worker process, which is killed when a call outlives its deadline."""

    def __init__(self, pool: WorkerPool, name: str, section: EnvSection) -> None:
        self._pool = pool
        self._name = name
        self._reset_s = section.reset_timeout_s
        self._step_s = section.step_timeout_s

    @property
    def usable(self) -> bool:
        """False once its worker ended."""
        return self._pool.has(self._name)

    async def reset(self, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Start an episode."""
        return check_reset(await self._call(RESET, "env_reset_failed", self._reset_s, encode_call(seed=seed)))

    async def step(self, action: str) -> Step:
        """Apply the model's text."""
        return check_step(await self._call(STEP, "env_step_failed", self._step_s, encode_call(action)))

    async def _call(self, method: str, outcome: EnvOutcome, limit_s: float, payload: bytes) -> Any:
        try:
            return _tuple(decode(await self._pool.call(self._name, method, payload, deadline_s=limit_s)))
        except PoolError as error:
            raise _failed(error, method, outcome) from error

    async def close(self) -> None:
        """Close and forget it."""
        try:
            await self._pool.call(self._name, "close", encode_call(), deadline_s=CLOSE_S)
        except PoolError:
            pass  # it is thrown away whatever it did
        finally:
            self._pool.drop(self._name)


HostedEnv = InlineEnv | PooledEnv
"""One environment instance, whose failures are EnvFailure and whose results are checked."""


async def try_environment(host: EnvHost, section: EnvSection, seed: int, *, log: str) -> str:
    """Build and reset one environment, with held-out arguments too where they differ; the host keeps it for the first rollout.

    Returns "" when that works, else the sentence for the user. A reset gets `env.reset_tries` tries.
    """
    purposes: tuple[Purpose, ...] = ("train", "eval") if section.eval_kwargs else ("train",)
    for purpose in purposes:
        for num_failed in range(1, section.reset_tries + 1):
            failure = await _try_once(host, purpose, seed)
            if failure is None:
                break
            if num_failed == section.reset_tries:
                return sentence(Subject(section.target, log), failure, seed=seed, tries=num_failed)
    return ""


async def _try_once(host: EnvHost, purpose: Purpose, seed: int) -> EnvFailure | None:
    env = None
    try:
        env = await host.borrow(purpose)
        await env.reset(seed)
    except EnvFailure as failure:
        if env is not None:
            await env.close()
        return failure
    host.give_back(env, purpose)
    return None


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


async def _within(result: Awaitable[Any], limit_s: float, method: str) -> Any:
    scope = asyncio.timeout(limit_s)
    try:
        async with scope:
            return await result
    except TimeoutError:
        if scope.expired():
            raise EnvFailure("env_timeout", method, f"hung in {method}: no answer within {limit_s:g} s") from None
        raise


def _load(target: str) -> Callable[..., Any]:
    try:
        found = load_object(target)
    except LoadError as error:
        raise EnvFailure("env_reset_failed", "import", f"can't be loaded: {error}") from error
    except Exception as error:
        raise _raised(error, "import", "env_reset_failed") from error
    if not callable(found):
        raise EnvFailure("env_reset_failed", "import", f"can't be loaded: {target} is not a class")
    return found


def _raised(error: Exception, method: str, outcome: EnvOutcome) -> EnvFailure:
    return EnvFailure(outcome, method, f"raised in {method}: {text_of(error)}", place_of(error))


def _failed(error: PoolError, method: str, outcome: EnvOutcome) -> EnvFailure:
    match error:
        case UserCodeRaised():
            return EnvFailure(outcome, method, f"raised in {method}: {error.text}", error.where)
        case WorkerTimeout():
            return EnvFailure("env_timeout", method, f"hung in {method}: {error}")
        case WorkerKilled() | NoWorker():
            return EnvFailure("env_lost", method, f"was lost in {method}: {error}")
        case BadResult():
            return EnvFailure("env_bad_result", method, f"returned nothing usable from {method}: {error}")
        case TargetMissing():
            return EnvFailure(outcome, method, f"can't be loaded: {error}")
        case _:
            return EnvFailure(outcome, method, f"crashed in {method}: {error}")


def _tuple(value: Any) -> Any:
    """MessagePack knows no tuples: a list that came back from a worker may have been one."""
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value

"""Decides where an environment's code runs, and turns whatever it does into a checked result or a named failure."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, cast

from actors.envs.environment import Observation, Step
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
from runtime.pool.pool import Traits, Unsendable, WorkerPool, decode, encode_call
from runtime.pool.sandbox import WorkerLimits
from runtime.pool.worker import place_of, taken_by, text_of

BUILT_IN = "actors.envs."
"""Classes from here are trusted to import quickly, so no worker is started to look at them."""

HELD_OUT, TOOLS = "held_out", "tools"
DECLARED = (HELD_OUT, TOOLS)
"""Attributes of an environment class: see Environment."""

TOLD: Mapping[str, Any] = {"task": "", "row": 0, "purpose": "train", "trajectory": "", "version": 0}
"""What a `reset` may be told besides the seed, as it is where no rollout asks."""

DATA_SETS = ("actors.envs.dataset:DataSetEnv", "actors.envs.dataset:QuickDataSetEnv")
"""What steps there is the user's verifier."""

CLOSE_S = 5.0
"""An environment that can't close by then is left to its fate: nobody waits for it."""

TRIAL_SEEDS = 8
"""Tried at the start: where more than half of all tasks fail, these rarely all do."""

DEAR_TRIALS = 3
"""Of them, at most so many that hang, each up to its limit, or fail in the constructor, where the seed plays no part."""

EnvOutcome = Literal["env_reset_failed", "env_step_failed", "env_timeout", "env_bad_result", "env_lost", "no_worker"]


@dataclass(eq=False)
class EnvFailure(Exception):
    """A call into an environment failed. `outcome` names how; `env_lost` and `no_worker` were not its own fault and may be tried again.

    `what` continues a sentence: "raised in reset: KeyError('goal')". `where` is the last frame, if known. `trials` is how many seeds
    failed at the start, where it ends the trial.
    """

    outcome: EnvOutcome
    method: str
    what: str
    where: str = ""
    trials: int = 0


def sentence(section: EnvSection, failure: EnvFailure, *, task: str = "", seed: int, log: str) -> str:
    """One line for the user: which environment did what, on which task, how often, and the `log` to look into."""
    raised, colon, cause = failure.what.partition(": ")
    on = "" if failure.method == "import" else f" (seed {seed})" if not task else f" ({task}, seed {seed})"
    verifier = section.kwargs.get("verifier") if section.target in DATA_SETS and failure.method == "step" else ""
    what = f"verifier {verifier}" if verifier else f"env {section.target}"
    parts = [f"{what} {raised}{on}{colon}{cause}"]
    if failure.trials:
        what = "tries" if failure.method == "__init__" else "seeds"
        parts.append(f"{failure.trials} of {failure.trials} {what} failed")
    elif task and failure.method != "step":
        parts.append(f"{section.reset_tries} of {section.reset_tries} tries failed; its group is dropped")
    elif task:
        parts.append("The rollout leaves its group")
    return ". ".join([*parts, f"Log: {log}"])


class EnvHost:
    """Makes environments and keeps those that finished well for the next rollout of the same purpose."""

    def __init__(
        self,
        section: EnvSection,
        *,
        on_output: Callable[[str], None] | None = None,
        pool: WorkerPool | None = None,
        task: str = "",
    ) -> None:
        """`pool`: the workers of another task's host, where they share them."""
        self._section = section
        self._task = task
        limits = WorkerLimits(section.memory_mb, max_processes=section.max_processes)
        self.pool = pool or WorkerPool(workers=section.workers, limits=limits, on_output=on_output)
        self._class: Callable[..., Any] | None = None
        self._idle: dict[Purpose, list[HostedEnv]] = {"train": [], "eval": []}
        self._num_built = 0
        self._takes: Sequence[str] = ()
        self.declared: Mapping[str, Any] = {}
        """Of `DECLARED`, what the class has; known once it has started."""
        self._held_out: Mapping[str, Any] = section.eval_kwargs
        self.has_split = False
        """Whether held-out tasks have arguments of their own, or the class says that they need none; known once it has started."""

    async def start(self) -> None:
        """Find the class and decide where it runs. Raises EnvFailure when it can't be loaded."""
        target, isolation = self._section.target, self._section.isolation
        if isolation == "inline" or target.startswith(BUILT_IN):
            found = _load(target)
            declared = {name: getattr(found, name) for name in DECLARED if hasattr(found, name)}
            reset = getattr(found, "reset", None)
            traits = Traits(getattr(found, "inline", False) is True, False, declared, taken_by(reset))
        else:
            traits = await self._inspected()
        if isolation == "inline" or (isolation == "auto" and (traits.inline or traits.asynchronous)):
            self._class = _load(target)
        self._takes, self.declared = traits.takes, traits.declared
        self.has_split = bool(self._held_out) or HELD_OUT in traits.declared
        self._held_out = self._held_out or traits.declared.get(HELD_OUT, {})
        if not isinstance(self._held_out, Mapping):
            what = f"declares held_out as {_kind(self._held_out)} instead of a dict of constructor arguments"
            raise EnvFailure("env_reset_failed", "import", what)

    @property
    def pooled(self) -> bool:
        """Whether its environments run in the workers; known once it has started."""
        return self._class is None

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
            return InlineEnv(self._section, self._class(**kwargs))
        except Exception as error:
            raise _raised(error, "__init__", "env_reset_failed") from error

    async def begin(
        self, purpose: Purpose, seed: int, told: Mapping[str, Any] = TOLD
    ) -> "tuple[HostedEnv, Observation, Mapping[str, Any]]":
        """An environment that was reset, after up to `env.reset_tries` tries, each on another instance. Raises the last EnvFailure.

        Its `reset` is given what it takes of `told`.
        """
        tries_left = self._section.reset_tries
        while True:
            tries_left -= 1
            try:
                return await self._begin_once(purpose, seed, told)
            except EnvFailure:
                if not tries_left:
                    raise

    async def _begin_once(
        self, purpose: Purpose, seed: int, told: Mapping[str, Any]
    ) -> "tuple[HostedEnv, Observation, Mapping[str, Any]]":
        env = await self.borrow(purpose)
        try:
            return env, *await env.reset(seed, {name: value for name, value in told.items() if name in self._takes})
        except EnvFailure:
            await env.close()
            raise
        except asyncio.CancelledError:
            await env.abandon()
            raise

    async def try_out(self, seed: int) -> list[EnvFailure]:
        """Build and reset one environment, with held-out arguments too where they differ; it is kept for the first rollout.

        `seed` is tried, and those after it while they fail; returns how they did. Raises the first EnvFailure where all fail.
        """
        purposes: tuple[Purpose, ...] = ("train", "eval") if self._held_out else ("train",)
        return [failure for purpose in purposes for failure in await self._try_seeds(purpose, seed)]

    async def _try_seeds(self, purpose: Purpose, seed: int) -> list[EnvFailure]:
        failures: list[EnvFailure] = []
        while len(failures) < TRIAL_SEEDS and sum(_is_dear(failure) for failure in failures) < DEAR_TRIALS:
            try:
                told = {**TOLD, "task": self._task, "row": len(failures), "purpose": purpose}
                env, _, _ = await self._begin_once(purpose, seed + len(failures), told)
            except EnvFailure as failure:
                failures.append(failure)
            else:
                self.give_back(env, purpose)
                return failures
        failures[0].trials = len(failures)
        raise failures[0]

    def give_back(self, env: "HostedEnv", purpose: Purpose) -> None:
        """Keep an instance that works for the next rollout."""
        self._idle[purpose].append(env)

    async def close(self) -> None:
        """Close idle environments and kill the workers."""
        for idle in self._idle.values():
            while idle:
                await idle.pop().close()
        await self.pool.close()

    async def _inspected(self) -> Traits:
        """Asked in a worker: importing a user's module may hang or crash too."""
        target, limit_s = self._section.target, self._section.build_timeout_s
        for tries_left in reversed(range(self._section.reset_tries)):
            try:
                return await self.pool.inspect(target, deadline_s=limit_s, attributes=DECLARED)
            except PoolError as error:
                if tries_left and isinstance(error, WorkerDied | WorkerKilled):
                    continue  # somebody else may have killed it
                raise _failed(error, "import", "env_reset_failed") from error
        raise AssertionError

    async def _build_in_pool(self, kwargs: Mapping[str, Any]) -> "HostedEnv":
        self._num_built += 1
        name = f"env-{self._task}-{self._num_built}"
        deadline_s = self._section.build_timeout_s
        try:
            await self.pool.build(name, self._section.target, encode_call(**kwargs), deadline_s=deadline_s)
        except PoolError as error:
            raise _failed(error, "__init__", "env_reset_failed") from error
        return PooledEnv(self._section, self.pool, name)


class HostedEnv:
    """One environment instance, whose failures are EnvFailure and whose results are checked."""

    asynchronous = False
    """While it is waited for, the manager and its workers are free for others."""

    def __init__(self, section: EnvSection) -> None:
        self._section = section

    @property
    def usable(self) -> bool:
        """False once it can't be called any more."""
        return True

    async def reset(self, seed: int, told: Mapping[str, Any] = {}) -> tuple[Observation, Mapping[str, Any]]:
        """Start an episode; `told` goes to `reset` beside the seed."""
        limit_s = self._section.reset_timeout_s
        return check_reset(await self._call("reset", "env_reset_failed", limit_s, seed=seed, **told))

    async def step(self, action: str) -> Step:
        """Apply the model's text."""
        return check_step(await self._call("step", "env_step_failed", self._section.step_timeout_s, action))

    async def close(self) -> None:
        """Close it; how that fails no longer matters to anybody."""
        with suppress(EnvFailure):
            await self._call("close", "env_step_failed", CLOSE_S)

    async def abandon(self) -> None:
        """Close it in the middle of a call that nobody waits for any more; what it does in a worker process is not waited for."""
        await self.close()

    async def _call(self, method: str, outcome: EnvOutcome, limit_s: float, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class InlineEnv(HostedEnv):
    """Runs in this process: coroutines under a deadline; a plain method can't be interrupted and is trusted."""

    def __init__(self, section: EnvSection, env: Any) -> None:
        super().__init__(section)
        self._env = env
        self.asynchronous = inspect.iscoroutinefunction(getattr(env, "step", None))

    async def _call(self, method: str, outcome: EnvOutcome, limit_s: float, *args: Any, **kwargs: Any) -> Any:
        scope = asyncio.timeout(limit_s)
        try:
            result = getattr(self._env, method)(*args, **kwargs)
            if not hasattr(result, "__await__"):
                return result
            async with scope:
                return await result
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and scope.expired():
                raise EnvFailure("env_timeout", method, f"hung in {method}: no answer within {limit_s:g} s") from None
            raise _raised(error, method, outcome) from error


class PooledEnv(HostedEnv):
    """Runs in a worker process, which is killed when a call outlives its deadline."""

    def __init__(self, section: EnvSection, pool: WorkerPool, name: str) -> None:
        super().__init__(section)
        self._pool = pool
        self._name = name

    @property
    def usable(self) -> bool:
        """False once its worker ended."""
        return self._pool.has(self._name)

    async def close(self) -> None:
        """Close and forget it."""
        try:
            await super().close()
        finally:
            self._pool.drop(self._name)

    async def abandon(self) -> None:
        """Its process is killed where it hosts nothing else."""
        self._pool.abandon(self._name, deadline_s=CLOSE_S)

    async def _call(self, method: str, outcome: EnvOutcome, limit_s: float, *args: Any, **kwargs: Any) -> Any:
        payload = encode_call(*args, **kwargs)
        try:
            result = decode(await self._pool.call(self._name, method, payload, deadline_s=limit_s))
        except PoolError as error:
            raise _failed(error, method, outcome) from error
        # MessagePack knows no tuples: a list that came back from a worker may have been one.
        return tuple(cast("list[Any]", result)) if isinstance(result, list) else result


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


def _is_dear(failure: EnvFailure) -> bool:
    return failure.method == "__init__" or failure.outcome == "env_timeout"


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


def _raised(error: BaseException, method: str, outcome: EnvOutcome) -> EnvFailure:
    return EnvFailure(outcome, method, f"raised in {method}: {text_of(error)}", place_of(error))


def _failed(error: PoolError, method: str, outcome: EnvOutcome) -> EnvFailure:
    match error:
        case UserCodeRaised():
            return EnvFailure(outcome, method, f"raised in {method}: {error.text}", error.where)
        case WorkerTimeout():
            return EnvFailure("env_timeout", method, f"hung in {method}: {error}")
        case WorkerKilled():
            return EnvFailure("env_lost", method, f"was lost in {method}: {error}")
        case NoWorker():
            return EnvFailure("no_worker", method, f"was lost in {method}: {error}")
        case BadResult():
            return EnvFailure("env_bad_result", method, f"returned nothing usable from {method}: {error}")
        case TargetMissing():
            return EnvFailure(outcome, method, f"can't be loaded: {error}")
        case _:
            return EnvFailure(outcome, method, f"crashed in {method}: {error}")

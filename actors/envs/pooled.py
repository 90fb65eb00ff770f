"""Environments in worker processes, where `env.isolation` has them or their class does not say that it may share the manager's."""

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from rubato.actors import plugins
from rubato.actors.envs.hosting import CLOSE_S, DECLARED, EnvFailure, EnvOutcome, HostedEnv, unusable
from rubato.actors.envs.section import EnvSection
from rubato.runtime.pool.errors import (
    BadResult,
    NoWorker,
    PoolError,
    TargetMissing,
    UserCodeRaised,
    WorkerDied,
    WorkerKilled,
    WorkerTimeout,
)
from rubato.runtime.pool.pool import WorkerPool
from rubato.runtime.pool.sandbox import WorkerLimits
from rubato.runtime.pool.values import Traits, decode, encode_call


class EnvWorkers(WorkerPool):
    """Those of one manager, of the sizes that `env` gives them."""

    def __init__(self, section: EnvSection, on_output: Callable[[str], None] | None, on_size: Callable[[int], None] | None) -> None:
        limits = WorkerLimits(section.memory_mb, max_processes=section.max_processes)
        first, most = section.sizes(usable_cores())
        super().__init__(workers=first, most=most, limits=limits, on_output=on_output, on_size=on_size, wall=plugins.sandbox_wall(section))

    async def inspected(self, section: EnvSection) -> Traits:
        """Traits of the class, found in a worker: importing a user's module may hang or crash too. Raises EnvFailure."""
        target, limit_s = section.target, section.build_timeout_s
        for tries_left in reversed(range(section.reset_tries)):
            try:
                return await self.inspect(target, deadline_s=limit_s, attributes=DECLARED)
            except PoolError as error:
                if tries_left and isinstance(error, WorkerDied | WorkerKilled):
                    continue  # its death may be no fault of the class
                raise _failed(error, "import", "env_reset_failed") from error
        raise AssertionError

    async def built(self, section: EnvSection, name: str, kwargs: Mapping[str, Any]) -> HostedEnv:
        """An instance called `name`. Raises EnvFailure."""
        try:
            await self.build(name, section.target, encode_call(**kwargs), deadline_s=section.build_timeout_s)
        except PoolError as error:
            raise _failed(error, "__init__", "env_reset_failed") from error
        return PooledEnv(section, self, name)


class PooledEnv(HostedEnv):
    """Runs in a worker process, which is killed when a call outlives its deadline."""

    sent = True

    def __init__(self, section: EnvSection, pool: EnvWorkers, name: str) -> None:
        super().__init__(section)
        self._pool = pool
        self._name = name

    @property
    def usable(self) -> bool:
        """False once its worker ended."""
        return self._pool.has(self._name)

    @property
    def crowded(self) -> bool:
        """Whether a worker that came later hosts fewer."""
        return self._pool.is_crowded(self._name)

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
        payload, began = encode_call(*args, **kwargs), self.take_began()
        try:
            result = decode(await self._pool.call(self._name, method, payload, deadline_s=limit_s, began=began))
        except PoolError as error:
            raise _failed(error, method, outcome) from error
        # MessagePack knows no tuples: a list that came back from a worker may have been one.
        return tuple(cast("list[Any]", result)) if isinstance(result, list) else result


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
            return unusable(method, str(error))
        case TargetMissing():
            return EnvFailure(outcome, method, f"can't be loaded: {error}")
        case _:
            return EnvFailure(outcome, method, f"crashed in {method}: {error}")


def usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

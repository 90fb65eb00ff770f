"""What the torch engine can do beyond what every engine does: give a request away, sleep and wake, last like another number of GPUs."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from rubato.actors.engines.engine import EngineError, Work, check_level
from rubato.actors.engines.runner import HOST

if TYPE_CHECKING:
    from rubato.actors.engines.torch_engine import StepLoop


class TorchVerbs(Protocol):
    """The part of the engine on the event loop; each verb is carried out between two steps, by the function of its name below."""

    async def command(self, command: Callable[..., Any], *args: Any) -> Any:
        """Run `command(steps, *args)` between two steps; returns or raises what it does."""
        ...

    def started(self) -> "StepLoop": ...

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        """It lasts what the cache takes to the other engine, while steps go on."""
        work: Work = await self.command(export, request_id, with_cache)
        if work.cache is not None:
            await asyncio.sleep(self.started().timing.kv_move_s(work.cache.num_tokens))
        return work

    async def sleep(self, level: int = 1) -> float:
        return await self.command(sleep, level)

    async def wake(self) -> float:
        return await self.command(wake)

    async def reconfigure(self, degree: int) -> float:
        return await self.command(reconfigure, degree)


def export(steps: "StepLoop", request_id: str, with_cache: bool) -> Work:
    """Hand out what was sampled, as the last chunk; returns the request as others go on with it."""
    sequence = steps.sequence(request_id)
    if sequence is None:
        raise EngineError(f"request {request_id} does not run here: there is nothing to export")
    cache = steps.runner.take_cache(sequence, steps.version_of(sequence)) if with_cache else None
    steps.take_out(sequence, "exported")
    return sequence.moved(cache)


def sleep(steps: "StepLoop", level: int) -> float:
    """Returns the seconds it took."""
    check_level(level)
    if steps.rest_level:
        return 0.0
    began, tokens = steps.now(), steps.scheduler.num_cached
    steps.rest_level = level
    if level > 1:
        tokens = 0
        steps.scheduler.forget_caches()
    steps.runner.move_to(HOST, with_cache=level == 1)
    return steps.last(steps.timing.sleep_s(tokens), began)


def wake(steps: "StepLoop") -> float:
    """Returns the seconds it took."""
    if not steps.rest_level:
        return 0.0
    began, level = steps.now(), steps.rest_level
    steps.rest_level = 0
    steps.runner.move_to(None, with_cache=level == 1)
    return steps.last(steps.timing.sleep_s(steps.scheduler.num_cached), began)


def reconfigure(steps: "StepLoop", degree: int) -> float:
    """Returns the seconds it took."""
    began = steps.now()
    return steps.last(steps.timing.reconfigure(degree, steps.scheduler.num_cached), began)

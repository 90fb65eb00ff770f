"""What the torch engine can do beyond what every engine does: give a request away, sleep and wake, last like another number of GPUs.

Its verbs are the coroutines of VERBS, loaded where the first of them is asked for. Each is carried out between two steps.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rubato.actors.engines.engine import EngineError, Work, check_level
from rubato.actors.engines.runner import HOST

if TYPE_CHECKING:
    from rubato.actors.engines.torch_engine import StepLoop, TorchEngine


async def export(engine: "TorchEngine", request_id: str, *, with_cache: bool = False) -> Work:
    """It lasts what the cache takes to the other engine, while steps go on."""
    work: Work = await engine.command(_export, request_id, with_cache)
    if work.cache is not None:
        await asyncio.sleep(engine.started().timing.kv_move_s(work.cache.num_tokens))
    return work


async def sleep(engine: "TorchEngine", level: int = 1) -> float:
    """Returns the seconds it took, as the other two do."""
    return await engine.command(_sleep, level)


async def wake(engine: "TorchEngine") -> float:
    return await engine.command(_wake)


async def reconfigure(engine: "TorchEngine", degree: int) -> float:
    return await engine.command(_reconfigure, degree)


VERBS: Mapping[str, Any] = {each.__name__: each for each in (export, sleep, wake, reconfigure)}


# -- in the thread of the steps ---------------------------------------------------------------------------------------


def _export(steps: "StepLoop", request_id: str, with_cache: bool) -> Work:
    """Hand out what was sampled, as the last chunk; returns the request as others go on with it."""
    sequence = steps.sequence(request_id)
    if sequence is None:
        raise EngineError(f"request {request_id} does not run here: there is nothing to export")
    cache = steps.runner.take_cache(sequence, steps.version_of(sequence)) if with_cache else None
    steps.take_out(sequence, "exported")
    return sequence.moved(cache)


def _sleep(steps: "StepLoop", level: int) -> float:
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


def _wake(steps: "StepLoop") -> float:
    if not steps.rest_level:
        return 0.0
    began, level = steps.now(), steps.rest_level
    steps.rest_level = 0
    steps.runner.move_to(None, with_cache=level == 1)
    return steps.last(steps.timing.sleep_s(steps.scheduler.num_cached), began)


def _reconfigure(steps: "StepLoop", degree: int) -> float:
    began = steps.now()
    return steps.last(steps.timing.reconfigure(degree, steps.scheduler.num_cached), began)

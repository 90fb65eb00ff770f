"""Departures: with its cache or without, as what was seen of the way says."""

import asyncio
from types import SimpleNamespace

import pytest
import structlog

from rubato.actors.engines.engine import CACHE, EXPORT, Cache, Work
from rubato.actors.messages.generation import Sampling, Tokens
from rubato.actors.messages.moves import MovePrepared, PrepareMove
from rubato.actors.moves.caches import Caches
from rubato.actors.moves.departures import Departures, Leaving
from rubato.bus.message import pack_i32
from rubato.planning.moves import FEW, TRANSFERS


class Exporter:
    """Remembers which requests it gave away with their caches."""

    capabilities = frozenset({EXPORT, CACHE})

    def __init__(self):
        self.with_cache = []

    def load(self):
        return SimpleNamespace(prefill_tokens_s=10_000.0)

    async def export(self, request_id, *, with_cache=False):
        self.with_cache.append(with_cache)
        cache = Cache(1, (2, 1, 10, 10), "uint8", memoryview(bytes(200))) if with_cache else None
        return Work(request_id, "s", (), Sampling(1), cache=cache)


@pytest.fixture
def leave():
    caches, engine = Caches(64), Exporter()
    actor = SimpleNamespace(name="engine-1", incarnation=1, spawn=lambda work, name: work, log=structlog.get_logger())
    departures = Departures(actor, caches)  # pyright: ignore[reportArgumentType] - what is used of it

    async def leave(num):
        before = len(engine.with_cache)
        for place in range(before, before + num):
            request = SimpleNamespace(prompt=pack_i32(range(10)))
            run = asyncio.get_running_loop().create_future()
            shared = SimpleNamespace(request=request, tokens=Tokens(), stage="", run=run)
            order = PrepareMove(str(place), place + 1, "engine-2", 1)
            done = await departures.prepare(engine, shared, Leaving(), order, SimpleNamespace(version=1))  # pyright: ignore[reportArgumentType]
            assert isinstance(done, MovePrepared)
            departures.keep(order.request_id, order.number)
        return engine.with_cache[before:]

    return leave, caches.link


async def test_one_slow_transfer_does_not_keep_caches_from_leaving(leave):
    leave, link = leave
    for _ in range(FEW - 1):
        link.saw(200, 60.0)

    assert await leave(2) == [True, True]


async def test_over_a_slow_way_caches_stay_and_one_is_sent_now_and_then_to_find_out(leave):
    leave, link = leave
    assert await leave(1) == [True]
    for _ in range(TRANSFERS):
        link.saw(200, 60.0)

    assert await leave(2 * TRANSFERS + 2) == ([False] * TRANSFERS + [True]) * 2

    link.saw(200, 1e-6)
    assert await leave(2) == [True, True]

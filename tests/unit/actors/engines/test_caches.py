"""Caches that wait to be fetched: bounded, and of one weight version."""

import asyncio

from actors.engines.caches import PART_BYTES, Caches
from actors.engines.engine import Cache
from actors.messages.generation import FetchCache


def cache(version=0):
    return Cache(version, (2, 1, 1, 1), "int32", memoryview(bytes(8)))


def test_those_that_are_fetched_next_stay_where_there_is_no_room_for_more():
    kept = Caches(2)
    for name in "abc":
        kept.keep(name, cache())

    assert [kept.take(name) is not None for name in "abc"] == [True, True, False]


def test_one_is_given_once():
    kept = Caches(2)
    kept.keep("a", cache(3))

    assert kept.give(FetchCache("a", epoch=1)).shape == ()
    assert kept.give(FetchCache("a")).version == 3
    assert kept.give(FetchCache("a")).shape == ()


def test_one_for_a_move_is_not_that_of_another_move_or_a_hand_over():
    kept = Caches(3)
    for epoch in (0, 1, 2):
        kept.keep("a", cache(epoch), epoch)

    assert kept.give(FetchCache("a", epoch=2)).version == 2
    assert kept.take("a", 1).version == 1
    assert kept.take("a").version == 0


def test_new_weights_make_them_useless():
    kept = Caches(1)
    kept.keep("a", cache())
    kept.forget()
    kept.keep("b", cache())

    assert kept.take("a") is None
    assert kept.take("b") is not None


def test_parts_of_two_caches_are_never_put_together():
    kept, fetched = Caches(1), Caches(1)

    def large(version):
        return Cache(version, (2, 1, 1, 1), "int32", memoryview(bytes(2 * PART_BYTES)))

    class Source:
        async def ask(self, request, **options):
            part = kept.give(request)
            if not request.offset:  # new weights, under which the request is prefilled again
                kept.forget()
                kept.keep("a", large(2))
            return part

    kept.keep("a", large(1))

    assert asyncio.run(fetched.fetch(Source(), "a")) is None

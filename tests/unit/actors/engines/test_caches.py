"""Caches that wait to be fetched: bounded, and of one weight version."""

import asyncio
import random

import pytest

from rubato.actors.engines.engine import Cache
from rubato.actors.messages.moves import FetchCache
from rubato.actors.moves.caches import PART_BYTES, PARTS_AT_ONCE, Caches
from rubato.bus.errors import Unknown


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

    assert kept.give(FetchCache("a", number=1)).shape == ()
    assert kept.give(FetchCache("a")).version == 3
    assert kept.give(FetchCache("a")).shape == ()


def test_one_for_a_move_is_not_that_of_another_move_or_a_hand_over():
    kept = Caches(3)
    for number in (0, 1, 2):
        kept.keep("a", cache(number), number)

    assert kept.give(FetchCache("a", number=2)).version == 2
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


class Counting:
    """Gives what `kept` has, each part only once nobody has asked for another: how many were under way, and in which order they were asked."""

    def __init__(self, kept, lost=None):
        self.kept, self.lost = kept, lost
        self.asked, self.under_way, self.most = [], 0, 0

    async def ask(self, request, **options):
        self.asked.append(request.offset)
        part = self.kept.give(request)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(10 - len(self.asked) % 3):  # answers overtake each other
            await asyncio.sleep(0)
        self.under_way -= 1
        if request.offset == self.lost:
            raise Unknown("engine-1 is gone")
        return part


@pytest.mark.parametrize("size", [8, PART_BYTES, PART_BYTES + 4, 9 * PART_BYTES + 4])
def test_a_cache_of_many_parts_is_asked_for_in_order_with_few_under_way_and_put_together_again(size):
    data = memoryview(random.Random(1).randbytes(size))
    kept, fetched = Caches(1), Caches(1)
    kept.keep("a", Cache(3, (2, 1, 1, size // 8), "int32", data))
    source = Counting(kept)

    found = asyncio.run(fetched.fetch(source, "a"))

    assert found == Cache(3, (2, 1, 1, size // 8), "int32", data)
    assert source.asked == [*range(0, size, PART_BYTES)]
    assert source.most == min(PARTS_AT_ONCE, max(1, len(source.asked) - 1))
    assert len(fetched.link._seen) == 1
    assert kept.take("a") is None


@pytest.mark.parametrize("lost", [0, PART_BYTES, 5 * PART_BYTES])
def test_a_cache_of_which_any_part_does_not_come_is_none(lost):
    kept, fetched = Caches(1), Caches(1)
    kept.keep("a", Cache(3, (2, 1, 1, 1), "int32", memoryview(bytes(6 * PART_BYTES))))

    assert asyncio.run(fetched.fetch(Counting(kept, lost), "a")) is None
    assert not fetched.link._seen

"""Caches that wait to be fetched: bounded, and of one weight version."""

from actors.engines.caches import KeptCaches
from actors.engines.engine import Cache
from actors.messages.generation import FetchCache
from bus.codec import MAX_BODY_BYTES


def cache(version=0):
    return Cache(version, (2, 1, 1, 1), "int32", memoryview(bytes(8)))


def test_those_that_are_fetched_next_stay_where_there_is_no_room_for_more():
    kept = KeptCaches(2)
    for name in "abc":
        kept.keep(name, cache())

    assert [kept.take(name) is not None for name in "abc"] == [True, True, False]


def test_one_that_no_frame_holds_is_not_kept():
    kept = KeptCaches(1)

    kept.keep("a", cache()._replace(data=memoryview(bytes(MAX_BODY_BYTES + 1))))

    assert kept.give(FetchCache("a")).shape == ()


def test_one_is_given_once():
    kept = KeptCaches(2)
    kept.keep("a", cache(3))

    assert kept.give(FetchCache("a")).version == 3
    assert kept.give(FetchCache("a")).shape == ()


def test_new_weights_make_them_useless():
    kept = KeptCaches(1)
    kept.keep("a", cache())
    kept.forget()
    kept.keep("b", cache())

    assert kept.take("a") is None
    assert kept.take("b") is not None

"""With its cache or without: whichever is there sooner."""

from rubato.planning.moves import FEW, TRANSFERS, Rate, Transfer, carry

REQUEST = Transfer(1000, 999, 100_000.0, 1e9, 5000.0)


def test_a_fast_link_carries_the_cache_and_a_slow_one_leaves_it_to_a_prefill():
    fast, slow = carry(REQUEST), carry(REQUEST._replace(link_bytes_s=1e8))

    assert (fast.with_cache, slow.with_cache) == (True, False)
    assert fast.why == "99.9 MB of cache take 0.100 s, prefilling 1000 tokens 0.200 s"
    assert slow.why == "99.9 MB of cache take 0.999 s, prefilling 1000 tokens 0.200 s"


def test_without_a_cache_or_with_one_of_other_weights_there_is_nothing_to_carry():
    assert carry(REQUEST._replace(num_cached=0))[::3] == (False, "it has no cache yet")
    assert carry(REQUEST._replace(same_weights=False))[::3] == (False, "its cache is of other weights")


def test_where_a_rate_is_unknown_the_cache_goes_and_finds_out():
    for unknown in (REQUEST._replace(link_bytes_s=0.0), REQUEST._replace(prefill_tokens_s=0.0)):
        assert carry(unknown).with_cache
        assert carry(unknown).why == "99.9 MB of cache, over a link or to an engine of unknown rate"


def test_a_slow_link_that_was_passed_over_for_long_is_tried_again():
    slow = REQUEST._replace(link_bytes_s=1e8)

    assert not carry(slow._replace(num_passed_over=TRANSFERS - 1)).with_cache
    again = carry(slow._replace(num_passed_over=TRANSFERS))
    assert (again.with_cache, again.why) == (True, "99.9 MB of cache, over a link that was slow: is it still?")


def test_what_the_cache_lacks_is_prefilled_either_way():
    part = carry(REQUEST._replace(num_cached=500))

    assert part.cache_s == 500 * 100_000 / 1e9 + 500 / 5000
    assert part.recompute_s == 1000 / 5000


def test_a_small_transfer_that_waited_does_not_make_a_link_slow():
    rate = Rate()
    assert rate.bytes_s == 0

    for _ in range(FEW - 1):
        rate.saw(1_000, 0.25)
        assert rate.bytes_s == 0
    rate.saw(1_000_000, 0.001)
    rate.saw(1_000, 0.25)
    assert rate.bytes_s == 1e9

    for _ in range(TRANSFERS):
        rate.saw(1_000_000, 0.1)
    assert rate.bytes_s == 1e7

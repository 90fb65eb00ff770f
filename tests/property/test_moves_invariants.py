"""Moves: what holds for every request and every pair of rates."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.moves import Transfer, carry

RATE = st.floats(1.0, 1e12)


@st.composite
def movings(draw):
    num = draw(st.integers(1, 100_000))
    return Transfer(num, draw(st.integers(0, num)), draw(st.floats(1.0, 1e6)), draw(RATE), draw(RATE), draw(st.booleans()))


@given(movings())
def test_the_way_that_is_taken_is_never_slower_than_the_other(moving):
    plan = carry(moving)

    assert plan == carry(moving)
    assert plan.why
    if plan.with_cache:
        assert plan.cache_s < plan.recompute_s


@given(movings(), st.floats(1.0, 1e3))
def test_a_faster_link_never_leaves_a_cache_behind_that_a_slower_one_carries(moving, times):
    if carry(moving).with_cache:
        assert carry(moving._replace(link_bytes_s=moving.link_bytes_s * times)).with_cache


@given(movings(), st.floats(1.0, 1e3))
def test_a_faster_prefill_never_carries_a_cache_that_a_slower_one_leaves(moving, times):
    if not carry(moving).with_cache:
        assert not carry(moving._replace(prefill_tokens_s=moving.prefill_tokens_s * times)).with_cache

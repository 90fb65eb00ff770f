"""Credit: never negative, never stuck, and the receiver's queue never beyond what it granted."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from rubato.bus.link import WINDOW_BYTES, WINDOW_MESSAGES, Account, Grants, charge

sizes = st.one_of(st.integers(0, 2000), st.integers(0, WINDOW_BYTES), st.integers(0, 100 * WINDOW_BYTES))


@given(st.lists(st.one_of(sizes, st.none()), max_size=400))
def test_granted_minus_consumed_is_never_negative_and_a_queue_never_exceeds_the_window(steps):
    account, grants = Account(), Grants()
    queue: deque[int] = deque()

    # A size is an attempt to send; None is the receiver taking one message from its queue.
    for size in steps:
        if size is not None and account.take(size):
            queue.append(size)
        elif size is None and queue:
            account.grant(*grants.consumed(queue.popleft()))
        assert 0 <= account.messages <= WINDOW_MESSAGES
        assert 0 <= account.size_bytes <= WINDOW_BYTES
        assert len(queue) <= WINDOW_MESSAGES
        assert account.messages + len(queue) + grants.messages == WINDOW_MESSAGES
        assert account.size_bytes + sum(map(charge, queue)) + grants.size_bytes == WINDOW_BYTES


@given(st.lists(sizes, max_size=300))
def test_a_sender_is_never_stuck_once_the_receiver_has_consumed_everything(messages):
    account, grants = Account(), Grants()

    for size in messages:
        assert account.take(size)
        account.grant(*grants.consumed(size))

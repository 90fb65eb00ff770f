from rubato.bus.link import REGRANT_BYTES, REGRANT_MESSAGES, WINDOW_BYTES, WINDOW_MESSAGES, Account, Grants


def test_a_sender_starts_with_a_window_of_1024_messages_and_4_mib():
    by_count, by_size = Account(), Account()

    assert sum(by_count.take(1) for _ in range(2000)) == WINDOW_MESSAGES == 1024
    assert sum(by_size.take(1024 * 1024) for _ in range(100)) == WINDOW_BYTES // (1024 * 1024) == 4


def test_a_message_that_is_not_paid_for_costs_nothing():
    account = Account()
    account.take(WINDOW_BYTES // 2)
    account.take(WINDOW_BYTES // 4)

    assert not account.take(WINDOW_BYTES // 2)
    assert account.take(WINDOW_BYTES // 4)


def test_credit_comes_back_once_half_the_window_was_consumed():
    by_count, by_size = Grants(), Grants()

    granted = [by_count.consumed(10) for _ in range(REGRANT_MESSAGES)]

    assert granted == [(0, 0)] * (REGRANT_MESSAGES - 1) + [(REGRANT_MESSAGES, 10 * REGRANT_MESSAGES)]
    assert by_size.consumed(REGRANT_BYTES - 1) == (0, 0)
    assert by_size.consumed(1) == (2, REGRANT_BYTES)


def test_a_message_larger_than_the_window_passes_and_costs_half_of_it():
    account, grants = Account(), Grants()

    assert account.take(100 * WINDOW_BYTES)
    assert account.size_bytes == WINDOW_BYTES // 2
    account.grant(*grants.consumed(100 * WINDOW_BYTES))
    assert (account.messages, account.size_bytes) == (WINDOW_MESSAGES, WINDOW_BYTES)


def test_a_negative_grant_takes_nothing_away():
    account = Account()

    account.grant(-5, -5)

    assert (account.messages, account.size_bytes) == (WINDOW_MESSAGES, WINDOW_BYTES)

"""When attempts fail so often that no further one can be expected to succeed."""

from rubato.planning.failures import FIRST, MAX_SHARE, RECENT, is_hopeless


def test_it_is_too_early_to_judge_the_first_attempts():
    assert not is_hopeless([True] * (FIRST - 1), ever_good=False)
    assert is_hopeless([True] * FIRST, ever_good=False)


def test_what_got_through_once_is_judged_by_the_share_of_a_full_window():
    most = int(MAX_SHARE * RECENT)

    assert not is_hopeless([True] * (RECENT - 1), ever_good=True)
    assert not is_hopeless([True] * most + [False] * (RECENT - most), ever_good=True)
    assert is_hopeless([True] * (most + 1) + [False] * (RECENT - most - 1), ever_good=True)

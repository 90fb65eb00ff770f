"""What a server remembers of what it sampled, across its restarts."""

import pytest

from rubato.actors.gateway.tinker.ages import Ages, Noted, Under
from rubato.actors.gateway.tinker.journal import Book
from tests.unit.actors.gateway.tinker.conftest import ints, sampled

MODEL = "m"


@pytest.fixture
def remembering(tmp_path):
    def make(most=4):
        found = Ages(most, Book(tmp_path / "sampled.jsonl", Noted))
        found.load()
        return found

    return make


def noted(ages, numbers):
    for number in numbers:
        ages.note(b"prompt", b"%d" % number, f"s:{number}", Under(MODEL, number, number))
    ages.keep()


def known(ages):
    """Versions of the sequences that are known by name."""
    asked = sampled("ppo", rows=([1, 2, 3],))
    judged = [ages.judged(MODEL, 0, None, asked, ((f"s:{number}",),)) for number in range(40)]
    return [each.oldest for each in judged if each.num_known]


def test_the_newest_that_were_kept_outlive_the_server(remembering):
    ages = remembering()
    noted(ages, range(3))
    assert known(remembering()) == known(ages) == [0, 1, 2]
    noted(ages, range(3, 7))
    assert known(remembering()) == known(ages) == [3, 4, 5, 6]


def test_the_book_stays_small(remembering, tmp_path):
    ages = remembering()
    for number in range(40):
        noted(ages, [number])
        assert len((tmp_path / "sampled.jsonl").read_bytes().split()) <= 8
    assert known(ages) == [36, 37, 38, 39]


def test_what_a_kill_cut_short_is_passed_over(remembering, tmp_path):
    noted(remembering(), range(3))
    path = tmp_path / "sampled.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    ages = remembering()
    assert known(ages) == [0, 1]
    noted(ages, [2])
    assert known(remembering()) == [0, 1, 2]


def test_a_write_that_fails_is_made_again(remembering, tmp_path, monkeypatch):
    ages = remembering()
    with monkeypatch.context() as patched:
        patched.setattr(Book, "add", full)
        with pytest.raises(OSError, match="no room"):
            noted(ages, range(2))
    ages.keep()
    assert known(remembering()) == [0, 1]


def full(book, *records):
    raise OSError("no room")


def test_nothing_is_remembered_where_nothing_may_be(remembering):
    ages = remembering(0)
    noted(ages, range(3))
    assert known(ages) == []


@pytest.mark.parametrize("target", [2**40, -(2**62), 2**31])
def test_of_a_target_that_is_no_token_nothing_is_known(remembering, target):
    asked = sampled("ppo", rows=([1, 2, 3],))
    asked.data[0].inputs["target_tokens"] = ints([2, target])
    assert remembering().judged(MODEL, 0, 0, asked, ()).num_unknown == 1

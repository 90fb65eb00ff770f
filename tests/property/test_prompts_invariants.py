"""Each prompt is given once per epoch, and each task its share, whatever is forgotten, restarted or resumed between."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.actors.data.prompts import Mixture, Prompts, TaskCursor
from rubato.planning.prompts import Epochs, next_task, shuffled
from rubato.runtime.errors import ConfigError

weights = st.dictionaries(st.sampled_from("abcde"), st.floats(0.0, 10.0).filter(lambda w: w == 0.0 or w > 1e-3), min_size=1).filter(
    lambda found: sum(found.values()) > 0.0
)


def test_the_first_rollouts_of_an_evaluation_are_of_every_task():
    """They are what stays on disk."""
    mixture = Mixture({"few": Prompts(held_out=[7]), "many": Prompts(), "some": Prompts(held_out=[3, 1])})

    exam = list(mixture.exam(3))

    assert exam == [("few", 7), ("many", 0), ("some", 3), ("many", 1), ("some", 1), ("many", 2)]


def test_a_run_that_goes_on_with_other_rows_is_refused_and_has_not_moved():
    cursors = {}
    for _ in range(5):
        Mixture({"sums": Prompts(1.0, epochs_of(8, 1), rows=8)}).draw(cursors)
    kept = msgspec.msgpack.encode(cursors)

    with pytest.raises(ConfigError, match=r"^tasks\.sums has 6 rows to train on, where this run had 8: .*\.$"):
        Mixture({"sums": Prompts(1.0, epochs_of(6, 1), rows=6)}).draw(cursors)

    assert msgspec.msgpack.encode(cursors) == kept


def epochs_of(num, seed):
    return Epochs(lambda epoch: shuffled(num, seed, epoch))


@given(st.integers(1, 60), st.integers(0, 5), st.integers(1, 4))
def test_every_epoch_gives_each_row_once(num, seed, epochs):
    given_rows = [epochs_of(num, seed).row(number) for number in range(num * epochs)]

    for epoch in range(epochs):
        assert sorted(given_rows[epoch * num : (epoch + 1) * num]) == list(range(num))


@given(st.integers(1, 40), st.lists(st.integers(0, 200), max_size=20))
def test_a_number_gives_the_same_row_whatever_was_asked_before(num, numbers):
    asked = epochs_of(num, 3)

    assert [asked.row(number) for number in numbers] == [epochs_of(num, 3).row(number) for number in numbers]


@given(weights, st.integers(1, 200))
def test_no_task_is_ever_off_its_share_by_as_many_groups_as_there_are_tasks(shares, num):
    owed, given_to = {}, Counter()
    for total in range(1, num + 1):
        name, owed = next_task(shares, owed)
        given_to[name] += 1
        for each, weight in shares.items():
            assert abs(given_to[each] - total * weight / sum(shares.values())) < max(2, len(shares))
    assert all(shares[name] > 0.0 for name in given_to)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 4.0)), min_size=1, max_size=4), st.integers(0, 80), st.sets(st.integers(0, 79))
)
def test_a_restart_at_any_place_changes_nothing(tasks, num, restarts):
    def mixture():
        return Mixture({f"t{n}": Prompts(weight, epochs_of(rows, n)) for n, (rows, weight) in enumerate(tasks)})

    unbroken, kept, whole, pieces, now = mixture(), {}, [], [], mixture()
    cursors = {}
    for number in range(num):
        whole.append(unbroken.draw(cursors))
        if number in restarts:
            now = mixture()
            kept = msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=dict[str, TaskCursor])
        pieces.append(now.draw(kept))

    assert pieces == whole
    for n, (rows, _) in enumerate(tasks):
        mine = [row for name, row in pieces if name == f"t{n}"]
        for at in range(0, len(mine), rows):
            assert len({*mine[at : at + rows]}) == len(mine[at : at + rows])

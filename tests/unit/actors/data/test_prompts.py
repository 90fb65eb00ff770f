"""Data sets of a run that goes on: whether their rows are those of before."""

import json

import pytest

from rubato.actors.data.datasets import digest_of, read_rows
from rubato.actors.data.prompts import TaskCursor, mixture_of
from rubato.actors.data.tasks import TaskSection
from rubato.runtime.errors import ConfigError


@pytest.fixture
def data(tmp_path):
    """Writes data files of these rows, and returns the mixture over them."""

    def make(train, held_out=None):
        options = {"path": f"{tmp_path}/train.jsonl", "grader": "exact"}
        files = {"train": train} | ({} if held_out is None else {"eval": held_out})
        for name, rows in files.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": row, "answer": row}) + "\n" for row in rows))
        if held_out is not None:
            options["eval_path"] = f"{tmp_path}/eval.jsonl"
        read_rows.cache_clear()
        digest_of.cache_clear()
        return mixture_of({"words": TaskSection.model_validate({"data": options})}, 1)

    return make


@pytest.mark.parametrize("train", ["abd", "bac", "ab"], ids=["another row", "another order", "a row less"])
def test_a_run_does_not_go_on_with_other_rows_than_it_was_trained_on(train, data):
    cursors: dict[str, TaskCursor] = {}
    before = data("abc")
    assert before.check(cursors) == []
    before.draw(cursors)
    assert data("abc").check(cursors) == []

    with pytest.raises(ConfigError, match=r"tasks\.words.* some be held out that were trained on"):
        data(train).check(cursors)
    with pytest.raises(ConfigError, match=r"or start another run\."):
        data(train).draw(cursors)


def test_held_out_rows_that_are_others_are_told_once_and_trained_on_nevertheless(data):
    cursors: dict[str, TaskCursor] = {}
    data("abc", "xyz").check(cursors)
    data("abc", "xyz").draw(cursors)

    told = [data("abc", held_out).check(cursors) for held_out in ("xyz", "xyw", "xyw")]

    assert [len(each) for each in told] == [0, 1, 0]
    assert "its evaluations don't compare with those so far" in told[1][0]


def test_a_run_that_began_before_contents_were_compared_goes_on(data):
    mixture = data("abc")

    assert mixture.check({"words": TaskCursor(given=2, rows=3)}) == []

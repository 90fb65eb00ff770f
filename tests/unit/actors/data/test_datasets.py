"""Files of rows, their splits and orders, and the sentence for everything that is wrong with them."""

import json

import pytest

from rubato.actors.data.datasets import check_data, epochs_of, read_rows, split_of
from rubato.actors.data.tasks import OWN_COLUMNS, DataSection
from rubato.actors.envs.task_checks import check_forms
from rubato.runtime.errors import ConfigError

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n), "level": n % 3} for n in range(12)]

SAMPLERS = """
def easy_first(rows, *, epoch, seed):
    return sorted(range(len(rows)), key=lambda at: rows[at]["level"])

def beyond(rows, *, epoch, seed):
    return [len(rows)]

def before(rows, *, epoch, seed):
    return [-1]

def nothing(rows, *, epoch, seed):
    return []
"""


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path, rows=ROWS):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def saved(folder, rows=ROWS):
    """As Dataset.save_to_disk writes it, in two files."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir()
    names = []
    for part in (rows[:5], rows[5:]):
        table = pyarrow.Table.from_pylist(part)
        names.append(f"data-{len(names):05d}-of-00002.arrow")
        with pyarrow.OSFile(str(folder / names[-1]), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return str(folder)


def data(path, **more):
    return DataSection(path=path, **{"prompt": "question", **more})


@pytest.mark.parametrize(
    ("write", "name"), [(jsonl, "a.jsonl"), (parquet, "a.parquet"), (saved, "a")], ids=["jsonl", "parquet", "datasets"]
)
def test_rows_are_read_whatever_holds_them(tmp_path, write, name):
    path = write(tmp_path / name)

    rows = read_rows(path)

    assert [rows[at] for at in range(len(rows))] == ROWS
    check_data(data(path), "tasks.sums.data")


@pytest.mark.parametrize("name", OWN_COLUMNS)
@pytest.mark.parametrize("held_out", [False, True], ids=["path", "eval_path"])
def test_a_column_with_a_name_of_rubatos_own_is_refused_with_the_rename_to_make(tmp_path, name, held_out):
    odd = jsonl(tmp_path / "odd.jsonl", [*ROWS[:3], {**ROWS[3], name: 1}])
    given = data(jsonl(tmp_path / "a.jsonl"), eval_path=odd) if held_out else data(odd)

    with pytest.raises(ConfigError, match=rf"odd\.jsonl has a column {name}, .* Rename it .* data_{name};"):
        check_data(given, "tasks.sums.data")


def test_the_columns_of_a_table_are_checked_too(tmp_path):
    with pytest.raises(ConfigError, match="has a column seed"):
        check_data(data(parquet(tmp_path / "a.parquet", [{**row, "seed": 1} for row in ROWS])), "tasks.sums.data")


def wrong(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", r"data file .*/a\.jsonl is empty: it has no rows\."),
        ("a.jsonl", '{"question": "x"}\n{"question": \n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", '{"question": "x", "answer": 1}\n[1]\n', r"a\.jsonl, line 2: a row is an object with columns"),
        ("a.jsonl", '{"question": "x", "answer": 1}\n{"question": "y"}\n', r"a\.jsonl: row 2 has no answer\."),
        ("a.jsonl", '{"questions": "x", "answer": 1}\n', r"prompt: .* has no column question: .*Did you mean questions"),
        ("a.json", '[\n{"question": "x", "answer": 1}\n]\n', r"a\.json, line 1: .*Each line is a row of its own\.$"),
        ("a.jsonl", '{"questoin": "x", "answer": 1}\n', r"Did you mean questoin\?$"),
        ("a.jsonl", '{"question": ' + "[" * 3000 + "]" * 3000 + "}\n", r"a\.jsonl, line 1: nested too deeply"),
        ("a.parquet", "no table", r"a\.parquet can't be read as Parquet"),
        ("a.csv", "x", r"a\.csv is none of \.jsonl"),
    ],
)
def test_a_file_that_can_not_be_used_is_named_with_its_line(tmp_path, name, text, words):
    with pytest.raises(ConfigError, match=words):
        check_data(data(wrong(tmp_path / name, text)), "tasks.sums.data")


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (7, "an observation of type int instead of a string or a list of chat messages"),
        ({"role": "user", "content": "x"}, "an observation of type dict"),
        ([], r"nothing to observe \(\[\]\)"),
        ([{"role": "user"}], "content is of type NoneType instead of a string"),
        (IMAGE, "a part of type image_url: models here read text alone"),
    ],
)
def test_a_prompt_of_another_form_is_named_with_its_row(tmp_path, prompt, words):
    path = jsonl(tmp_path / "a.jsonl", [*ROWS[:4], {"question": prompt, "answer": "x"}])

    with pytest.raises(ConfigError, match=rf"a\.jsonl: row 5's question is wrong: .*{words}"):
        check_forms(data(path))


def test_prompts_of_a_table_are_checked_row_by_row_too(tmp_path):
    good = [{"role": "user", "content": "x", "name": None}]
    rows = [{"question": good, "answer": "x"}, {"question": [{"role": None, "content": "x"}], "answer": "x"}]

    check_forms(data(parquet(tmp_path / "good.parquet", rows[:1])))
    with pytest.raises(ConfigError, match=r"a\.parquet: row 2's question is wrong: a chat message"):
        check_forms(data(parquet(tmp_path / "a.parquet", rows)))


def test_texts_and_messages_may_stand_side_by_side_and_the_mark_of_utf_8_is_no_part_of_them(tmp_path):
    rows = [{"question": "x", "answer": 1}, {"question": [{"role": "user", "content": "x"}], "answer": 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8-sig")

    check_forms(data(str(tmp_path / "a.jsonl")))

    assert read_rows(str(tmp_path / "a.jsonl"))[0] == rows[0]


def test_half_of_a_surrogate_pair_in_a_row_is_read_as_text_everywhere_is(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"q": "a\ud83d b", "a": ["\udc00", {"\ud83d": 1}]}, {"q": "\U0001f600 \\ud83d", "a": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    found = [*read_rows(str(path))]

    assert found == [{"q": "a\ufffd b", "a": ["\ufffd", {"\ufffd": 1}]}, rows[1]]
    path.write_text('{"q": "\\ud83d", "a": NaN}')
    read_rows.cache_clear()
    with pytest.raises(ConfigError, match=r"line 1: not valid JSON"):
        read_rows(str(path))


def test_a_line_that_is_not_in_utf_8_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "x", "answer": 1}\n{"question": "caf\xe9", "answer": 1}\n')

    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: not in UTF-8"):
        read_rows(str(tmp_path / "a.jsonl"))


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refused(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    path = jsonl(tmp_path / "a.jsonl")
    monkeypatch.setattr("pathlib.Path.open", refused)  # root may read everything

    with pytest.raises(ConfigError, match=r"a\.jsonl can't be read: Permission denied\."):
        read_rows(path)


@pytest.mark.parametrize("write", [parquet, saved], ids=["parquet", "datasets"])
def test_a_cell_of_a_table_that_is_empty_is_named_with_its_row(tmp_path, write):
    path = write(tmp_path / "a.parquet", [*ROWS[:7], {"question": "x", "answer": None}, *ROWS[7:]])

    with pytest.raises(ConfigError, match=r"a\.parquet: row 8 has no answer\."):
        check_data(data(path), "tasks.sums.data")


def test_a_path_that_leads_nowhere_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl does not exist"):
        read_rows(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match=r"plain has no state\.json"):
        read_rows(str(tmp_path / "plain"))
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"holds the splits train, test: name one, as .*both/train"):
        read_rows(str(tmp_path / "both"))
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ')
    with pytest.raises(ConfigError, match=r"dataset_dict\.json should name, which can't be read"):
        read_rows(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match=r"x\.jsonl does not exist"):
        read_rows("x" * 5000 + ".jsonl")


def test_held_out_rows_are_those_of_their_own_file_or_drawn_and_left_out_of_training(tmp_path):
    path, other = jsonl(tmp_path / "a.jsonl"), jsonl(tmp_path / "b.jsonl", ROWS[:3])

    alone, drawn = split_of(data(path)), split_of(data(path, eval_rows=4))

    assert (list(alone.train), list(alone.held_out)) == (list(range(12)), list(range(12)))
    assert sorted([*drawn.train, *drawn.held_out]) == list(range(12))
    assert len(drawn.held_out) == 4
    assert list(split_of(data(path, eval_path=other)).held_out) == [0, 1, 2]
    with pytest.raises(ConfigError, match="has 12 rows, and eval_rows=12 leaves none"):
        split_of(data(path, eval_rows=12))


def test_a_sampler_orders_an_epoch(tmp_path):
    (tmp_path / "own.py").write_text(SAMPLERS)
    section = data(jsonl(tmp_path / "a.jsonl"), eval_rows=3, sampler=f"{tmp_path}/own.py:easy_first")
    train = split_of(section).train

    epochs = epochs_of(section, train, 1)

    order = [epochs.row(number) for number in range(len(train))]
    assert sorted(order) == sorted(train)
    assert [ROWS[row]["level"] for row in order] == sorted(ROWS[row]["level"] for row in train)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beyond", "failed in epoch 0: .*12 is not in range"),
        ("before", "failed in epoch 0: .*-1 is not in range"),
        ("nothing", "gave no rows for epoch 0"),
    ],
)
def test_a_sampler_that_can_not_be_followed_is_named(tmp_path, name, words):
    (tmp_path / "own.py").write_text(SAMPLERS)
    section = data(jsonl(tmp_path / "a.jsonl"), sampler=f"{tmp_path}/own.py:{name}")

    with pytest.raises(ConfigError, match=rf"sampler .*own\.py:{name} {words}"):
        epochs_of(section, range(12), 1).row(0)

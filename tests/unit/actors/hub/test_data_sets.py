"""Data sets by their name at a hub, against a hub on loopback: which files a split is, and what is said where it can't be had."""

import json
import os
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest

from rubato.actors.data.datasets import check_data, columns_of, data_rows, digest_of, read_rows
from rubato.actors.data.tasks import DataSection, HubRows
from rubato.actors.envs.task_checks import check_tasks
from rubato.actors.hub import data_sets, names
from rubato.runtime.errors import ConfigError
from tests.hub import use


def lines(first: int, num: int) -> bytes:
    return b"".join(json.dumps({"question": f"{n} + {n}?", "answer": str(2 * n)}).encode() + b"\n" for n in range(first, first + num))


def parquet(first: int, num: int) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    out = BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines(first, num).splitlines()]), out)
    return out.getvalue()


def card(configs: str) -> bytes:
    return f"---\nlicense: mit\nconfigs:\n{configs}\n---\n# Sums\n".encode()


SUMS = {"train.jsonl": lines(0, 5), "test.jsonl": lines(100, 2), "README.md": b"# Sums\n"}

TWO_SUBSETS = card(
    "- config_name: main\n  data_files:\n  - {split: train, path: 'main/train-*'}\n  - {split: test, path: [main/test-*]}\n"
    "- config_name: hard\n  data_files: 'hard/**'"
)


@pytest.fixture(autouse=True)
def nothing_kept():
    """Rows that another test read."""
    for kept in (read_rows, columns_of, digest_of):
        kept.cache_clear()


def section(path: str, **more: object) -> DataSection:
    return DataSection(path=path, prompt="question", **more)  # type: ignore[arg-type]


def job(data: DataSection) -> dict:
    return {"tasks": {"sums": {"data": data.model_dump()}}}


def pinned(data: DataSection, folder: Path) -> DataSection:
    changes, _ = names.pin(job(data), folder)
    return data.model_copy(update={keys[-1]: value for keys, value in changes.items()})


def fetched(data: DataSection, folder: Path) -> DataSection:
    """At the commit of now, with its rows in the cache."""
    data = pinned(data, folder)
    assert fetch(data, folder / "run") == 0
    return data


def fetch(data: DataSection, run: Path) -> int:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(job(data)))
    return names.main([str(run)])


def refused(data: DataSection, folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        names.pin(job(data), folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def answers(path: str) -> list[str]:
    return [row["answer"] for row in read_rows(path)]


def test_a_split_is_fetched_and_read_as_a_file_would_be(there, tmp_path):
    commit = there.add("acme/sums", SUMS, kind="dataset")

    data = fetched(section("acme/sums", eval_split="test"), tmp_path)

    assert data.path == f"acme/sums@{commit}"
    assert answers(data.source) == ["0", "2", "4", "6", "8"]
    assert answers(data.eval_source) == ["200", "202"]
    rows = data_rows(data, seed=1)
    assert (rows.num, list(rows.held_out)) == (5, [0, 1])
    assert rows.digest != rows.held_out_digest != ""
    check_data(data, "tasks.sums.data")


def test_a_subset_has_the_files_that_the_card_names_for_it(there, tmp_path):
    files = {
        "main/train-00000-of-00002.parquet": parquet(0, 2), "main/train-00001-of-00002.parquet": parquet(2, 1),
        "main/test-00000-of-00001.parquet": parquet(9, 1), "hard/deep/b.jsonl": lines(7, 1), "hard/a.jsonl": lines(5, 1),
        "README.md": TWO_SUBSETS,
    }  # fmt: skip
    there.add("acme/sums", files, kind="dataset")

    main = fetched(section("acme/sums", subset="main", eval_split="test"), tmp_path)
    hard = fetched(section("acme/sums", subset="hard"), tmp_path)

    assert answers(main.source) == ["0", "2", "4"]
    assert answers(main.eval_source) == ["18"]
    assert answers(hard.source) == ["10", "14"]


@pytest.mark.parametrize(
    ("configs", "subset", "expected"),
    [
        ("- {config_name: only, data_files: train.jsonl}", "", "0"),
        ("- {config_name: default, data_files: train.jsonl}\n- {config_name: other, data_files: test.jsonl}", "", "0"),
        ("- {config_name: a, data_files: test.jsonl}\n- {config_name: b, data_files: train.jsonl, default: true}", "", "0"),
        ("- {config_name: a, data_files: {train: test.jsonl}}\n- {config_name: b, data_files: train.jsonl, default: true}", "a", "200"),
        ("- {config_name: a, data_dir: below}", "", "14"),
        ("- {config_name: a, data_dir: below, data_files: '*.jsonl'}", "", "14"),
    ],
    ids=["only", "default", "marked", "mapping", "folder", "folder and pattern"],
)
def test_every_form_in_which_a_card_names_files_is_understood(there, tmp_path, configs, subset, expected):
    there.add("acme/sums", {**SUMS, "below/train.jsonl": lines(7, 1), "README.md": card(configs)}, kind="dataset")

    assert answers(fetched(section("acme/sums", subset=subset), tmp_path).source)[0] == expected


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train.jsonl", "train"), ("data/dev.jsonl", "validation"), ("a/test/0000.jsonl", "test"), ("sums_eval.jsonl", "test"),
        ("data/odd-00000-of-00001.jsonl", "odd"), ("training-set/a.jsonl", "train"), ("sums.jsonl", "train"),
    ],
)  # fmt: skip
def test_without_a_card_files_are_of_the_split_that_they_are_called_after(there, tmp_path, file, split):
    there.add("acme/sums", {file: lines(3, 1), ".hidden/train.jsonl": lines(0, 1), "dataset_infos.json": b"{}"}, kind="dataset")

    assert answers(fetched(section("acme/sums", split=split), tmp_path).source) == ["6"]


def test_without_a_card_a_subset_is_a_folder_as_in_the_parquet_copy_of_the_hub(there, tmp_path):
    there.add("acme/sums", {"sums.csv": b"question,answer\n"}, kind="dataset")
    copy = there.add("acme/sums", {"main/train/0000.parquet": parquet(4, 1), "other/train/0000.parquet": parquet(5, 1)}, kind="dataset")
    there.tag("acme/sums", "refs/convert/parquet", copy, kind="dataset")

    data = fetched(section("acme/sums@refs/convert/parquet", subset="main"), tmp_path)

    assert answers(data.source) == ["8"]


def test_held_out_rows_may_be_of_another_data_set(there, tmp_path):
    there.add("acme/sums", SUMS, kind="dataset")
    there.add("acme/exam", {"test.jsonl": lines(50, 1)}, kind="dataset")

    data = fetched(section("acme/sums", eval_path="acme/exam"), tmp_path)

    assert answers(data.eval_source) == ["100"]
    assert data_rows(data, seed=1).num == 5


def test_a_run_goes_on_with_the_commit_of_its_first_launch(there, tmp_path):
    data = fetched(section("acme/sums") if there.add("acme/sums", SUMS, kind="dataset") else None, tmp_path)
    there.add("acme/sums", {**SUMS, "train.jsonl": lines(50, 9)}, kind="dataset")
    there.requests.clear()

    again = fetched(data, tmp_path)

    assert again.path == data.path
    assert answers(again.source)[0] == "0"
    assert there.requests == []


def test_rows_whose_cache_was_deleted_are_fetched_again(there, tmp_path):
    there.add("acme/sums", SUMS, kind="dataset")
    data = fetched(section("acme/sums"), tmp_path)
    shutil.rmtree(tmp_path / "cache")

    assert fetch(data, tmp_path / "other") == 0
    assert answers(data.source)[0] == "0"
    kept = data_sets.folder_of(data.source).parent
    assert [path.name for path in kept.iterdir()] == [data.source.partition("/")[2]]


def test_nothing_is_taken_for_a_split_that_was_fetched_in_part(there, tmp_path):
    there.add("acme/sums", {f"train-{n:05d}-of-00003.jsonl": lines(n, 1) for n in range(3)}, kind="dataset")
    data = pinned(section("acme/sums"), tmp_path)
    there.broken = True

    assert fetch(data, tmp_path / "run") == 1

    assert not data_sets.folder_of(data.source).exists()
    with pytest.raises(ConfigError, match=r"data set acme/sums@[0-9a-f]{40}:train is not in .*: a launch fetches it"):
        read_rows(data.source)


def test_offline_the_cache_answers_and_the_launch_says_so(there, tmp_path, monkeypatch):
    commit = there.add("acme/sums", SUMS, kind="dataset")
    fetched(section("acme/sums"), tmp_path)
    use(there, monkeypatch, tmp_path, offline=True)
    there.requests.clear()

    changes, said = names.pin(job(section("acme/sums")), tmp_path)

    assert changes == {("tasks", "sums", "data", "path"): f"acme/sums@{commit}"}
    assert said == [f"tasks.sums.data.path=acme/sums: HF_HUB_OFFLINE is set, so commit {commit[:12]} is taken, which the cache has"]
    assert there.requests == []


def test_offline_a_split_that_is_not_in_the_cache_says_what_to_do(there, tmp_path, monkeypatch):
    there.add("acme/sums", SUMS, kind="dataset")
    fetched(section("acme/sums"), tmp_path)
    use(there, monkeypatch, tmp_path, offline=True)

    said = refused(section("acme/sums", eval_split="test"), tmp_path)

    cache = tmp_path / "home" / "rubato"
    assert said == f"tasks.sums.data.path=acme/sums is not in the cache {cache}, and HF_HUB_OFFLINE is set: unset it, or name a file."


def test_a_gated_data_set_says_which_login_has_no_access(there, tmp_path, monkeypatch):
    there.add("acme/gated", SUMS, kind="dataset", gated=True, allowed=("ann",))
    there.users |= {"of-bob": "bob", "of-ann": "ann"}

    use(there, monkeypatch, tmp_path, token="of-bob")
    said = refused(section("acme/gated"), tmp_path)

    assert said.startswith(
        f"tasks.sums.data.path=acme/gated: {there.url}/datasets/acme/gated is gated, and the login bob has no access to it"
    )
    use(there, monkeypatch, tmp_path, token="of-ann")
    assert len(read_rows(fetched(section("acme/gated"), tmp_path).source)) == 5


MANY = "\n".join(f"- {{config_name: s{n}, data_files: train.jsonl}}" for n in range(20))


@pytest.mark.parametrize(
    ("files", "more", "words"),
    [
        (SUMS, {"split": "tset"}, "has no such split: 'tset' is none of test, train. Did you mean test?"),
        (SUMS, {"eval_split": "dev"}, "has no such split: 'dev' is none of test, train."),
        (SUMS, {"subset": "main"}, "has no subset main: its card names none, and it has no such folder."),
        ({"README.md": TWO_SUBSETS}, {}, "has several subsets and no default: name one as subset of the same section. They are main, hard."),
        ({"README.md": card(MANY)}, {}, "s11 and 8 more."),
        ({"README.md": TWO_SUBSETS}, {"subset": "mian"}, "has no such subset: 'mian' is none of main, hard. Did you mean main?"),
        ({"README.md": TWO_SUBSETS}, {"subset": "main"}, "split train in subset main of"),
        ({**SUMS, "README.md": card("- [")}, {}, "begins with what is no YAML: "),
        ({"README.md": b"x" * (data_sets.LARGEST_CARD + 1)}, {}, "has 1,048,577 bytes; at most 1,048,576 are read."),
        ({"README.md": card(f"- {{config_name: a, data_files: '{'*' * 300}'}}")}, {}, "or one of over 256 characters."),
        ({"sums.csv": b"x", "b.arrow": b"x"}, {}, "has no Parquet or JSON lines, but of .csv, .arrow, which are not read. Try the Parquet copy"),
        ({"README.md": card("- {config_name: a, data_files: '*.csv'}"), "a.csv": b"x"}, {}, "has a.csv, which is neither Parquet nor JSON lines."),
        ({"README.md": b""}, {}, "has no Parquet or JSON lines. Try the Parquet copy that the hub makes, acme/sums@refs/convert/parquet,"),
    ],
)  # fmt: skip
def test_a_split_that_can_not_be_read_is_one_sentence_before_anything_is_fetched(there, tmp_path, files, more, words):
    there.add("acme/sums", files, kind="dataset")

    said = refused(section("acme/sums", **more), tmp_path)

    assert said.startswith("tasks.sums.data.path=acme/sums: ")
    assert words in said
    assert not [each for each in there.requests if "/resolve/" in each and "README.md" not in each]


def test_a_split_of_too_many_files_is_refused(there, tmp_path, monkeypatch):
    monkeypatch.setattr(data_sets, "MOST_FILES", 2)
    there.add("acme/sums", {f"train-{n:05d}-of-00003.jsonl": lines(n, 1) for n in range(3)}, kind="dataset")

    assert "has 3 files; at most 2 are read." in refused(section("acme/sums"), tmp_path)


def test_a_name_that_is_not_there_is_told_for_every_task(there, tmp_path):
    tasks = {name: {"data": section(f"acme/{name}").model_dump()} for name in ("one", "two")}

    with pytest.raises(ConfigError) as error:
        names.pin({"tasks": tasks}, tmp_path)

    first, second = str(error.value).splitlines()
    assert first.startswith(
        f"tasks.one.data.path=acme/one: there is no such file or folder here, and {there.url} has no data set acme/one that a visitor"
    )
    assert second.startswith("tasks.two.data.path=acme/two: ")


def test_a_column_that_is_not_there_is_told_once_it_is_fetched(there, tmp_path):
    from rubato.actors.data.tasks import TaskSection

    there.add("acme/sums", SUMS, kind="dataset")
    data = pinned(section("acme/sums", answer="anser"), tmp_path)
    check_tasks({"sums": TaskSection(data=data)})  # nothing to look at yet
    assert fetch(data, tmp_path / "run") == 0

    with pytest.raises(ConfigError) as error:
        check_tasks({"sums": TaskSection(data=data)})

    assert str(error.value) == (
        f"tasks.sums.data.answer: data file {data.source} has no column anser: 'anser' is none of question, answer. Did you mean answer?"
    )


def test_what_is_a_file_here_or_is_called_like_one_is_no_name(tmp_path, monkeypatch):
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "sums").mkdir()
    monkeypatch.chdir(tmp_path)
    commit = "a" * 40

    assert section("acme/sums").source == str(tmp_path / "acme" / "sums")
    assert section("acme/rows.jsonl").source == str(tmp_path / "acme" / "rows.jsonl")
    assert section("./acme/other").source == str(tmp_path / "acme" / "other")
    assert section("acme/other").source == "acme/other:train"
    assert section(f"acme/sums@{commit}", subset="main").source == f"acme/sums@{commit}:main:train"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"path": "/a.jsonl", "split": "test"}, "split=test is of a data set at the hub, and /a.jsonl is a file or folder. Leave it out"),
        ({"path": "/a.jsonl", "subset": "main"}, "subset=main is of a data set at the hub"),
        ({"path": "/a.jsonl", "eval_split": "test"}, "eval_split=test is of a data set at the hub, and /a.jsonl"),
        ({"path": "acme/sums", "eval_path": "/b.jsonl", "eval_split": "test"}, "and /b.jsonl is a file or folder"),
        ({"path": "acme/sums", "eval_split": "train"}, "eval_split is split itself, so what it holds out is trained on"),
        ({"path": "acme/sums", "eval_split": "test", "eval_rows": 3}, "eval_rows=3 has no effect beside eval_split"),
        ({"path": "acme/sums", "split": "train[:9]"}, "split"),
        ({"path": "acme/sums", "subset": "../up"}, "subset"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(more, words):
    with pytest.raises(ValueError, match="validation error") as error:
        DataSection(**more)

    assert words in str(error.value)


def test_the_text_of_a_split_leads_to_a_folder_of_its_own():
    from rubato.actors.config import HubName

    name = HubName("acme/sums", "a" * 40)

    texts = [str(HubRows(name, subset, split)) for subset in ("", "train", "x") for split in ("train", "x")]

    assert len({data_sets.folder_of(text) for text in texts}) == 6


def test_whoever_reads_rows_of_a_hub_loads_no_client_of_it(there, tmp_path):
    there.add("acme/sums", SUMS, kind="dataset")
    data = fetched(section("acme/sums"), tmp_path)
    code = (
        f"import sys; from rubato.actors.data.datasets import read_rows; print(len(read_rows({data.source!r})));"
        "print([name for name in ('datasets', 'httpx', 'huggingface_hub.hf_api') if name in sys.modules])"
    )

    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "HF_HOME": str(tmp_path / "home")}
    )

    assert told.stdout.splitlines() == ["5", "[]"]

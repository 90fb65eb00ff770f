"""What a config says of a taskset of verifiers, and which of its tasks a seed is."""

import os
import shlex
import sys

import pytest

from rubato.actors.envs.make import PINNED, lines, main
from rubato.actors.envs.verifiers import settings_of
from rubato.runtime.errors import ConfigError

TASKS = [b"%d" % number for number in range(23)]


def settings(**more):
    return settings_of({"taskset": "words", "python": "/usr/bin/python3", **more}, "tasks.words.verifiers")


def test_names_are_ids_and_files_are_found_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    named = settings_of({"taskset": {"id": "mine/words.py", "rows": 3}, "harness": "null", "python": ".venv/bin/python"}, "key")

    assert named.taskset == {"id": str(tmp_path / "mine" / "words.py"), "rows": 3}
    assert named.harness == {"id": "null"}
    assert named.python == os.fspath(tmp_path / ".venv/bin/python")


def test_a_seed_is_always_the_same_task_and_no_task_that_is_held_out_is_trained():
    train, held_out, whole = settings(split="train"), settings(split="eval"), settings()

    trained, evaluated = ({each.chosen(TASKS, seed) for seed in range(2_000)} for each in (train, held_out))

    assert train.chosen(TASKS, 7) == train.chosen(TASKS, 7)
    assert trained.isdisjoint(evaluated)
    assert trained | evaluated == set(range(len(TASKS))) == {whole.chosen(TASKS, seed) for seed in range(2_000)}
    assert len(evaluated) == len(TASKS) // 5


def test_of_too_few_tasks_none_is_held_out():
    assert {settings(split=split).chosen([b"0"], 3) for split in ("train", "eval")} == {0}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"taskset": 3}, "tasks.words.verifiers: Expected `object`, got `int` - at `$.taskset`"),
        ({"taskset": {"id": 3}}, "tasks.words.verifiers.taskset: its id is no name of a taskset, nor a path/to/file.py."),
        ({"harness": {"id": []}}, "tasks.words.verifiers.harness: its id is no name of a harness"),
        ({"limit": 0}, "Expected `int` >= 1"),
        ({"envs": 3}, "Object contains unknown field `envs`"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_its_key(more, said):
    with pytest.raises(ConfigError) as refused:
        settings(**more)

    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_line_that_makes_an_environment_has_its_pin():
    venv, install = lines("verifiers", "there", ["mine"])

    assert venv[:2] == ["uv", "venv"]
    assert install[-4:] == ["--python", "there/bin/python", PINNED["verifiers"], "mine"]
    assert "==" in PINNED["verifiers"]


def test_the_command_prints_its_lines_and_without_uv_says_what_to_install(capsys, monkeypatch, tmp_path):
    assert main(["make", "verifiers", "--into", "there"]) == 0
    assert capsys.readouterr().out.splitlines() == [shlex.join(line) for line in lines("verifiers", "there")]

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"uv is not installed: pip install uv\."):
        main(["make", "verifiers", "--run"])


def test_lines_that_fail_are_named(monkeypatch, tmp_path):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nexit 3\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=r"uv venv .* ended with 3"):
        main(["make", "verifiers", "--run", "--into", str(tmp_path / "there")])

"""Configs and examples that come with Rubato: found by name, from any folder."""

from pathlib import Path

import pytest

from rubato.runtime.config import shipped
from rubato.runtime.config.overrides import read
from rubato.runtime.errors import ConfigError, LaunchError
from rubato.runtime.importer import absolute, example, load_object


def test_a_config_of_ours_is_found_by_its_name_from_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert read(Path("quickstart")).tree["run"]["name"] == "quickstart"


def test_a_file_of_that_name_in_the_working_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("run: {name: mine}")

    assert read(Path("quickstart")).tree == {"run": {"name": "mine"}}


def test_no_path_leads_out_of_the_folder_of_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match="a name that rubato configs lists"):
        read(Path("sim/../quickstart"))


def test_the_list_has_every_config_with_what_it_is(capsys):
    assert shipped.main([]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "quickstart" and "FrozenLake" in line for line in lines)
    assert len(lines) == len(list(shipped.FOLDER.glob("*.yaml"))) + 1


def test_one_is_printed_to_be_changed(capsys):
    shipped.main(["quickstart"])

    assert capsys.readouterr().out == (shipped.FOLDER / "quickstart.yaml").read_text()


def test_a_name_that_no_config_has_is_refused():
    with pytest.raises(LaunchError, match="no config is called quickstrat"):
        shipped.main(["quickstrat"])


def test_a_file_of_the_examples_is_found_from_an_empty_folder_and_ones_own_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert example("examples/reverse.jsonl") == str(shipped.EXAMPLES / "reverse.jsonl")
    assert example("examples/none.jsonl") == "examples/none.jsonl"
    assert absolute({"class": "examples/my_env.py:MyEnv"}) == {"class": f"{shipped.EXAMPLES / 'my_env.py'}:MyEnv"}
    assert load_object("examples/my_env.py:MyEnv").ARROWS["<"] == "left"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "reverse.jsonl").write_text("")
    assert example("examples/reverse.jsonl") == "examples/reverse.jsonl"
